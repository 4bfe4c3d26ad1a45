#!/usr/bin/env bash
# Answers prompts with one model whose layers the GPUs of one machine share: for a model that one GPU cannot hold.
#
#   MODEL=./output/sft_3b DATA=prompts.jsonl NPROC=2 bash scripts/launch/predict_tp.sh
#   MODEL=... DATA=... NPROC=2 bash scripts/launch/predict_tp.sh --lora_path ./output/lora_3b --batch_size 8
#
# NPROC must divide the model's heads, FFN width and vocabulary. Flags at the end go to scripts/predict.py. Every process
# writes its log to LOG_DIR/workerlog.N; the first one writes the answers.
set -euo pipefail
NPROC=${NPROC:-2}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # DEVICE, NNODES, MASTER, PYTHON

MODEL=${MODEL:-./output/sft_3b}                             # a folder with weights and tokenizer
DATA=${DATA:-}                                              # prompts, docs/prediction.md; empty: some examples
OUTPUT=${OUTPUT:-./prediction.json}                         # the answers
LOG_DIR=${LOG_DIR:-./log/predict_tp}
OUTPUT_DIR=$OUTPUT

[ "$DEVICE" != gpu ] || [ -z "${CUDA_VISIBLE_DEVICES:-}" ] || NPROC=$(awk -F, '{print NF}' <<<"$CUDA_VISIBLE_DEVICES")
launch "$root/scripts/predict.py" --model_name_or_path "$MODEL" ${DATA:+--data_file "$DATA"} --predict_file "$OUTPUT" \
    --device "$DEVICE" --tensor_parallel_degree $((NPROC * NNODES)) "$@"
