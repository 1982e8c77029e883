#!/usr/bin/env bash
# Makes an environment that mmlinattn runs in, or checks the one at hand. `--help` explains.
# Progress goes to stderr. The only line on stdout is the path of the environment's Python:
#     PY=$(tools/setup_env.sh) && "$PY" tools/train.py ...
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'USAGE'
usage: tools/setup_env.sh [--venv DIR] [--stack openmmlab|onedl] [--python PY] [--use-existing] [--quiet]

Makes a virtual environment with the tested versions of PyTorch, MMCV, MMDetection,
MMSegmentation and MMPretrain, installs this checkout into it (editable), and prints the path of
its Python. Needs Python 3.11 or newer, gcc, g++ and a package index. The first time takes about
5 minutes (MMCV's operators are compiled); after that only a few seconds.

  --venv DIR       where to make it (default: .venv, or .venv-onedl for the onedl stack)
  --stack NAME     openmmlab: the original distributions (default)
                   onedl: the maintained onedl-* distributions of the same modules
  --python PY      the Python to make it with (default: python3.11, else python3)
  --use-existing   make nothing: check that the active Python (or --python) has all it takes, and
                   say how to install what is missing. For conda, a CUDA build of PyTorch, a
                   prebuilt MMCV. MMLINATTN_USE_EXISTING_ENV=1 does the same.
  --quiet          no progress lines; errors only

MMCV is compiled without CUDA operators unless FORCE_CUDA=1 is set and the CUDA toolkit is there.
USAGE
}

say() { [ -n "$quiet" ] || echo "[setup_env] $*" >&2; }
die() {
  echo "[setup_env] ERROR: $*" >&2
  exit 1
}

venv='' stack=openmmlab python='' quiet='' existing=''
case ${MMLINATTN_USE_EXISTING_ENV:-} in '' | 0) ;; *) existing=1 ;; esac
while [ $# -gt 0 ]; do
  case $1 in
    --venv=* | --stack=* | --python=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
  esac
  case $1 in
    --venv | --stack | --python)
      [ $# -ge 2 ] && [ -n "$2" ] || die "$1 needs a value"
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    --use-existing) existing=1 && shift ;;
    --quiet) quiet=1 && shift ;;
    -h | --help) usage && exit 0 ;;
    *) die "unknown argument '$1'; see tools/setup_env.sh --help" ;;
  esac
done
case $stack in
  openmmlab) lock=$ROOT/requirements/lock.txt mmcv=mmcv other=onedl-mmcv default_venv=.venv ;;
  onedl) lock=$ROOT/requirements/lock-onedl.txt mmcv=onedl-mmcv other=mmcv default_venv=.venv-onedl ;;
  *) die "--stack is '$stack', allowed are: openmmlab, onedl" ;;
esac
[ -n "$venv" ] || venv=$ROOT/$default_venv
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac

# Usage: probe PYTHON MODULE... Imports each module and, of the compiled ones, runs an operator: an
# extension built for another torch can fail as late as that. Says what is wrong and how to mend it.
probe() {
  "$1" - "$ROOT" "${@:2}" <<'PYTHON'
import importlib
import sys

root, modules = sys.argv[1], sys.argv[2:]
with open(f'{root}/requirements/mminstall.txt') as file:
    ranges = [line.strip() for line in file if not line.startswith('#')]
hints = {
    'torch': 'pip install torch torchvision  (for your CUDA version: https://pytorch.org)',
    'torchvision': 'pip install the torchvision release made for your torch (https://pytorch.org)',
    'mmlinattn': f'pip install --no-build-isolation --no-deps -e {root}',
}
for requirement in ranges:
    name = requirement.partition('>')[0]
    module = {'mmsegmentation': 'mmseg'}.get(name, name)
    hints[module] = f"pip install openmim && mim install '{requirement}'"
    if name == 'mmcv':
        hints['mmcv.ops'] = (
            'CFLAGS="-O1 -g0" MMCV_WITH_OPS=1 pip install --no-build-isolation --no-cache-dir '
            f"--force-reinstall --no-deps '{requirement}'"
        )


def use(name):
    module = importlib.import_module(name)
    if name in ('torchvision', 'mmcv.ops'):
        import torch

        nms = module.ops.nms if name == 'torchvision' else module.nms
        nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([0.5]), 0.5)


