#!/usr/bin/env bash
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Train on several GPUs, or in several CPU processes without a GPU.
#   bash tools/dist_train.sh CONFIG GPUS [arguments of tools/train.py]
# Environment: NNODES NODE_RANK MASTER_ADDR PORT (several machines), PYTHON (interpreter), MAX_RESTARTS (resumes
# from the last checkpoint after a process died; default 0).
set -euo pipefail
unset CDPATH

if [ $# -lt 2 ]; then
    echo "usage: bash $0 CONFIG GPUS [arguments of tools/train.py]" >&2
    exit 2
fi
HERE=$(cd "$(dirname "$0")" && pwd)
CONFIG=$1
GPUS=$2
source "$HERE/launch.sh"
launch "$GPUS" "$HERE/train.py" "$CONFIG" --launcher pytorch "${@:3}"
