# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Build a wheel of MMCV with its own operators, for every PyTorch and Python, in half the time of ``pip install mmcv``.

MMCV's operators are 77 small C++ files. For each, the compiler reads all of PyTorch's headers, longer work than the
file itself. The 57 files that only choose an implementation are joined before compilation. The 20 that compute stay
separate: joined, ``cos`` of a float would become another function, and some names occur twice. The downloaded
``setup.py`` is patched: it reads its version from ``locals()``, empty since Python 3.13, and asks for C++17, but
PyTorch 2.14 needs C++20.

    python tools/build_mmcv.py mmcv==2.1.0

prints the path of the wheel. Wheels are cached in pip's cache folder by PyTorch version (pip's own cache ignores it).
Needs gcc, g++, setuptools and torch. CUDA operators are built if PyTorch sees a GPU and nvcc is on PATH, or with
FORCE_CUDA=1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

SOURCES = Path('mmcv', 'ops', 'csrc', 'pytorch')


def pip(*arguments: str, **environment: str) -> str:
    """Run pip with its progress on stderr; return the output of a query."""
    query = arguments[0] in ('cache', 'config')
    command = [sys.executable, '-m', 'pip', *arguments]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE if query else sys.stderr,
        stderr=subprocess.DEVNULL if query else None,
        text=True,
        env={**os.environ, **environment},
    )
    if done.returncode and not query:
        raise SystemExit(f'build_mmcv: `pip {" ".join(arguments)}` failed, see above')
    return (done.stdout or '').strip()


def join(folder: Path, parts: int) -> None:
    """Join the C++ files of a folder into ``parts`` files."""
    files = sorted(folder.glob('*.cpp'))
    for file in files:
        file.rename(file.with_suffix('.inc'))
    for part in range(parts):
        lines = [f'#include "{file.stem}.inc"\n' for file in files[part::parts]]
        (folder / f'joined_{part}.cpp').write_text(''.join(lines))


def download(name: str, version: str, folder: Path) -> Path:
    """Download the source. ``pip download`` would run MMCV's ``setup.py``, and that fails on Python 3.13."""
    index = os.environ.get('PIP_INDEX_URL') or pip('config', 'get', 'global.index-url') or 'https://pypi.org/simple'
    page = f'{index.rstrip("/")}/{name}/'
    file = f'{name.replace("-", "_")}-{version}.tar.gz'
    with urlopen(page) as answer:
        found = re.search(rf'href="([^"]*/{re.escape(file)}[^"]*)"', answer.read().decode())
    if found is None:
        raise SystemExit(f'build_mmcv: {page} has no {file}')
    archive = folder / file
    with urlopen(urljoin(page, found[1])) as answer:
        archive.write_bytes(answer.read())
    with tarfile.open(archive) as content:
        # Python before 3.11.4 has no filters
        content.extractall(folder, **({'filter': 'data'} if hasattr(tarfile, 'data_filter') else {}))
    return folder / file[: -len('.tar.gz')]


def patch_setup(script: Path, version: str, torch_version: str) -> None:
    """Patch MMCV's ``setup.py`` for Python 3.13 and PyTorch 2.14."""
    text = script.read_text(encoding='utf-8').replace("locals()['__version__']", repr(version))
    if tuple(map(int, torch_version.split('.')[:2])) >= (2, 14):
        text = text.replace('std=c++17', 'std=c++20').replace('std:c++17', 'std:c++20')
    script.write_text(text, encoding='utf-8')


def builds_cuda() -> bool:
    """Return True if CUDA operators are requested or can be used here; they take an hour to compile."""
    import torch

    forced = os.environ.get('FORCE_CUDA')
    return forced == '1' or (forced is None and torch.cuda.is_available() and shutil.which('nvcc') is not None)


def build(requirement: str, folder: Path, kept: Path) -> Path:
    """Download the source, patch and join its files, and build the wheel into ``kept``."""
    import torch

    name, _, version = requirement.partition('==')
    root = download(name, version, folder)
    if not (root / SOURCES / 'cpu').is_dir():
        raise SystemExit(f'build_mmcv: {requirement} has no folder {SOURCES}/cpu')
    patch_setup(root / 'setup.py', version, torch.__version__)
    jobs = int(os.environ.get('MAX_JOBS') or os.cpu_count() or 1)
    join(root / SOURCES, min(jobs, 4))
    wheels = folder / 'wheels'
    flags = {'CFLAGS': '-O1 -g0', 'MMCV_WITH_OPS': '1', 'MAX_JOBS': str(jobs), 'FORCE_CUDA': str(int(builds_cuda()))}
    if not builds_cuda():  # MMCV asks for the CUDA toolkit if it sees a GPU
        flags['CUDA_VISIBLE_DEVICES'] = ''
    pip('wheel', '--no-deps', '--no-build-isolation', '--no-cache-dir', '-w', str(wheels), str(root), **flags)
    (wheel,) = wheels.glob('*.whl')
    kept.mkdir(parents=True, exist_ok=True)
    # atomic: an interrupted or concurrent build leaves no partial file
    target = kept / wheel.name
    part = target.with_name(f'{target.name}.{os.getpid()}')
    part.write_bytes(wheel.read_bytes())
    part.replace(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'requirement', metavar='REQUIREMENT', help='MMCV and its version: mmcv==2.1.0 or onedl-mmcv==2.3.6'
    )
    parser.add_argument('--wheels', type=Path, help="folder of cached wheels (default: pip's cache, else here)")
    args = parser.parse_args()
    name, equal, version = args.requirement.partition('==')
    if not (equal and name and version):
        parser.error(f'requirement={args.requirement!r}: expected NAME==VERSION, such as mmcv==2.1.0')
    import torch

    with tempfile.TemporaryDirectory() as folder:
        wheels = args.wheels or Path(pip('cache', 'dir') or '.')
        kept = wheels / f'mmlinattn-torch-{torch.__version__}{"-ops" if builds_cuda() else ""}'
        tag = f'cp{sys.version_info.major}{sys.version_info.minor}-'
        found = sorted(kept.glob(f'{name.replace("-", "_")}-{version}-{tag}*.whl'))
        print(found[-1] if found else build(args.requirement, Path(folder), kept))


if __name__ == '__main__':
    main()
