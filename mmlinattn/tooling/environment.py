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
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
# the checkout, else the files that a wheel brings along
ROOT = HERE.parent if (HERE.parent / 'mmcv_ops').is_dir() else HERE / '.mim'

_OPERATORS = shlex.quote(str(ROOT / 'mmcv_ops'))

# arguments of `pip install` by module, with the version ranges of requirements/mminstall.txt
PIP = {
    'torch': 'torch torchvision',
    'torchvision': 'torchvision',
    'einops': 'einops',
    'filelock': 'filelock',
    'numpy': 'numpy',
    'cv2': 'opencv-python-headless',
    'pkg_resources': '"setuptools>=77,<82"',
    'transformers': '"transformers>=4.28,<4.52"',
    'mmengine': 'mmengine "setuptools>=77,<82"',
    'mmcv': f'"mmcv-lite>=2.1,<2.2" {_OPERATORS}',
    'mmcv._ext': _OPERATORS,
    'ftfy': 'ftfy',
    'regex': 'regex',
    'mmdet': '"mmdet>=3.3,<3.4"',
    'mmseg': '"mmsegmentation>=1.2.2,<1.3" ftfy regex',
    'mmpretrain': '"mmpretrain>=1.2,<1.3"',
    'mmlinattn': f'--no-deps {ROOT}',
    'PIL': 'pillow',
    'yaml': 'pyyaml',
}
BASE = ('torch', 'einops', 'filelock', 'numpy', 'mmengine', 'mmcv')  # imported by `import mmlinattn`
# Everything that the tools import. MMDetection and MMSegmentation import MMPretrain's models, so these come first.
WHOLE = (
    *('torch', 'einops', 'filelock', 'numpy', 'cv2', 'torchvision', 'mmengine', 'mmcv', 'mmcv.ops', 'ftfy', 'regex'),
    *('mmpretrain.models', 'mmdet.models', 'mmseg.models', 'mmlinattn'),
)
OPENCV = ('opencv-python', 'opencv-contrib-python', 'opencv-python-headless', 'opencv-contrib-python-headless')
REPORTED = (
    *('torch', 'torchvision', 'numpy', *OPENCV, 'setuptools', 'transformers'),
    *('mmengine', 'mmcv', 'mmcv-lite', 'mmlinattn-mmcv-ops', 'mmdet', 'mmsegmentation', 'mmpretrain', 'mmlinattn'),
    *('onedl-mmengine', 'onedl-mmcv', 'onedl-mmdetection', 'onedl-mmsegmentation', 'onedl-mmpretrain'),
)


def missing() -> str:
    """Return a message for the first module that is not installed, or ''. Nothing is imported."""
    names = [name for name in BASE if find_spec(name) is None]
    return f'{names[0]} is not installed in {sys.executable}: pip install {PIP[names[0]]}' if names else ''


def refused() -> str:
    """Return a message if ``import mmlinattn`` would refuse the value of ``MMLINATTN_OPS``, or ''."""
    value = os.environ.get('MMLINATTN_OPS', '')
    if value in ('', 'auto', 'reference'):
        return ''
    remedy = '; --compile replaces the Triton kernels' if value == 'triton' else ''
    return f"MMLINATTN_OPS={value!r}: expected 'auto' or 'reference'{remedy}"


def describe_failure(module: str, error: Exception) -> str:
    """Return one line for a module that fails on import or in use: the module, the reason, and the command to repair
    it."""
    reason = ' '.join(str(error).split())[:300]
    return f'{module} does not work in {sys.executable}: {reason}; mend it with: {_remedy(module, error, reason)}'


def _remedy(module: str, error: Exception, reason: str) -> str:
    package = module.partition('.')[0]
    culprit = (error.name or module) if isinstance(error, ModuleNotFoundError) else ''
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    # setuptools 82 dropped pkg_resources; older ones need pkgutil.ImpImporter, removed in Python 3.12
    if culprit.partition('.')[0] == 'pkg_resources' or any('pkg_resources' in file for file in files):
        return f'pip install {PIP["pkg_resources"]}'
    if culprit in PIP:
        return f'pip install {PIP[culprit]}'
    if culprit and find_spec(culprit.partition('.')[0]) is None:
        return f'pip install {culprit.partition(".")[0]}'
    # MMPretrain 1.2 imports classes and functions that transformers 4.52 and 4.56 moved
    if module.endswith('.models') and tuple(map(int, re.findall(r'\d+', _version('transformers'))[:2])) >= (4, 52):
        return f'pip install {PIP["transformers"]}'
    if module == 'cv2':  # the desktop wheel without X libraries, or two wheels over each other
        names = ' '.join(name for name in OPENCV if _version(name)) or PIP['cv2']
        return f'pip uninstall -y {names} && pip install {PIP["cv2"]}'
    if 'torchvision::' in reason or module == 'torchvision':
        return 'pip install --force-reinstall torch torchvision, both from the same index'
    if 'find_loader' in reason:  # Python 3.14 removed it
        return f'pip install {_OPERATORS}'
    if reason.startswith('MMCV==') or (module == 'mmcv.ops' and _version('mmcv')):  # compiled for another PyTorch
        return f'pip uninstall -y mmcv && pip install {PIP["mmcv"]}'
    if reason.startswith('MMEngine=='):
        return f'pip install {PIP["mmengine"]}'
    if module == 'mmcv.ops' and _version('onedl-mmcv'):
        return f'pip install --force-reinstall --no-deps onedl-mmcv {_OPERATORS}'
    target = PIP.get(module) or PIP.get(package) or _OPERATORS
    return f'pip install --force-reinstall --no-deps {target.removeprefix("--no-deps ")}'


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ''


def use(module: str) -> None:
    """Import a module, and call functions of it that may fail although the import succeeds.

    Raises:
        Exception: An error of any type; :func:`describe_failure` converts it to a line.
    """
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
        command = 'pip install --force-reinstall torchvision, from the index that your torch is from'
        if _version('mmcv'):  # compiled without CUDA
            command = f'pip uninstall -y mmcv && pip install {PIP["mmcv"]}'
        return (
            f'NMS and RoIAlign do not run on the GPU ({reason}), so no detector trains there; mend it with: {command}'
        )
    return ''


def check(modules=WHOLE) -> list:
    """Return one line for every module that does not work, except those repaired by the command in an earlier line."""
    lines: list = []
    broken: set = set()
    known: set = set()  # reasons and commands
    for module in modules:
        try:
            use(module)
        except Exception as error:
            line = describe_failure(module, error)
            causes = {str(error), line.rpartition('; mend it with: ')[2]}
            if not causes & known:
                lines.append(line)
            known |= causes
            broken.add(module)
    gpu = '' if {'torch', 'mmcv', 'mmcv.ops'} & broken else lacking_on_gpu()
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
