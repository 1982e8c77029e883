#!/usr/bin/env bash
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Set up the environment, lint, run the fast and the slow tests. See --help.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'USAGE'
usage: tools/run_tests.sh [--with-onedl] [--with-newest] [--use-existing] [pytest arguments]

Without pytest arguments: ruff, mypy, the fast tests, those of ops, attentions and layers again with the
reference backends, then the slow tests; stops at the first failing step. If CI is set, both --with
options apply. With pytest arguments: one pytest run with these.

  --with-newest    the fast tests of ops, attentions, layers, hosts and engine, and one train -> resume
                   -> test round, on the newest PyTorch (requirements/lock-newest.txt)
  --with-onedl     the fast tests of the engine, and one such round, on the onedl-* distributions
  --use-existing   in the active Python instead of .venv (as does MMLINATTN_USE_EXISTING_ENV=1)
USAGE
}

ci=${CI:-}
case $ci in 0 | false) ci='' ;; esac
onedl=$ci newest=$ci arguments=()
for argument in "$@"; do
  case $argument in
    --with-onedl) onedl=1 ;;
    --with-newest) newest=1 ;;
    --use-existing) export MMLINATTN_USE_EXISTING_ENV=1 ;;
    -h | --help) usage && exit 0 ;;
    *) arguments+=("$argument") ;;
  esac
done

# Often set in containers: each of the hundreds of processes started by tests would compile PyTorch's modules again.
unset PYTHONDONTWRITEBYTECODE

# speed and rounding depend on these
cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1 || true)
units=$(grep -m 1 '^flags' /proc/cpuinfo 2>/dev/null | tr ' ' '\n' | grep -xE 'avx2|avx512f|avx512_bf16|amx_bf16|amx_int8' | tr '\n' ' ' || true)
echo "run_tests: ${cpu:-unknown CPU}, $(nproc 2>/dev/null || echo '?') cores, units: ${units:-none known}" >&2

py=$(tools/setup_env.sh)
"$py" -c 'import mypy, pytest, ruff, xdist' 2>/dev/null || {
  echo "run_tests: $py lacks mypy, pytest, pytest-xdist or ruff: $py -m pip install -r requirements/tests.txt" >&2
  exit 1
}

# pytest exits with 5 if a selection is empty
pytest_if_any() {
  local status=0
  "$@" || status=$?
  [ "$status" = 5 ] || return "$status"
}

if [ ${#arguments[@]} -gt 0 ]; then
  exec "$py" -m pytest "${arguments[@]}"
fi

# in parallel to lint, which uses one core
make_others() {
  export MMLINATTN_USE_EXISTING_ENV=''
  [ -z "$onedl" ] || tools/setup_env.sh --stack onedl >/dev/null
  [ -z "$newest" ] || tools/setup_env.sh --venv .venv-newest --lock requirements/lock-newest.txt >/dev/null
}
if [ -n "$newest" ] && ! "$py" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo 'run_tests: the newest PyTorch needs Python 3.11: skipped' >&2
  newest=''
fi
make_others & making=$!

"$py" -m ruff check .
"$py" -m ruff format --check .
"$py" -m mypy
wait "$making"

# glibc would return the memory of large tensors and request the same pages again
export MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=268435456

# One single-threaded process per core: the tensors of the tests are too small for threads. Slow tests of a file stay
# together, since they share trained models.
cores=$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2) # nproc obeys OMP_NUM_THREADS
workers=$((cores < 8 ? cores : 8))
OMP_NUM_THREADS=1 "$py" -m pytest -n "$workers" --dist worksteal -m 'not slow'
# reference backends, used by compilers, exporters and unknown devices
MMLINATTN_OPS=reference OMP_NUM_THREADS=1 "$py" -m pytest -n "$workers" --dist worksteal -m 'not slow' \
  --ignore tests/ops/test_dispatch.py \
  tests/attention tests/layers tests/ops tests/backbones/test_hosts_parity.py
OMP_NUM_THREADS=1 pytest_if_any "$py" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder --durations=20 -m slow

export OMP_NUM_THREADS=1
if [ -n "$newest" ]; then
  .venv-newest/bin/python -m pytest -n "$workers" --dist worksteal -m 'not slow' \
    tests/attention tests/backbones tests/engine tests/layers tests/ops
fi
[ -z "$onedl" ] || .venv-onedl/bin/python -m pytest -n "$workers" --dist worksteal -m 'not slow' tests/engine
for venv in ${newest:+.venv-newest} ${onedl:+.venv-onedl}; do
  pytest_if_any "$venv/bin/python" -m pytest -m roundtrip tests/tools/test_roundtrip.py
done
