#!/usr/bin/env bash
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Make an environment with tested versions of PyTorch, MMCV, MMDetection, MMSegmentation and MMPretrain, and this
# checkout (editable). Print one line, the path of its Python:
#   PY=$(tools/setup_env.sh) && "$PY" tools/train.py ...
# Needs Python 3.10 to 3.14 and a package index, no compiler. A second run takes a second.
#   --venv DIR       folder of the environment (default: .venv, or .venv-onedl for the onedl stack)
#   --stack onedl    the maintained onedl-* distributions of the same modules (default: openmmlab)
#   --python PY      Python to make it with (default: python3, else the newest that fits)
#   --lock FILE      other versions, such as requirements/lock-oldest.txt or lock-newest.txt
#   --torch SOURCE   cpu (PyTorch's index of CPU builds), pypi (CUDA on Linux), or the URL of an index, such as
#                    https://download.pytorch.org/whl/cu126 for an older driver. Default: cpu on Linux without an
#                    NVIDIA driver, if that index can be reached, else pypi. MMLINATTN_TORCH_CPU_INDEX names
#                    a mirror of that index
#   --compiled       compile MMCV's own operators instead of using mmcv_ops/ (gcc, g++, minutes); with CUDA if there
#                    are a GPU and nvcc, or with FORCE_CUDA=1
#   --use-existing   install nothing: check the active Python (or --python) and list the commands that install missing
#                    packages. MMLINATTN_USE_EXISTING_ENV=1 does the same.
set -euo pipefail
unset CDPATH

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
say() { echo "[setup_env] $*" >&2; }
die() { echo "[setup_env] ERROR: $*" >&2 && exit 1; }

venv='' stack=openmmlab python='' lock='' torch='' existing='' compiled=''
case ${MMLINATTN_USE_EXISTING_ENV:-} in '' | 0) ;; *) existing=1 ;; esac
while [ $# -gt 0 ]; do
  case $1 in --venv=* | --stack=* | --python=* | --lock=* | --torch=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  case $1 in
    --venv | --stack | --python | --lock | --torch)
      [ $# -ge 2 ] && [ -n "$2" ] || die "$1 needs a value"
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    --use-existing) existing=1 ;;
    --compiled) compiled=1 ;;
    -h | --help) sed -n '/^# /s/^# //p; /^set/q' "$0" && exit 0 ;;
    *) die "unknown argument '$1'; see tools/setup_env.sh --help" ;;
  esac
  shift
done
case $stack in
  openmmlab) default_lock=lock.txt mmcv=mmcv-lite source=mmcv other=onedl-mmcv default=.venv ;;
  onedl) default_lock=lock-onedl.txt mmcv=onedl-mmcv source=onedl-mmcv other=mmengine default=.venv-onedl ;;
  *) die "--stack='$stack': expected one of (openmmlab, onedl)" ;;
esac
case $torch in
  '' | cpu | pypi | *://*) ;;
  *) die "--torch='$torch': expected one of (cpu, pypi, the URL of an index)" ;;
esac
venv=${venv:-$ROOT/$default} && venv=${venv/#\~\//$HOME/} lock=${lock:-$ROOT/requirements/$default_lock}
[ -f "$lock" ] || die "--lock='$lock': no such file"
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac

check() { "$1" -W ignore "$ROOT/tools/check_env.py" 2>&1 | sed 's/^/[setup_env] /' >&2; }

if [ -n "$existing" ]; then
  found=$(command -v "${python:-python}" || command -v "${python:-python3}") || die "there is no program '${python:-python}'"
  check "$found" ||
    die "$found lacks what is listed above; nothing was installed. Without --use-existing this script makes an environment of its own."
  echo "$found" && exit 0
fi

# Other folders' packages would hide missing ones; without byte code a tool starts in 12 s in place of 5.
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0
vpy=$venv/bin/python log=$venv/setup.log stamp=$venv/.mmlinattn-ready

has_driver() { [ -e /proc/driver/nvidia/version ] || [ -e /sys/module/nvidia/version ] || nvidia-smi >/dev/null 2>&1; }

# The stamp of a finished environment: its recipe, with or without compiled MMCV; the source of PyTorch, used and asked
# for. A GPU replaces a CPU build that nobody asked for; a machine without one keeps the build with CUDA, since nodes
# of a cluster share environments.
recipe() { echo "$stack $("$vpy" -V) $ROOT $(cat "$lock" "$ROOT"/setup.py "$ROOT"/mmcv_ops/{pyproject.toml,setup.py,*.pth,mmcv/_ext.py} | cksum)"; }
is_ready() {
  local made used asked
  [ -f "$stamp" ] && { read -r made && read -r used asked; } <"$stamp" || return 1
  case $made in "$(recipe)${compiled:+ compiled}" | "$(recipe) compiled") ;; *) return 1 ;; esac
  if [ -n "$torch" ]; then [ "$torch" = "$used" ]; else [ "$used$asked" != cpu ] || ! has_driver; fi || return 1
  check "$vpy"
}
fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }
wanted='Python 3.10 to 3.14'
offer="Install one: pip install uv && uv python install 3.13 (downloads from GitHub)."
[ -z "$python" ] || fits "$python" || die "--python='$python': expected $wanted. $offer"
[ -z "$python" ] || ! fits "$vpy" || [ "$("$python" -V)" = "$("$vpy" -V)" ] ||
  die "--python='$python': $venv has $("$vpy" -V), not $("$python" -V). Remove it or name another folder with --venv."
if is_ready; then echo "$vpy" && exit 0; fi

