#!/usr/bin/env bash
# Fine-tunes all weights of a 3B model on the GPUs of one machine, with sharding stage 2.
#
#   MODEL=./output/pretrain_3b_stage2 DATA=./data bash scripts/launch/sft_3b.sh
#   MODEL=... DATA=... SHARDING= bash scripts/launch/sft_3b.sh --tensor_parallel_degree 2
#   MODEL=... DATA=... bash scripts/launch/sft_3b.sh --dry_run      data, settings and memory only, on one CPU
#
# Flags at the end override the settings of CONFIG. Every process writes its log to LOG_DIR/workerlog.N.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # DEVICE, NPROC, NNODES, MASTER, PYTHON

CONFIG=${CONFIG:-$root/configs/finetune/sft.json}
MODEL=${MODEL:-./output/pretrain_3b_stage2}                 # a folder with weights and tokenizer
DATA=${DATA:-./data}                                        # a folder with train and dev files
OUTPUT_DIR=${OUTPUT_DIR:-./output/sft_3b}
LOG_DIR=${LOG_DIR:-./log/sft_3b}
SHARDING=${SHARDING-stage2}

launch "$root/scripts/run_finetune.py" "$CONFIG" --model_name_or_path "$MODEL" --dataset_name_or_path "$DATA" \
    --output_dir "$OUTPUT_DIR" --device "$DEVICE" ${SHARDING:+--sharding "$SHARDING"} "$@"
