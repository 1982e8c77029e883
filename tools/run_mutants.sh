#!/usr/bin/env bash
# Small defects in a copy of the package, one at a time: does a test fail? docs/testing.md explains, `--help` lists the
# options.
#     bash tools/run_mutants.sh [--minutes N] [--seed S] [--sample N] [--out DIR] [paths]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arguments=()
for argument in "$@"; do
  case $argument in
    --use-existing) export MMLINATTN_USE_EXISTING_ENV=1 ;;
    *) arguments+=("$argument") ;;
  esac
done

py=$(tools/setup_env.sh)
"$py" -c 'import cosmic_ray, coverage, pytest' 2>/dev/null || {
  echo "run_mutants: $py lacks cosmic-ray, coverage or pytest: $py -m pip install -r requirements/tests.txt -r requirements/mutants.txt" >&2
  exit 1
}
OMP_NUM_THREADS=1 exec "$py" tests/mutants/run.py ${arguments[@]+"${arguments[@]}"}
