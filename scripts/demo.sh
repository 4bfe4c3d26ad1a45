#!/usr/bin/env bash
# The whole job on one small corpus: text -> tokenizer -> token files -> pretraining -> held-out loss and loss curve.
#
#   bash scripts/demo.sh                     about 5 minutes on 2 idle cores, after the install
#   bash scripts/demo.sh --max_steps 400     flags after it go to scripts/run_pretrain.py
#   ERNIE35SE_DEMO_DIR=/tmp/demo bash scripts/demo.sh
#
# What is there already is reused, so a second run takes seconds, and one that was interrupted continues.
# To do a step again with other settings, delete what it made and what follows from that (or the whole folder).
# scripts/venv.sh says which environment variables choose the interpreter and the build of Paddle.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

# Paths named on the command line mean the caller's folder; everything below runs in the repository.
demo=${ERNIE35SE_DEMO_DIR:-output/demo}
case "$demo" in /*) ;; *) [ -z "${ERNIE35SE_DEMO_DIR:-}" ] || demo="$PWD/$demo" ;; esac

make_venv
build_op
cd "$root"
data=(--input_dir "$demo/corpus" --tokenizer_name_or_path "$demo/tokenizer")
settings=(configs/pretrain/demo_cpu.json "${data[@]}" --output_dir "$demo/model" --use_fused_ln "$fused_ln" "$@")
# At import, Paddle warns of a missing ccache, and PaddleNLP of distutils: nothing that a user can mend.
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
SECONDS=0

step "$demo/corpus.jsonl" "collecting text" \
    "$python" tools/make_demo_corpus.py --output_path "$demo/corpus.jsonl"
step "$demo/tokenizer/sentencepiece.bpe.model" "training the tokenizer" \
    "$python" tools/train_tokenizer.py --input_path "$demo/corpus.jsonl" --output_dir "$demo/tokenizer" \
    --vocab_size 4096
step "$demo/corpus_idx.npz" "writing token files" \
    "$python" tools/create_pretraining_data.py --input_path "$demo/corpus.jsonl" \
    --tokenizer_name_or_path "$demo/tokenizer" --output_prefix "$demo/corpus"
step "$demo/model/eval_results.json" "pretraining and evaluating" \
    "$python" scripts/run_pretrain.py "${settings[@]}"

say "comparing the held-out loss with a unigram model's"
"$python" tools/unigram_baseline.py "${settings[@]}" | tee "$demo/held_out_loss.txt"

cat <<EOF

Done in $SECONDS s. The loss curve is $demo/model/curves.png
Commands to try next, in $root after: source .venv/bin/activate

  # what the training saw
  python tools/inspect_data.py --input_path $demo/corpus --tokenizer_name_or_path $demo/tokenizer
  # settings, memory, FLOPs and a sample of a larger run, without running it
  python scripts/run_pretrain.py configs/pretrain/demo_cpu.json --model_name_or_path ernie/tiny-random-ernie \\
      ${data[*]} --output_dir output/tiny --dry_run
  # longer, into another folder
  python scripts/run_pretrain.py configs/pretrain/demo_cpu.json \\
      ${data[*]} --output_dir $demo/longer --max_steps 2000
  # what the model answers
  python scripts/predict.py --model_name_or_path $demo/model
  # logs in a browser
  visualdl --logdir $demo/model/runs
  # fine-tuning it with LoRA
  ${ERNIE35SE_DEMO_DIR:+ERNIE35SE_DEMO_DIR=$demo }bash scripts/demo_finetune.sh
  # all tests
  bash scripts/test.sh
EOF
