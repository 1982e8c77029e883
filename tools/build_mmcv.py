# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Builds a wheel of MMCV with its CPU operators in less than half the time that ``pip install mmcv`` takes.

MMCV's operators are 77 small C++ files, and each makes the compiler read all of PyTorch's headers, which takes longer
than the file itself. Here the 57 of them that only choose an implementation are joined before they are compiled. The 20
that compute stay as they are: joined, ``cos`` of a float would become another function, and some names come twice.

    python tools/build_mmcv.py mmcv==2.1.0

prints the path of the wheel. It is kept for the next time in pip's cache folder, by the version of PyTorch it was built
for (pip itself does not look at that). Needs setuptools, wheel, ninja and torch in the Python that runs it.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SOURCES = Path('mmcv', 'ops', 'csrc', 'pytorch')


def pip(*arguments: str, **environment: str) -> str:
    """Runs pip, whose progress goes to stderr; returns what a query printed."""
    query = arguments[0] == 'cache'
    command = [sys.executable, '-m', 'pip', *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE if query else sys.stderr, text=True, env={**os.environ, **environment}
    )
    if done.returncode and not query:
        raise SystemExit(f'build_mmcv: `pip {" ".join(arguments)}` failed, see above')
    return (done.stdout or '').strip()


def join(folder: Path, parts: int) -> None:
    """Joins the C++ files of a folder into ``parts`` ones."""
    files = sorted(folder.glob('*.cpp'))
    for file in files:
        file.rename(file.with_suffix('.inc'))
    for part in range(parts):
        lines = [f'#include "{file.stem}.inc"\n' for file in files[part::parts]]
        (folder / f'joined_{part}.cpp').write_text(''.join(lines))


def build(requirement: str, folder: Path, kept: Path) -> Path:
    """Downloads the source, joins its files and builds the wheel into ``kept``."""
    name = requirement.partition('==')[0]
    source = folder / 'source'
    pip('download', '--no-deps', '--no-build-isolation', '--no-binary', name, '-d', str(source), requirement)
    (archive,) = source.glob('*.tar.gz')
    with tarfile.open(archive) as file:
        # Python before 3.11.4 has no filters.
        file.extractall(folder, **({'filter': 'data'} if hasattr(tarfile, 'data_filter') else {}))
    root = folder / archive.name.removesuffix('.tar.gz')
    if not (root / SOURCES / 'cpu').is_dir():
        raise SystemExit(f'build_mmcv: {requirement} has its sources elsewhere than in {SOURCES}/cpu')
    jobs = int(os.environ.get('MAX_JOBS') or os.cpu_count() or 1)
    join(root / SOURCES, min(jobs, 4))
    wheels = folder / 'wheels'
    # with no GPU in sight MMCV builds the operators of CPUs alone
    flags = {'CFLAGS': '-O1 -g0', 'MMCV_WITH_OPS': '1', 'MAX_JOBS': str(jobs)}
    flags.update(CUDA_VISIBLE_DEVICES='', FORCE_CUDA='0')
    pip('wheel', '--no-deps', '--no-build-isolation', '--no-cache-dir', '-w', str(wheels), str(root), **flags)
    (wheel,) = wheels.glob('*.whl')
    kept.mkdir(parents=True, exist_ok=True)
    # Renamed in one step, so that a build that is stopped, or one beside it, leaves no half a file.
    target = kept / wheel.name
    part = target.with_name(f'{target.name}.{os.getpid()}')
    part.write_bytes(wheel.read_bytes())
    part.replace(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('requirement', help='MMCV and its version, as in mmcv==2.1.0 or onedl-mmcv==2.3.6')
    parser.add_argument('--wheels', type=Path, help="where wheels are kept (default: pip's cache, else here)")
    args = parser.parse_args()
    name, equal, version = args.requirement.partition('==')
    if not (equal and name and version):
        parser.error(f"requirement is '{args.requirement}', it has to be of the form mmcv==2.1.0")
    import torch

    with tempfile.TemporaryDirectory() as folder:
        wheels = args.wheels or Path(pip('cache', 'dir') or '.')
        kept = wheels / f'mmlinattn-torch-{torch.__version__}'
        tag = f'cp{sys.version_info.major}{sys.version_info.minor}-'
        found = sorted(kept.glob(f'{name.replace("-", "_")}-{version}-{tag}*.whl'))
        print(found[-1] if found else build(args.requirement, Path(folder), kept))


if __name__ == '__main__':
    main()
