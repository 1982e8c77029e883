#!/usr/bin/env bash
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Train on several GPUs, or on several CPU processes where there is no GPU.
#   bash tools/dist_train.sh CONFIG GPUS [arguments of tools/train.py]
# Environment: NNODES NODE_RANK MASTER_ADDR PORT (several machines), PYTHON (the interpreter), MAX_RESTARTS (how often a
# run goes on from its last checkpoint by itself after one of its processes died; 0).
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
