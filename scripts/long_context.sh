#!/usr/bin/env bash
# Train short, predict long: two small models that differ only in the positions they are trained on, and the perplexity of
# both at 1, 2, 4 and 8 times the 64 tokens they were trained at (the claim of Ruoss et al. 2023).
#
#   bash scripts/long_context.sh                     about 20 minutes of one core's time, after the install
#   bash scripts/long_context.sh --max_steps 6000    flags after it go to both runs of scripts/run_pretrain.py
#   ERNIE35SE_LONG_CONTEXT_DIR=/tmp/long bash scripts/long_context.sh
#
# The text is the demo's, in 1024 pieces. What is there already is reused, and an interrupted run continues.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

out=${ERNIE35SE_LONG_CONTEXT_DIR:-output/long_context}
case "$out" in /*) ;; *) [ -z "${ERNIE35SE_LONG_CONTEXT_DIR:-}" ] || out="$PWD/$out" ;; esac

make_venv
build_op
cd "$root"
# As in demo.sh: warnings at import that a user cannot mend.
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
SECONDS=0

step "$out/corpus.jsonl" "collecting text" \
    "$python" tools/make_demo_corpus.py --output_path "$out/corpus.jsonl"
step "$out/tokenizer/sentencepiece.bpe.model" "training the tokenizer" \
    "$python" tools/train_tokenizer.py --input_path "$out/corpus.jsonl" --output_dir "$out/tokenizer" --vocab_size 1024
step "$out/corpus_idx.npz" "writing token files" \
    "$python" tools/create_pretraining_data.py --input_path "$out/corpus.jsonl" \
    --tokenizer_name_or_path "$out/tokenizer" --output_prefix "$out/corpus"

sed 's/"enable_random_position_ids": true/"enable_random_position_ids": false/' configs/model/long_context.json >"$out/plain.json"
cp configs/model/long_context.json "$out/random.json"
for positions in random plain; do
    step "$out/$positions/eval_results.json" "training on $positions positions" \
        "$python" scripts/run_pretrain.py configs/pretrain/long_context_cpu.json --model_name_or_path "$out/$positions.json" \
        --tokenizer_name_or_path "$out/tokenizer" --input_dir "$out/corpus" --output_dir "$out/$positions" \
        --use_fused_ln "$fused_ln" "$@"
done

say "measuring both on all of the held-out text"
"$python" tools/eval_long_context.py "$out/random" "$out/plain" --input_prefix "$out/corpus" --split 90,10,0 \
    --train_length 64 --windows 1000 --output_dir "$out"
say "done in $SECONDS s"
