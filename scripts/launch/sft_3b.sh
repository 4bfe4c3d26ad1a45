#!/usr/bin/env bash
# Fine-tunes all weights of a 3B model on the GPUs of one machine, with sharding stage 2.
#
#   MODEL=./output/pretrain_3b_stage2 DATA=./data bash scripts/launch/sft_3b.sh
#   MODEL=... DATA=... SHARDING= bash scripts/launch/sft_3b.sh --tensor_parallel_degree 2
#
# Flags at the end override the settings of CONFIG. Every process writes its log to LOG_DIR/workerlog.N.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

CONFIG=${CONFIG:-$root/configs/finetune/sft.json}
MODEL=${MODEL:-./output/pretrain_3b_stage2}                 # a folder with weights and tokenizer
DATA=${DATA:-./data}                                        # a folder with train and dev files
OUTPUT_DIR=${OUTPUT_DIR:-./output/sft_3b}
LOG_DIR=${LOG_DIR:-./log/sft_3b}
SHARDING=${SHARDING-stage2}
DEVICE=${DEVICE:-gpu}
NPROC=${NPROC:-8}                                           # processes here, one a GPU; CUDA_VISIBLE_DEVICES wins
NNODES=${NNODES:-1}                                         # more than one: set MASTER on each machine
MASTER=${MASTER:-}                                          # address:port of the first machine
PYTHON=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python)}

if [ "$DEVICE" = gpu ]; then
    gpus=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((NPROC - 1)))}
    places=(--devices "$gpus")
    NPROC=$(awk -F, '{print NF}' <<<"$gpus")
else
    places=(--nproc_per_node "$NPROC")
fi
echo "logs: $LOG_DIR/workerlog.0 to workerlog.$((NPROC - 1)); output: $OUTPUT_DIR"
exec "$PYTHON" -m paddle.distributed.launch "${places[@]}" --log_dir "$LOG_DIR" \
    --nnodes "$NNODES" ${MASTER:+--master "$MASTER"} "$root/scripts/run_finetune.py" "$CONFIG" \
    --model_name_or_path "$MODEL" --dataset_name_or_path "$DATA" --output_dir "$OUTPUT_DIR" --device "$DEVICE" \
    ${SHARDING:+--sharding "$SHARDING"} "$@"
