#!/usr/bin/env bash
# Pretrains baidu/ernie-3.5-se-3b on the eight A100 (80 GB) of one machine, with sharding stage 2.
#
#   INPUT_DIR=./data bash scripts/launch/pretrain_3b_stage2.sh
#   INPUT_DIR=./data bash scripts/launch/pretrain_3b_stage2.sh --dry_run      settings and memory only, on one CPU
#   INPUT_DIR="0.3 ./a 0.7 ./b" bash scripts/launch/pretrain_3b_stage2.sh --max_steps 1000
#
# Flags at the end override the settings of CONFIG. Every process writes its log to LOG_DIR/workerlog.N.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

CONFIG=${CONFIG:-$root/configs/pretrain/3b_stage2.json}     # or configs/pretrain/3b_stage2_throughput.json
MODEL=${MODEL:-baidu/ernie-3.5-se-3b}                       # a built-in name, or a folder with config.json
TOKENIZER=${TOKENIZER:-}                                    # a folder; empty: the one that CONFIG names
INPUT_DIR=${INPUT_DIR:-./data}                              # a folder of token files, a prefix, or weights and prefixes
OUTPUT_DIR=${OUTPUT_DIR:-./output/pretrain_3b_stage2}
LOG_DIR=${LOG_DIR:-./log/pretrain_3b_stage2}
DEVICE=${DEVICE:-gpu}
NPROC=${NPROC:-8}                                           # processes here, one a GPU; CUDA_VISIBLE_DEVICES wins
NNODES=${NNODES:-1}                                         # more than one: set MASTER on each machine
MASTER=${MASTER:-}                                          # address:port of the first machine
PYTHON=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python)}

settings=("$CONFIG" --model_name_or_path "$MODEL" ${TOKENIZER:+--tokenizer_name_or_path "$TOKENIZER"}
    --input_dir "$INPUT_DIR" --output_dir "$OUTPUT_DIR")

case " $* " in
    *" --dry_run false "* | *" --dry_run=false "* | *" --dry_run 0 "* | *" --dry_run=0 "*) ;;
    *" --dry_run"[\ =]*) exec "$PYTHON" "$root/scripts/run_pretrain.py" "${settings[@]}" --device "$DEVICE" "$@" ;;
esac

if [ "$DEVICE" = gpu ]; then
    gpus=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((NPROC - 1)))}
    places=(--devices "$gpus")
    NPROC=$(awk -F, '{print NF}' <<<"$gpus")
else
    places=(--nproc_per_node "$NPROC")
fi
echo "logs: $LOG_DIR/workerlog.0 to workerlog.$((NPROC - 1)); output: $OUTPUT_DIR"
exec "$PYTHON" -m paddle.distributed.launch "${places[@]}" --log_dir "$LOG_DIR" \
    --nnodes "$NNODES" ${MASTER:+--master "$MASTER"} \
    "$root/scripts/run_pretrain.py" "${settings[@]}" --device "$DEVICE" "$@"
