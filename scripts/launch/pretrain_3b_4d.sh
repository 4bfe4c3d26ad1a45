#!/usr/bin/env bash
# Pretrains baidu/ernie-3.5-se-3b with four kinds of parallelism at once: tensor (with sequence), pipeline, sharding and,
# on more than one machine, data parallel. Of eight GPUs a machine: 2 tensor x 2 stages x 2 sharding.
#
#   INPUT_DIR=./data bash scripts/launch/pretrain_3b_4d.sh
#   INPUT_DIR=./data bash scripts/launch/pretrain_3b_4d.sh --dry_run --dry_run_devices 64
#   INPUT_DIR=./data NNODES=2 MASTER=10.0.0.1:6170 bash scripts/launch/pretrain_3b_4d.sh       on each machine
#
# CONFIG=configs/pretrain/3b_stage3.json takes sharding stage3 instead. Variables and flags as in pretrain_3b_stage2.sh;
# docs/parallel.md says which layout to choose.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export CONFIG=${CONFIG:-$here/../../configs/pretrain/3b_tp2_pp2.json}
export OUTPUT_DIR=${OUTPUT_DIR:-./output/pretrain_3b_4d}
export LOG_DIR=${LOG_DIR:-./log/pretrain_3b_4d}
exec bash "$here/pretrain_3b_stage2.sh" "$@"
