#!/usr/bin/env bash
# Fine-tuning on what scripts/demo.sh pretrained: from a function's signature to the first line of its docstring.
#
#   bash scripts/demo_finetune.sh                     some 90 s of CPU; runs scripts/demo.sh first if need be
#   bash scripts/demo_finetune.sh --max_steps 400     flags after it go to the LoRA run
#   ERNIE35SE_DEMO_DIR=/tmp/demo bash scripts/demo_finetune.sh
#
# Held-out loss of the pretrained model, LoRA, held-out loss again, the adapter merged into the weights, three answers of the
# merged model. What is there already is reused; delete a folder to do its step again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

demo=${ERNIE35SE_DEMO_DIR:-output/demo}
case "$demo" in /*) ;; *) [ -z "${ERNIE35SE_DEMO_DIR:-}" ] || demo="$PWD/$demo" ;; esac

make_venv
cd "$root"
# As in demo.sh: warnings at import that a user cannot mend.
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
[ -e "$demo/model/config.json" ] || bash scripts/demo.sh
SECONDS=0

config=(configs/finetune/demo_cpu.json --dataset_name_or_path "$demo/instructions")
only_evaluate=(--lora 0 --do_train 0 --load_best_model_at_end 0 --evaluation_strategy no)

step "$demo/instructions/dev.jsonl" "making instruction data" \
    "$python" tools/make_demo_instructions.py --output_dir "$demo/instructions"
step "$demo/before/eval_results.json" "evaluating the pretrained model" \
    "$python" scripts/run_finetune.py "${config[@]}" --model_name_or_path "$demo/model" \
    --output_dir "$demo/before" "${only_evaluate[@]}"
step "$demo/lora/eval_results.json" "training LoRA and evaluating" \
    "$python" scripts/run_finetune.py "${config[@]}" --model_name_or_path "$demo/model" --output_dir "$demo/lora" "$@"
step "$demo/merged/config.json" "merging the adapter" \
    "$python" tools/merge_lora_params.py --model_name_or_path "$demo/model" --lora_path "$demo/lora" \
    --output_path "$demo/merged"
mkdir -p "$demo/questions"
sed -n '2p;60p;140p' "$demo/instructions/dev.jsonl" >"$demo/questions/dev.jsonl"
step "$demo/answers/eval_results.json" "asking the merged model three questions" \
    "$python" scripts/run_finetune.py "${config[@]}" --model_name_or_path "$demo/merged" \
    --dataset_name_or_path "$demo/questions" --output_dir "$demo/answers" "${only_evaluate[@]}" --eval_with_do_generation 1

"$python" - "$demo" <<'PYTHON'
import json, sys
from pathlib import Path

demo = Path(sys.argv[1])
before, after = (json.loads((demo / name / "eval_results.json").read_text()) for name in ("before", "lora"))
print()
for line in (demo / "answers" / "generated-0.jsonl").read_text(encoding="utf-8").splitlines():
    answer = json.loads(line)
    print(f"{answer['prompt']}{answer['generated']}\n  (the docstring: {answer['reference']})\n")
print(f"Held-out loss {before['eval_loss']:.3f} -> {after['eval_loss']:.3f} nats per token, "
      f"accuracy {before['eval_accuracy']:.1%} -> {after['eval_accuracy']:.1%}.")
PYTHON
say "done in $SECONDS s; the adapter is $demo/lora, the merged model $demo/merged, the curves $demo/lora/curves.png"
