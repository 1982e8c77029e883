# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Check the installed packages, and name the command that repairs a broken one.

This file imports only the standard library, because ``tools/check_env.py`` runs it before other packages are known to
exist.
"""

import importlib
import os
import platform
import re
import shlex
import sys
import traceback
from importlib.metadata import PackageNotFoundError, files, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Optional

HERE = Path(__file__).resolve().parents[1]
# the checkout, else the files that a wheel brings along
ROOT = HERE.parent if (HERE.parent / 'mmcv_ops').is_dir() else HERE / '.mim'

_OPERATORS = shlex.quote(str(ROOT / 'mmcv_ops'))
OPENCV = ('opencv-python-headless', 'opencv-python', 'opencv-contrib-python', 'opencv-contrib-python-headless')
# Distributions of a module that write the same files. The first is installed; on the onedl stack, its own.
FAMILIES = {
    'cv2': OPENCV,
    'mmengine': ('mmengine', 'onedl-mmengine'),
    'mmcv': ('mmcv-lite', 'mmcv', 'onedl-mmcv'),
    'mmpretrain': ('mmpretrain', 'onedl-mmpretrain'),
    'mmdet': ('mmdet', 'onedl-mmdetection'),
    'mmseg': ('mmsegmentation', 'onedl-mmsegmentation'),
}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ''


def _accepted() -> dict:
    """Return the accepted versions by distribution: ``{'numpy': '>=1.26'}``, from requirements/*.txt or the wheel."""
    folder = ROOT / 'requirements'
    if folder.is_dir():
        texts = [(folder / f'{name}.txt').read_text(encoding='utf-8') for name in ('runtime', 'mminstall')]
        lines = '\n'.join(texts).splitlines()
    else:
        given = (requires('mmlinattn') or []) if _version('mmlinattn') else []
        lines = [line for line in given if ';' not in line or 'mim' in line.partition(';')[2]]
    found = (re.match(r'([\w-]+)\s*([^;#]*)', line) for line in lines)
    ranges = {match[1]: re.sub(r'(\d+\.\d+)\.0\b', r'\1', match[2].strip()) for match in found if match}
    # setuptools 82 dropped pkg_resources; older ones need pkgutil.ImpImporter, removed in Python 3.12. MMPretrain 1.2
    # imports classes and functions that transformers 4.52 and 4.56 moved.
    return {**ranges, 'setuptools': '>=77,<82', 'transformers': '>=4.28,<4.52'}


ACCEPTED = _accepted()


def _pip(*names: str) -> str:
    """Return distributions with their accepted versions as arguments of ``pip install``."""
    return ' '.join(f'"{name}{ACCEPTED[name]}"' if ACCEPTED.get(name) else name for name in names)


# arguments of `pip install` by module
PIP = {
    'torch': 'torch torchvision',
    'cv2': OPENCV[0],
    'pkg_resources': _pip('setuptools'),
    'transformers': _pip('transformers'),
    'mmengine': f'mmengine {_pip("setuptools")}',
    'mmcv': f'{_pip("mmcv-lite")} {_OPERATORS}',
    'mmcv._ext': _OPERATORS,
    'mmdet': _pip('mmdet'),
    'mmseg': f'{_pip("mmsegmentation")} ftfy regex',
    'mmpretrain': _pip('mmpretrain'),
    'mmlinattn': str(ROOT),
    'PIL': 'pillow',
    'yaml': 'pyyaml',
}
VARIABLES = {'MMLINATTN_OPS': ('auto', 'reference'), 'MMLINATTN_KEEP_MEMORY': ('0', '1')}  # and their values
BASE = ('torch', 'einops', 'filelock', 'numpy', 'mmengine', 'mmcv')  # imported by `import mmlinattn`
# Everything that the tools import. MMDetection and MMSegmentation import MMPretrain's models, so these come first.
WHOLE = (
    *('torch', 'einops', 'filelock', 'numpy', 'cv2', 'torchvision', 'mmengine', 'mmcv', 'mmcv.ops', 'ftfy', 'regex'),
    *('mmpretrain.models', 'mmdet.models', 'mmseg.models', 'mmlinattn'),
)
REPORTED = (
    *('torch', 'torchvision', 'numpy', 'setuptools', 'transformers', 'mmlinattn-mmcv-ops', 'mmlinattn'),
    *(name for family in FAMILIES.values() for name in family),
)


class Repair(NamedTuple):
    """Parts of the command that repairs a module, in the order of the command."""

    remove: tuple = ()  # distributions
    first: tuple = ()  # whole commands
    install: tuple = ()  # arguments of pip
    alone: tuple = ()  # arguments of pip, without dependencies: these would bring opencv-python back

    def __add__(self, other: tuple) -> 'Repair':
        return Repair(*(tuple(dict.fromkeys((*mine, *theirs))) for mine, theirs in zip(self, other)))

    def __str__(self) -> str:
        parts = [f'pip uninstall -y {" ".join(self.remove)}'] if self.remove else []
        parts += self.first
        if self.install:
            parts.append(f'pip install {" ".join(self.install)}')
        if self.alone:
            parts.append(f'pip install --force-reinstall --no-deps {" ".join(self.alone)}')
        return ' && '.join(parts)


class Problem(NamedTuple):
    """Broken module of :data:`WHOLE`, the reason, and the repair."""

    module: str
    reason: str
    repair: Repair

    @property
    def line(self) -> str:
        return f'{self.module} does not work in {sys.executable}: {self.reason}; mend it with: {self.repair}'


def missing() -> str:
    """Return a message for the first module that is not installed, or ''. Nothing is imported."""
    name = next((name for name in BASE if find_spec(name) is None), '')
    return f'{name} is not installed in {sys.executable}: pip install {PIP.get(name, name)}' if name else ''


def refused() -> str:
    """Return a message for the first variable of the environment with an unknown value, or ''."""
    for name, (one, other) in VARIABLES.items():
        value = os.environ.get(name, '')
        if value not in ('', one, other):
            remedy = '; --compile replaces the Triton kernels' if value == 'triton' else ''
            return f'{name}={value!r}: expected {one!r} or {other!r}{remedy}'
    return ''


def unusable() -> str:
    """Import the packages that every tool needs, and return a message for the first that is broken, or ''."""
    for module in ('torch', 'numpy', 'cv2', 'mmengine', 'mmcv'):
        try:
            importlib.import_module(module)
        except Exception as error:
            return describe_failure(module, error)
    return ''


def describe_failure(module: str, error: Exception) -> str:
    """Describe the failure of a module on import or in use, in one line with its reason and the repair command."""
    return _problem(module, error).line


def _problem(module: str, error: Exception) -> Problem:
    reason = ' '.join(str(error).split())[:300]
    return Problem(module, reason, _diagnosed(module, error, reason) or _repaired(module.partition('.')[0]))


def _diagnosed(module: str, error: Exception, reason: str) -> Optional[Repair]:
    """Return the repair of a known cause, or None."""
    culprit = (error.name or '') if isinstance(error, ImportError) else ''
    is_missing, package = isinstance(error, ModuleNotFoundError), culprit.partition('.')[0]
    sources = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if package == 'pkg_resources' or any('pkg_resources' in source for source in sources):
        return Repair(install=(PIP['pkg_resources'],))
    if is_missing and package and (culprit in (*PIP, package) or find_spec(package) is None):
        return _repaired(culprit if culprit in PIP else package, is_missing=True)
    if module.endswith('.models') and _is_outside_range('transformers'):
        return Repair(install=(PIP['transformers'],))
    # the desktop wheel without X libraries, or one wheel written over another
    is_cv2 = 'cv2' in (module, package) or reason.startswith("module 'cv2'")
    if is_cv2 or any(f'{os.sep}cv2{os.sep}' in source for source in sources[-1:]):
        return _repaired('cv2')
    if 'torchvision::' in reason or module == 'torchvision':
        return _repaired('torchvision')
    if 'find_loader' in reason:  # Python 3.14 removed it
        return Repair(install=(_OPERATORS,))
    found = re.match('(MMCV|MMEngine)==', reason)
    return _repaired(found[1].lower()) if found else None


def _repaired(module: str, is_missing: bool = False) -> Repair:
    """Return the repair of a module: install its distribution, and remove others that write the same files."""
    family = FAMILIES.get(module, ())
    present = [name for name in family if _version(name)]
    if module == 'torch' or module == 'torchvision' and not _version('torch'):
        names = tuple(name for name in ('torch', 'torchvision') if _version(name))
        # PyTorch requires setuptools; the newest lacks pkg_resources
        return Repair(names, (f'pip install {PIP["torch"]} {PIP["pkg_resources"]}',))
    if module == 'torchvision':  # the one of the installed PyTorch, from its index
        torch, _, local = _version('torch').partition('+')
        index = f'+{local} --index-url https://download.pytorch.org/whl/{local}' if local else ''
        remove = ('torchvision',) if _version('torchvision') else ()
        return Repair(remove, (f'pip install torchvision torch=={torch}{index}',))
    if module == 'cv2':
        return Repair(tuple(present), install=(PIP['cv2'],))
    if is_missing and module not in ('mmengine', 'mmcv', 'mmlinattn'):
        return Repair(install=(PIP.get(module, module),))
    if not family:
        return Repair(alone=(PIP.get(module, module),))
    chosen = family[-1] if _is_onedl() else family[0]
    # the requirements of MMEngine and MMCV but OpenCV's desktop wheel
    needed = ('addict matplotlib packaging pillow pyyaml rich termcolor yapf', PIP['pkg_resources'])
    alone = (_pip(chosen), _OPERATORS) if module == 'mmcv' else (_pip(chosen),)
    return Repair(tuple(name for name in present if name != chosen), (), needed if is_missing else (), alone)


def _is_onedl() -> bool:
    """Return True on the onedl stack: its detection, segmentation or classification without the originals."""
    parts = [FAMILIES[module] for module in ('mmpretrain', 'mmdet', 'mmseg')]
    return any(_version(name) for _, name in parts) and not any(_version(name) for name, _ in parts)


def _is_outside_range(name: str) -> bool:
    """Return True if a distribution is installed in a version outside of its accepted range."""

    def numbers(text: str) -> list:
        found = [int(number) for number in re.findall(r'\d+', re.split(r'[^\d.]', text)[0])]
        while found and not found[-1]:  # 2.1.0 is 2.1
            found.pop()
        return found

    have = numbers(_version(name))
    bounds = re.findall(r'(>=|<)\s*([\d.]+)', ACCEPTED.get('mmcv-lite' if name == 'mmcv' else name, ''))
    return bool(have) and not all((have >= numbers(end)) == (sign == '>=') for sign, end in bounds)


def _lacks_files(name: str) -> bool:
    """Return True if modules of a distribution are gone, as after another one that wrote them was uninstalled."""
    return any(file.suffix == '.py' and not Path(str(file.locate())).exists() for file in files(name) or ())


def _version_problems() -> list[Problem]:
    """Return the problems of installed packages: missing or conflicting distributions, lost files, wrong versions."""
    problems = []
    modules = {name: module for module, family in FAMILIES.items() for name in family if module != 'cv2'}
    modules.update(setuptools='mmengine', transformers='mmpretrain.models')
    for package in dict.fromkeys(module.partition('.')[0] for module in WHOLE):
        family = [name for name in FAMILIES.get(package, ()) if _version(name)]
        if find_spec(package) is None:
            problems.append(Problem(package, f'No module named {package!r}', _repaired(package, is_missing=True)))
        elif package != 'cv2' and len(family) > 1:
            reason = f'{" and ".join(family)} write the same files'
            problems.append(Problem(package, reason, _repaired(package)))
        elif lacking := next((name for name in family if _lacks_files(name)), ''):
            problems.append(Problem(package, f'files of {lacking} are missing', _repaired(package)))
    for name in (*ACCEPTED, 'mmcv'):
        needs = {'setuptools': 'mmengine', 'transformers': 'mmpretrain'}.get(name, name)  # not the onedl ones
        if _is_outside_range(name) and _version(needs):
            reason = f'{name} {_version(name)} is installed, expected {ACCEPTED.get(name) or ACCEPTED["mmcv-lite"]}'
            module = modules.get(name, name)
            repair = Repair(install=(_pip(name),))
            if name == 'torch' or module in FAMILIES and needs == name:
                repair = _repaired(module)
            problems.append(Problem(module, reason, repair))
    return problems


def use(module: str) -> None:
    """Import a module, and call functions of it that can fail after a successful import. Any error is raised."""
    imported = importlib.import_module(module)
    if module == 'torchvision':
        import torch

        imported.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([0.5]), 0.5)
    elif module == 'mmengine':
        imported.utils.is_installed('mmengine')  # imports pkg_resources in MMEngine's own distribution
    elif module == 'mmcv':
        importlib.import_module('mmengine.utils.dl_utils').mmcv_full_available()  # calls pkgutil.find_loader
    elif module == 'mmcv.ops':
        run_operators('cpu')


def run_operators(device: str) -> None:
    """Run MMCV's NMS and RoIAlign, called by every detector, on a device."""
    import torch
    from mmcv.ops import nms, roi_align

    box = torch.tensor([[0.0, 0.0, 1.0, 1.0]], device=device)
    nms(box, box[0, :1], 0.5)
    roi_align(box.new_ones(1, 1, 4, 4), torch.cat([box.new_zeros(1, 1), box], 1), 1, 1.0, 0, 'avg', True)


def lacking_on_gpu() -> str:
    """Return a message if MMCV's operators fail on the GPU; '' if they run or there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return ''
    try:
        run_operators('cuda')
    except Exception as error:
        reason = ' '.join(str(error).split())[:200]
        command = _repaired('mmcv' if _version('mmcv') else 'torchvision')  # compiled without CUDA
        return (
            f'NMS and RoIAlign do not run on the GPU ({reason}), so no detector trains there; mend it with: {command}'
        )
    return ''


def check(modules=WHOLE) -> list:
    """Return one line for every module that does not work, in the order of repair.

    After several of them, a line has the command that repairs all. The last one reports operators that fail on the GPU.
    """
    order = {name: place for place, module in reversed([*enumerate(WHOLE)]) for name in (module, module.split('.')[0])}
    problems: list = _version_problems() if modules is WHOLE else []
    for module in modules:
        try:
            use(module)
        except Exception as error:
            problem = _problem(module, error)
            before = [other for other in problems if order[other.module] <= order[module]]
            known = {other.reason for other in problems}
            repairs = sum((other.repair for other in problems), Repair())
            is_known = problem.reason in known or repairs + problem.repair == repairs
            # behind another one, a failure without a diagnosis may be its consequence
            if not is_known and (not before or _diagnosed(module, error, problem.reason)):
                problems.append(problem)
    problems.sort(key=lambda problem: order[problem.module])
    lines = [problem.line for problem in problems]
    if len(lines) > 1:
        lines.append(f'mend all with: {sum((problem.repair for problem in problems), Repair())}')
    gpu = '' if {'torch', 'mmcv'} & {problem.module.split('.')[0] for problem in problems} else lacking_on_gpu()
    return [*lines, gpu] if gpu else lines


def report() -> list:
    """Return lines with the system and the versions of packages, for an issue."""
    gpu = 'none'
    try:
        import torch

        if torch.cuda.is_available():
            gpu = f'{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}'
    except Exception as error:
        gpu = f'unknown ({type(error).__name__} on import torch)'
    found = [f'{name} {_version(name)}' for name in REPORTED if _version(name)]
    return [f'{platform.platform()}, Python {platform.python_version()}', f'GPU: {gpu}', *found]