# An uninstalled checkout in the current folder would not be found by tools/*.py.
sys.path = [folder for folder in sys.path if folder]
broken = set()
for name in modules:
    try:
        use(name)
    except Exception as error:
        # What fails only because an earlier module is missing is mended with that one.
        if getattr(error, 'name', None) not in broken:
            reason = ' '.join(str(error).split())[:300]
            hint = hints.get(name, f'pip install {name}')
            print(f'[setup_env] {name} does not work: {reason}', file=sys.stderr)
            print(f'[setup_env]     mend it with: {hint}', file=sys.stderr)
        broken.update({name, getattr(error, 'name', None) or name})
sys.exit(bool(broken))
PYTHON
}
needed=(torch torchvision einops mmengine mmcv mmcv.ops ftfy regex mmdet mmseg mmpretrain mmlinattn)

if [ -n "$existing" ]; then
  [ -n "$python" ] || python=$(command -v python || command -v python3) || die 'no python on PATH'
  python=$(command -v "$python") || die "--python is '$python', which is not a program"
  say "using $python as it is"
  probe "$python" "${needed[@]}" ||
    die "$python lacks what is listed above; nothing was installed. Without --use-existing this script makes an environment of its own."
  echo "$python"
  exit 0
fi

# Packages of another environment must not hide what is missing from this one.
unset PYTHONPATH PYTHONHOME
# Containers often forbid byte code; then each start of a tool would compile all that it imports anew, 12 s in place of 5.
unset PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0

vpy=$venv/bin/python
log=$venv/setup.log
stamp=$venv/.mmlinattn-ready

# What the environment was made from. It is ready when the stamp says the same.
recipe() {
  "$vpy" - "$stack" "$ROOT" "$lock" <<'PYTHON'
import hashlib
import sys

stack, root, lock = sys.argv[1:]
with open(lock, 'rb') as file:
    print(stack, sys.version.split()[0], root, hashlib.sha256(file.read()).hexdigest())
PYTHON
}

if [ -f "$stamp" ] && [ "$(recipe 2>/dev/null)" = "$(cat "$stamp")" ]; then
  if probe "$vpy" "${needed[@]}"; then
    echo "$vpy"
    exit 0
  fi
  say "$venv no longer works as it was set up: setting it up again"
fi

pick_python() {
  local candidate candidates=(python3.11 python3 python3.12 python3.13 python)
  [ -z "$python" ] || candidates=("$python")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "${python:-python3} is missing or older than Python 3.11, which the tested versions need. Install Python 3.11 or name one with --python; for other versions use an environment of your own and --use-existing."
}

# Compiling comes after minutes of downloads, so whether it can work is found out first.
check_compiler() {
  local tool cxx=${CXX:-g++} include
  for tool in "${CC:-gcc}" "$cxx"; do
    command -v "${tool%% *}" >/dev/null ||
      die "compiler '${tool%% *}' not found, and MMCV's operators are compiled from source. Install gcc and g++ (Debian, Ubuntu: apt install build-essential)."
  done
  include=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  printf '#include <Python.h>\n#include <vector>\n' |
    $cxx -x c++ -std=c++17 -fsyntax-only -I"$include" - 2>/dev/null ||
    die "'$cxx' cannot compile against Python's headers in $include. Install them (Debian, Ubuntu: apt install python3-dev build-essential)."
}

pin() { sed -n "s/^$1===*//p" "$lock"; }

check_index() {
  local index package folder reason
  index=$("$1" -m pip config get global.index-url 2>/dev/null || echo https://pypi.org/simple)
  index=${PIP_INDEX_URL:-$index}
  package=einops==$(pin einops)
  folder=$(mktemp -d)
  if ! reason=$("$1" -m pip download -q --no-deps --no-cache-dir --retries 1 --timeout 20 \
    -d "$folder" "$package" 2>&1); then
    rm -rf "$folder"
    reason=$(grep ERROR <<<"$reason" | tail -n 1) || reason='no reason given'
    # Credentials may be part of a URL.
    die "pip cannot get $package from $(sed 's|//[^/@]*@|//|g' <<<"the package index $index ($reason)"). Check the network, the proxy and PIP_INDEX_URL."
  fi
  rm -rf "$folder"
}

# Files are compiled to byte code when they are first imported, most of them never: pip would compile all, one after another.
# Of pip's output only what shows that a long build is alive; all of it goes to the log.
install() {
  "$vpy" -m pip install --no-build-isolation --no-compile -c "$lock" "$@" 2>&1 | tee -a "$log" |
    sed -un 's/^ *\(Building wheel.*\)/\1/p' | while IFS= read -r line; do say "  $line"; done || {
    grep -E '(error|Error|ERROR)\b' "$log" | tail -n 5 >&2 || true
    die "pip failed; all of its output: $log"
  }
}

# OpenCV's desktop wheel, which MMCV requires by name, needs libraries that servers often lack.
mend_opencv() {
  "$vpy" -c 'import cv2' >>"$log" 2>&1 && return
  say "  OpenCV's desktop build lacks system libraries here: taking the headless one"
  "$vpy" -m pip uninstall -y opencv-python >>"$log" 2>&1
  install --force-reinstall --no-deps "opencv-python-headless==$(pin opencv-python)"
}

make_venv() {
  if "$vpy" -c '' 2>/dev/null; then
    "$vpy" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
      die "$venv has a Python older than 3.11. Remove it or name another folder with --venv."
    "$vpy" -c "import importlib.metadata as m; m.version('$other')" 2>/dev/null &&
      die "$venv already holds '$other', whose modules have the same names. Name another folder with --venv."
    return 0
  fi
  # A folder that is no environment is somebody's work and is not cleared.
  if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv" 2>&1)" ]; then
    die "$venv exists and is no virtual environment. Name another folder with --venv."
  fi
  "$1" -m venv --clear "$venv" >&2 ||
    die "'$1 -m venv $venv' failed (Debian, Ubuntu: apt install python3-venv)"
}

