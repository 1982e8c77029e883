# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Sourced by dist_train.sh and dist_test.sh.

launch() { # PROCESSES SCRIPT [arguments]
    local processes=$1
    local python=${PYTHON:-python}
    if ! [[ $processes =~ ^[1-9][0-9]*$ ]]; then
        echo "error: GPUS = '$processes' has to be a number from 1 up." >&2
        exit 2
    fi
    local gpus
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
    if [ "$gpus" -eq 0 ]; then
        echo "notice: no GPU here, $processes processes on the CPU over gloo." >&2
    elif [ "$processes" -gt "$gpus" ]; then
        echo "error: $processes GPUs asked for, and this machine has $gpus." >&2
        exit 1
    fi
    PYTHONPATH="$HERE/..${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m torch.distributed.run \
        --nnodes="${NNODES:-1}" \
        --node_rank="${NODE_RANK:-0}" \
        --master_addr="${MASTER_ADDR:-127.0.0.1}" \
        --master_port="${PORT:-29500}" \
        --nproc_per_node="$processes" \
        "${@:2}"
}