[ -n "$python" ] || for python in "$vpy" python3 python python3.{14,13,12,11,10}; do if fits "$python"; then break; fi; done
fits "$python" || die "no $wanted on PATH. Name one with --python. $offer"
[ -z "$compiled" ] || command -v "${CXX:-g++}" >/dev/null ||
  die "--compiled needs '${CXX:-g++}', which is not there. Install gcc and g++ (Debian, Ubuntu: apt install build-essential python3-dev)."
if fits "$vpy"; then
  ! "$vpy" -c "import importlib.metadata as m; m.version('$other')" 2>/dev/null ||
    die "$venv already holds '$other', whose modules have the same names. Name another folder with --venv."
elif [ -e "$venv" ] && [ ! -f "$log" ] && [ -n "$(ls -A "$venv")" ]; then
  die "$venv exists and is no environment that this script made. Name another folder with --venv."
else
  "$python" -m venv --clear "$venv" >&2 || die "'$python -m venv $venv' failed (Debian, Ubuntu: apt install python3-venv)"
fi

rm -f "$stamp" && say "setting up $venv ($stack stack, $("$vpy" -V)); details in $log"

pin() { sed -n -E "s/^($1===?[^ ;]*).*/\1/p" "$lock"; }
failed() { die "$* ($(grep -iE '(error|cause)\b' "$log" | tail -n 1 | sed 's|//[^/@ ]*@|//|g')); all of the output: $log"; }

# uv uses all cores and unpacks a version only once. It reads none of pip's settings.
index=${PIP_INDEX_URL:-$("$vpy" -m pip config get global.index-url 2>/dev/null || echo https://pypi.org/simple)}
"$vpy" -m pip install -q --retries 1 --timeout 20 "$(pin uv)" >"$log" 2>&1 ||
  failed "pip cannot get $(pin uv) from the package index $(sed 's|//[^/@]*@|//|' <<<"$index"). Check the network, the proxy and PIP_INDEX_URL"
export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index} UV_SYSTEM_CERTS=1 VIRTUAL_ENV=$venv
install() { "$venv/bin/uv" pip install "$@" >>"$log" 2>&1 || failed 'the installation failed'; }

# An index of PyTorch has its own names of the same versions (2.14.1+cpu), and no CUDA libraries to pin.
torch_pins=$(pin 'torch(vision)?' | sed 's/===/==/')
torch_from() { # URL, options of uv
  # shellcheck disable=SC2086  # two words
  "$venv/bin/uv" pip install --no-deps --default-index "$@" $torch_pins >>"$log" 2>&1
}
used=${torch:-pypi} url=$torch reinstall=()
if [ -n "$torch" ]; then
  reinstall=(--reinstall) # a build from elsewhere has the same version
elif [ "$(uname -s)" = Linux ] && ! has_driver; then
  # an environment with the CUDA build keeps it
  case $("$vpy" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true) in '' | *+*) used=cpu ;; esac
fi
[ "$used" != cpu ] || url=${MMLINATTN_TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

say '1/3 PyTorch, MMDetection, MMSegmentation, MMPretrain and the rest, as wheels'
"$venv/bin/uv" pip uninstall -q mmcv "$mmcv" mmlinattn-mmcv-ops >>"$log" 2>&1
pins=$lock
if [ "$used" != pypi ]; then
  if UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=10 torch_from "$url" --dry-run && torch_from "$url" ${reinstall[@]+"${reinstall[@]}"}; then
    pins=$venv/lock.txt
    { sed -E '/^(torch|torchvision|triton|nvidia-|cuda-)/d' "$lock" && printf '%s\n' "$torch_pins"; } >"$pins"
  elif [ -n "$torch" ]; then
    failed "$url has no $(echo $torch_pins) for this Python, or cannot be reached"
  else
    say "no NVIDIA driver, but $url cannot be reached: installing PyTorch of the package index, with CUDA (3 GB)"
    used=pypi
  fi
fi
# onedl-mmcv comes as source and compiles nothing where PyTorch is not in sight
MMCV_WITH_OPS=0 install -r "$pins"
# OpenCV's desktop wheel, which MMCV requires by name, needs libraries that servers often lack
"$vpy" -c 'import cv2' >>"$log" 2>&1 || {
  "$venv/bin/uv" pip uninstall -q opencv-python opencv-python-headless >>"$log" 2>&1
  install --no-deps "$(pin opencv-python | sed s/python/python-headless/)"
}
if [ -n "$compiled" ]; then
  say "2/3 MMCV's operators: compiling takes about 2 minutes on 2 cores (with CUDA, an hour), unless they were built here before"
  "$venv/bin/uv" pip uninstall -q "$mmcv" >>"$log" 2>&1
  wheel=$("$vpy" "$ROOT/tools/build_mmcv.py" "$source==$(pin "$mmcv" | sed 's/.*=//')" 2>>"$log") || failed 'MMCV cannot be compiled'
  install --no-deps "$wheel"
  # its operators come first; mmcv_ops/ adds pkgutil.find_loader
  "$vpy" -c 'import sys; sys.exit(sys.version_info >= (3, 14))' || install --no-deps --no-build-isolation "$ROOT/mmcv_ops"
else
  say "2/3 MMCV's operators, from mmcv_ops/"
  install --no-deps --no-build-isolation --reinstall-package mmlinattn-mmcv-ops "$ROOT/mmcv_ops"
fi
say '3/3 this checkout'
install --no-deps --no-build-isolation -e "$ROOT"
check "$vpy" || die "the environment does not work, see above and $log"
printf '%s\n' "$(recipe)${compiled:+ compiled}" "$used $torch" >"$stamp"
echo "$vpy"
