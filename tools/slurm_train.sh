#!/usr/bin/env bash
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Train under Slurm.
#   [GPUS=8] [GPUS_PER_NODE=8] [CPUS_PER_TASK=5] [SRUN_ARGS=...] \
#   bash tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [arguments of tools/train.py]
# GPUS_PER_NODE=0 requests no GPU and runs GPUS CPU processes over gloo.
set -euo pipefail
unset CDPATH

if [ $# -lt 4 ]; then
    echo "usage: bash $0 PARTITION JOB_NAME CONFIG WORK_DIR [arguments of tools/train.py]" >&2
    exit 2
fi
HERE=$(cd "$(dirname "$0")" && pwd)
GPUS=${GPUS:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
placement=()
if [ "$GPUS_PER_NODE" -gt 0 ]; then
    # request only the GPUs of a job smaller than a node
    per_node=$((GPUS < GPUS_PER_NODE ? GPUS : GPUS_PER_NODE))
    placement=(--gres="gpu:$per_node" --ntasks-per-node="$per_node")
fi
# SRUN_ARGS is a list of words on purpose
# shellcheck disable=SC2086
PYTHONPATH="$HERE/..${PYTHONPATH:+:$PYTHONPATH}" exec srun \
    -p "$1" \
    --job-name="$2" \
    --ntasks="$GPUS" \
    "${placement[@]}" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$HERE/train.py" "$3" --work-dir="$4" --launcher=slurm "${@:5}"
