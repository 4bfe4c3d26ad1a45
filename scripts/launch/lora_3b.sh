#!/usr/bin/env bash
# Fine-tunes a 3B model by LoRA on the GPUs of one machine, data parallel. Variables and flags as in sft_3b.sh.
#
#   MODEL=./output/pretrain_3b_stage2 DATA=./data bash scripts/launch/lora_3b.sh
#   MODEL=... DATA=... NPROC=2 bash scripts/launch/lora_3b.sh --tensor_parallel_degree 2
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export CONFIG=${CONFIG:-$here/../../configs/finetune/lora.json}
export OUTPUT_DIR=${OUTPUT_DIR:-./output/lora_3b}
export LOG_DIR=${LOG_DIR:-./log/lora_3b}
export SHARDING=${SHARDING-}
exec bash "$here/sft_3b.sh" "$@"
