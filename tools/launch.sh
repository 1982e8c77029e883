# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Sourced by dist_train.sh and dist_test.sh.

check_port() { # PYTHON: ends with one line where the port of the first process cannot be had
    "$1" - "${PORT:-29500}" <<'END'
import socket
import sys

port = sys.argv[1]
try:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(('', int(port)))
except (OSError, OverflowError, ValueError) as error:
    sys.exit(f'error: PORT = {port} cannot be used ({error}). Set another one in the environment, e.g. PORT=29501.')
END
}

launch() { # PROCESSES SCRIPT [arguments]
    local processes=$1
    local python=${PYTHON:-python}
    if ! [[ $processes =~ ^[1-9][0-9]*$ ]]; then
        echo "error: GPUS='$processes': expected a number of at least 1." >&2
        exit 2
    fi
    local name
    for name in MAX_RESTARTS NODE_RANK; do
        if ! [[ ${!name:-0} =~ ^(0|[1-9][0-9]*)$ ]]; then
            echo "error: $name='${!name}': expected a number of at least 0." >&2
            exit 2
        fi
    done
    local gpus
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null) || {
        echo "error: $python does not import torch: activate the environment (source .venv/bin/activate)." >&2
        exit 1
    }
    if [ "${NODE_RANK:-0}" = 0 ]; then check_port "$python" || exit 1; fi
    if [ "$gpus" -eq 0 ]; then
        echo "notice: no GPU here, $processes processes on the CPU over gloo." >&2
    elif [ "$processes" -gt "$gpus" ]; then
        echo "error: $processes GPUs asked for, and this machine has $gpus." >&2
        exit 1
    fi
    # After a restart, torchrun's default rendezvous waits for the addresses of the processes that died. c10d starts with
    # an empty store, but does not let machines choose their ranks.
    local rendezvous=(
        --node_rank="${NODE_RANK:-0}"
        --master_addr="${MASTER_ADDR:-127.0.0.1}"
        --master_port="${PORT:-29500}"
    )
    if [ "${MAX_RESTARTS:-0}" -gt 0 ]; then
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
        rendezvous=(
            --max_restarts="$MAX_RESTARTS"
            --rdzv_backend=c10d
            --rdzv_endpoint="${MASTER_ADDR:-127.0.0.1}:${PORT:-29500}"
            --rdzv_conf="is_host=$((${NODE_RANK:-0} == 0))"
        )
        if [ "${NNODES:-1}" = 1 ]; then rendezvous+=(--local_addr=127.0.0.1); fi
    fi
    PYTHONPATH="$HERE/..${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$HERE/launch.py" \
        --nnodes="${NNODES:-1}" \
        --nproc_per_node="$processes" \
        "${rendezvous[@]}" \
        "${@:2}"
}
