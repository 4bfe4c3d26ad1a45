#!/usr/bin/env bash
# Train short, predict long: two small models that differ only in the positions they are trained on, and the perplexity of
# both at 1, 2, 4 and 8 times the length they were trained at (the claim of Ruoss et al. 2023).
#
#   bash scripts/demo.sh && bash scripts/long_context.sh
#   bash scripts/long_context.sh --max_steps 2000    flags after it go to scripts/run_pretrain.py
#
# It uses the demo's corpus and tokenizer. Both runs continue where an interrupted one stopped.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

demo=${ERNIE35SE_DEMO_DIR:-output/demo}
out=${ERNIE35SE_LONG_CONTEXT_DIR:-output/long_context}
make_venv
cd "$root"
[ -e "$demo/corpus_idx.npz" ] || fail "$demo/corpus_idx.npz is missing; run scripts/demo.sh first, or set ERNIE35SE_DEMO_DIR"
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
mkdir -p "$out"
sed 's/"enable_random_position_ids": true/"enable_random_position_ids": false/' configs/model/demo.json > "$out/plain.json"

for positions in random plain; do
    config=configs/model/demo.json
    [ "$positions" = random ] || config="$out/plain.json"
    if [ ! -e "$out/$positions/eval_results.json" ]; then
        say "training on $positions positions"
        "$python" scripts/run_pretrain.py configs/pretrain/demo_cpu.json --model_name_or_path "$config" \
            --input_dir "$demo/corpus" --tokenizer_name_or_path "$demo/tokenizer" --output_dir "$out/$positions" "$@"
    fi
done
"$python" tools/eval_long_context.py "$out/random" "$out/plain" --input_prefix "$demo/corpus" --split 90,10,0 \
    --train_length 256 --output_dir "$out"
