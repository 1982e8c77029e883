#!/usr/bin/env bash
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Test on several GPUs, or in several CPU processes without a GPU.
#   bash tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of tools/test.py]
# Environment: NNODES NODE_RANK MASTER_ADDR PORT (several machines), PYTHON (interpreter).
set -euo pipefail
unset CDPATH

if [ $# -lt 3 ]; then
    echo "usage: bash $0 CONFIG CHECKPOINT GPUS [arguments of tools/test.py]" >&2
    exit 2
fi
HERE=$(cd "$(dirname "$0")" && pwd)
CONFIG=$1
CHECKPOINT=$2
GPUS=$3
source "$HERE/launch.sh"
launch "$GPUS" "$HERE/test.py" "$CONFIG" "$CHECKPOINT" --launcher pytorch "${@:4}"
