#!/usr/bin/env bash
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# A Slurm cluster of one node, this machine, in a folder of its own: no file outside of it, no service, any user.
#   bash tests/slurm/cluster.sh start FOLDER     then: export SLURM_CONF=FOLDER/slurm.conf; sinfo
#   bash tests/slurm/cluster.sh stop FOLDER
# Needs munged, slurmctld and slurmd (Debian, Ubuntu: apt-get install --no-install-recommends slurm-wlm munge).
set -euo pipefail

usage() {
  sed -n '3,6s/^# //p' "$0" >&2
  exit 2
}
[ $# -eq 2 ] || usage
mkdir -p "$2"
folder=$(cd "$2" && pwd)
export PATH=$PATH:/usr/sbin:/sbin SLURM_CONF=$folder/slurm.conf
conf=$folder/slurm.conf

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

stop() {
  local name pid
  for name in slurmd slurmctld munged; do
    [ -f "$folder/$name.pid" ] || continue
    pid=$(cat "$folder/$name.pid")
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null && sleep 0.1; done
    kill -9 "$pid" 2>/dev/null || true
    rm -f "$folder/$name.pid"
  done
}

start() {
  local program
  for program in munged slurmctld slurmd srun scontrol; do
    command -v $program >/dev/null || {
      echo "cluster: $program is not installed (Debian, Ubuntu: apt-get install slurm-wlm munge)" >&2
      exit 1
    }
  done
  chmod 755 "$folder"
  mkdir -p "$folder/state" "$folder/spool"
  (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
  # --force: it objects to folders that others may write to, such as /tmp
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" 2>"$folder/munged.err"
  # Two CPUs are said to be there whatever the machine has. Jobs are found by their processes, which needs no cgroups.
  # A requeued job waits until its credential has run out, two minutes unless told otherwise (and set again when the old
  # run's end is noted, which may come after a StartTime=now), and then for the scheduler's next round.
  cat >"$conf" <<CONF
ClusterName=test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
SchedulerParameters=sched_interval=2,bf_interval=2
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=10
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  slurmctld -f "$conf"
  slurmd -f "$conf"
  for _ in $(seq 100); do
    if sinfo -h -o %t 2>/dev/null | grep -q idle; then
      return
    fi
    sleep 0.2
  done
  tail -n 20 "$folder"/*.log >&2
  echo "cluster: it did not start within 20 s, see $folder/*.log" >&2
  stop
  exit 1
}

case $1 in
  start) start ;;
  stop) stop ;;
  *) usage ;;
esac
