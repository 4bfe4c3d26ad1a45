#!/usr/bin/env bash
# Pretrains baidu/ernie-3.5-se-3b on the eight A100 (80 GB) of one machine, with sharding stage 2.
#
#   INPUT_DIR=./data bash scripts/launch/pretrain_3b_stage2.sh
#   INPUT_DIR=./data bash scripts/launch/pretrain_3b_stage2.sh --dry_run      settings and memory only, on one CPU
#   INPUT_DIR="0.3 ./a 0.7 ./b" bash scripts/launch/pretrain_3b_stage2.sh --max_steps 1000
#
# Flags at the end override the settings of CONFIG. Every process writes its log to LOG_DIR/workerlog.N.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # DEVICE, NPROC, NNODES, MASTER, PYTHON

CONFIG=${CONFIG:-$root/configs/pretrain/3b_stage2.json}     # or configs/pretrain/3b_stage2_throughput.json
MODEL=${MODEL:-baidu/ernie-3.5-se-3b}                       # a built-in name, or a folder with config.json
TOKENIZER=${TOKENIZER:-}                                    # a folder; empty: the one that CONFIG names
INPUT_DIR=${INPUT_DIR:-./data}                              # a folder of token files, a prefix, or weights and prefixes
OUTPUT_DIR=${OUTPUT_DIR:-./output/pretrain_3b_stage2}
LOG_DIR=${LOG_DIR:-./log/pretrain_3b_stage2}

launch "$root/scripts/run_pretrain.py" "$CONFIG" --model_name_or_path "$MODEL" \
    ${TOKENIZER:+--tokenizer_name_or_path "$TOKENIZER"} --input_dir "$INPUT_DIR" --output_dir "$OUTPUT_DIR" \
    --device "$DEVICE" "$@"
