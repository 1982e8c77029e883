#!/usr/bin/env bash
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Train on two machines of two network namespaces, and kill the launcher of the second one: it joins again, and both
# resume from the checkpoint of the first. Unprivileged: bash tests/tools/two_machines.sh CONFIG WORK_DIR [unshared]
# With `unshared`, the second machine sees an empty work dir: resuming has to end in an error.
set -eu
if [ -z "${IN_NAMESPACE:-}" ]; then IN_NAMESPACE=1 exec unshare -Urnm --kill-child bash "$0" "$@"; fi
config=$1 work=$2 mode=${3:-shared}
tools=$(cd "$(dirname "$0")/../../tools" && pwd)
mount -t tmpfs tmpfs /run && mkdir /run/netns
ip link set lo up
ip netns add second
ip link add here type veth peer name there netns second
ip addr add 10.9.9.1/24 dev here && ip link set here up
ip -n second addr add 10.9.9.2/24 dev there && ip -n second link set there up && ip -n second link set lo up
export NNODES=2 MASTER_ADDR=10.9.9.1 PORT=29511 OMP_NUM_THREADS=1 MAX_RESTARTS=3
resume=()
if [ "$mode" = unshared ]; then resume=(--resume) MAX_RESTARTS=0; fi
first() { GLOO_SOCKET_IFNAME=here PET_LOCAL_ADDR=10.9.9.1 NODE_RANK=0 bash "$tools/dist_train.sh" "$config" 1 --work-dir "$work" "${resume[@]}"; }
second() {
    local hide=true
    if [ "$mode" = unshared ]; then hide="mount -t tmpfs tmpfs '$work'"; fi
    GLOO_SOCKET_IFNAME=there PET_LOCAL_ADDR=10.9.9.2 NODE_RANK=1 ip netns exec second unshare -m bash -c \
        "$hide"' && exec bash "$@"' - "$tools/dist_train.sh" "$config" 1 --work-dir "$work" "${resume[@]}"
}
first > "$work.first.log" 2>&1 & one=$!
second > "$work.second.log" 2>&1 & two=$!
if [ "$mode" = shared ]; then
    until [ -e "$work/last_checkpoint" ] || ! kill -0 $one; do sleep 0.2; done
    pkill -9 -P $two || true # the launcher; its worker ends with it
    kill -9 $two 2> /dev/null || true
    second > "$work.again.log" 2>&1 & two=$!
fi
status=0
wait $one || status=$?
wait $two || status=$((status + $?))
tail -n 3 "$work".*.log
exit $status