base=$vpy
if [ -n "$python" ] || ! "$vpy" -c '' 2>/dev/null; then base=$(pick_python); fi
check_compiler "$base"
if "$base" -m pip --version >/dev/null 2>&1; then
  check_index "$base"
  make_venv "$base"
else
  make_venv "$base"
  check_index "$vpy"
fi

# A second run in the same folder waits for the first and then finds its work done.
if command -v flock >/dev/null; then
  exec 9>"$venv/.mmlinattn-lock"
  flock -n 9 || { say "waiting for another set-up of $venv" && flock 9; }
  if [ -f "$stamp" ] && [ "$(recipe)" = "$(cat "$stamp")" ] && probe "$vpy" "${needed[@]}" 2>/dev/null; then
    echo "$vpy"
    exit 0
  fi
fi
rm -f "$stamp"
: >"$log"

say "setting up $venv ($stack stack, $("$vpy" --version)); details in $log"
say '1/4 PyTorch and build tools (about a minute)'
install setuptools wheel ninja psutil torch torchvision
probe "$vpy" torch torchvision || die 'torch and torchvision do not work together, see above'

# With a GPU in sight MMCV's own build asks for the CUDA toolkit, which is rarely there in torch's version.
[ "${FORCE_CUDA:-0}" = 1 ] || export CUDA_VISIBLE_DEVICES=''
export CFLAGS='-O1 -g0' MMCV_WITH_OPS=1 MAX_JOBS=${MAX_JOBS:-$(nproc 2>/dev/null || echo 2)}

# The wheels that build_mmcv.py makes stay in pip's cache folder, for the next environment.
joined_mmcv() {
  local wheels
  [ "${FORCE_CUDA:-0}" != 1 ] || return 1
  wheels=$("$vpy" -m pip cache dir 2>/dev/null) && [ -n "$wheels" ] || wheels=$venv
  "$vpy" "$ROOT/tools/build_mmcv.py" "$mmcv==$(pin "$mmcv")" --wheels "$wheels" 2>>"$log"
}

say '2/4 MMCV: compiling takes about 2 minutes on 2 cores, unless it was built here before'
if wheel=$(joined_mmcv); then
  # Of another build, for another PyTorch, nothing is kept.
  install --force-reinstall --no-deps "$wheel"
  install "$mmcv"
else
  say "  MMCV is built in its own way, which takes 6 to 8 minutes, unless pip still has it from an earlier time"
  install "$mmcv"
fi
mend_opencv
# pip keeps built wheels without knowing for which torch.
if ! probe "$vpy" mmcv.ops 2>>"$log"; then
  say "  the MMCV that was at hand does not work with this PyTorch: compiling it anew"
  [ -z "$wheel" ] || rm -f "$wheel"
  install --no-cache-dir --force-reinstall --no-deps "$mmcv"
  probe "$vpy" mmcv.ops || die "MMCV was compiled and still does not work, see above and $log"
fi

say '3/4 MMDetection, MMSegmentation, MMPretrain and the rest'
install -r "$lock"
mend_opencv
say '4/4 this checkout'
install --no-deps -e "$ROOT"
probe "$vpy" "${needed[@]}" || die "the environment does not work, see above and $log"
# what tools import: their byte code is kept for users who may not write it
"$vpy" -c 'import mmdet.apis, mmdet.evaluation, mmseg.apis, mmpretrain.apis' >>"$log" 2>&1 || true

recipe >"$stamp"
say "ready: $vpy"
echo "$vpy"
