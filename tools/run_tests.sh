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
reference backends, then the slow tests. Failed tests run a second time, in one process. The end lists the
time and result of each step. If CI is set, both --with options apply. With pytest arguments: one pytest run
with these.

  --with-newest    lint, types, the fast tests of ops, attentions, layers, backbones and engine, and one train ->
                   resume -> test round, on the newest PyTorch (requirements/lock-newest.txt) and Python
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

# Failed tests (status 1) run again in one process: a loaded machine fails some, or kills a worker. An empty selection (5)
# passes, except in this second run.
run_pytest() {
  local status=0
  "$@" || status=$?
  if [ "$status" = 1 ]; then
    second_run=1
    "$@" -n 0 --last-failed --last-failed-no-failures none
  else
    [ "$status" = 5 ] || return "$status"
  fi
}

if [ ${#arguments[@]} -gt 0 ]; then
  exec "$py" -m pytest "${arguments[@]}"
fi

# glibc would return the memory of large tensors and request the same pages again
export MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=268435456

# One single-threaded process per core: the tensors of the tests are too small for threads. Slow tests of a file stay
# together, since they share trained models.
cores=$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2) # nproc obeys OMP_NUM_THREADS
workers=$((cores < 8 ? cores : 8))

report=''
step() { # NAME COMMAND...: run a step and note its time and result; the next steps run after a failure too
  local name=$1 started=$SECONDS status=0 result=passed second_run=''
  shift
  echo "== $name" >&2
  "$@" || status=$?
  [ -z "$second_run" ] || result='passed, some tests in a second run only'
  [ "$status" = 0 ] || result=FAILED
  report+=$(printf '%-34s %6d s  %s' "$name" $((SECONDS - started)) "$result")$'\n'
}
# ruff on the files that git tracks: a reader's own config may lie beside them
lint() {
  local files=() file
  while IFS= read -r file; do [ ! -e "$file" ] || files+=("$file"); done < \
    <(git -c safe.directory='*' ls-files -- '*.py' '*.ipynb' 2>/dev/null)
  [ ${#files[@]} -gt 0 ] || files=(.)
  "$1" -m ruff check --force-exclude "${files[@]}" && "$1" -m ruff format --check --force-exclude "${files[@]}"
}
# the newest Python that works; pyenv's need not be on PATH
newest_python() {
  local candidate
  for candidate in python3.14 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.14*/bin/python \
    python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python; do
    if "$candidate" -c '' 2>/dev/null; then echo "$candidate" && return; fi
  done
  echo "$py"
}

pythons=("$py")
if [ -n "$newest" ]; then
  python=$(newest_python)
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  if [ "$version" = 3.10 ]; then
    echo 'run_tests: the newest PyTorch needs Python 3.11: skipped' >&2
    newest=''
  else
    newest=.venv-newest-$version
    pythons+=("$newest/bin/python")
  fi
fi
# in parallel to the first lint, which uses one core
make_others() {
  local status=0
  export MMLINATTN_USE_EXISTING_ENV=''
  [ -z "$newest" ] || tools/setup_env.sh --venv "$newest" --lock requirements/lock-newest.txt --python "$python" >/dev/null || status=1
  [ -z "$onedl" ] || tools/setup_env.sh --stack onedl >/dev/null || status=1
  return $status
}
make_others & making=$!
for python in "${pythons[@]}"; do
  [ "$python" = "$py" ] || step 'other environments' wait "$making"
  step "lint, ${python#"$PWD"/}" lint "$python"
  step "types, ${python#"$PWD"/}" "$python" -m mypy
done
wait "$making" || true

export OMP_NUM_THREADS=1
fast=(-m pytest -n "$workers" --dist worksteal -m 'not slow')
step 'fast tests' run_pytest "$py" "${fast[@]}"
# used by compilers, exporters and unknown devices
step 'reference backends' run_pytest env MMLINATTN_OPS=reference "$py" "${fast[@]}" --ignore tests/ops/test_dispatch.py \
  tests/attention tests/layers tests/ops tests/backbones/test_backbones_parity.py
step 'slow tests' run_pytest "$py" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder --durations=20 -m slow
if [ -n "$newest" ]; then
  step 'fast tests, newest PyTorch' run_pytest "$newest/bin/python" "${fast[@]}" \
    tests/attention tests/backbones tests/engine tests/layers tests/ops
fi
[ -z "$onedl" ] || step 'fast tests, onedl' run_pytest .venv-onedl/bin/python "${fast[@]}" tests/engine
for venv in $newest ${onedl:+.venv-onedl}; do
  step "train, resume and test, $venv" run_pytest "$venv/bin/python" -m pytest -m roundtrip tests/tools/test_roundtrip.py
done

printf '\n%s%-34s %6d s\n' "$report" 'all steps' "$SECONDS" >&2
case $report in *FAILED*) exit 1 ;; esac
