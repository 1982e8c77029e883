# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Checks an environment, and names the command that mends it.

``tools/check_env.py`` runs this file where PyTorch or MMEngine may be missing, so it imports Python's own modules only.
"""

import importlib
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
# the checkout, else what a wheel brings along
ROOT = HERE.parent if (HERE.parent / 'mmcv_ops').is_dir() else HERE / '.mim'

_OPERATORS = shlex.quote(str(ROOT / 'mmcv_ops'))

# module -> the arguments of `pip install`; the versions are those of requirements/mminstall.txt
PIP = {
    'torch': 'torch torchvision',
    'torchvision': 'torchvision',
    'einops': 'einops',
    'filelock': 'filelock',
    'numpy': 'numpy',
    'pkg_resources': '"setuptools<82"',
    'mmengine': 'mmengine "setuptools<82"',
    'mmcv': f'"mmcv-lite>=2.1,<2.2" {_OPERATORS}',
    'mmcv._ext': _OPERATORS,
    'ftfy': 'ftfy',
    'regex': 'regex',
    'mmdet': '"mmdet>=3.3,<3.4"',
    'mmseg': '"mmsegmentation>=1.2.2,<1.3" ftfy regex',
    'mmpretrain': '"mmpretrain>=1.2,<1.3"',
    'mmlinattn': f'--no-deps {ROOT}',
}
BASE = ('torch', 'einops', 'filelock', 'numpy', 'mmengine', 'mmcv')  # what `import mmlinattn` needs
WHOLE = (*BASE[:4], 'torchvision', *BASE[4:], 'mmcv.ops', 'ftfy', 'regex', 'mmdet', 'mmseg', 'mmpretrain', 'mmlinattn')


def missing(modules=BASE) -> str:
    """The line for the first module that is not installed, '' where all are. It imports none of them."""
    names = [name for name in modules if find_spec(name) is None]
    return f'{names[0]} is not installed in {sys.executable}: pip install {PIP[names[0]]}' if names else ''


def explained(module: str, error: Exception) -> str:
    """The line for a module that cannot be imported or used: which part, why, and the command that mends it."""
    culprit = getattr(error, 'name', None) or module
    reason = ' '.join(str(error).split())[:300]
    if isinstance(error, ModuleNotFoundError) and culprit in PIP:
        command = f'pip install {PIP[culprit]}'
    elif 'torchvision::' in reason or module == 'torchvision':
        command = 'pip install --force-reinstall torch torchvision, both from the same index'
    elif module == 'mmcv.ops' and _is_there('mmcv'):  # a compiled one, of another PyTorch
        command = f'pip uninstall -y mmcv && pip install {PIP["mmcv"]}'
    elif module == 'mmcv.ops' and _is_there('onedl-mmcv'):
        command = f'pip install --force-reinstall --no-deps onedl-mmcv {_OPERATORS}'
    else:
        command = f'pip install --force-reinstall --no-deps {PIP.get(module, PIP["mmcv._ext"])}'
    return f'{module} does not work in {sys.executable}: {reason}; mend it with: {command}'


def _is_there(name: str) -> bool:
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


def use(module: str) -> None:
    """Import a module and, of torchvision and ``mmcv.ops``, run operators: a half installed one fails as late as that.

    Raises:
        Exception: Of any kind; :func:`explained` makes a line of it.
    """
    imported = importlib.import_module(module)
    if module == 'torchvision':
        import torch

        imported.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([0.5]), 0.5)
    elif module == 'mmcv.ops':
        run_operators('cpu')


def run_operators(device: str) -> None:
    """Run MMCV's NMS and RoIAlign, which every detector calls, on a device."""
    import torch
    from mmcv.ops import nms, roi_align

    box = torch.tensor([[0.0, 0.0, 1.0, 1.0]], device=device)
    nms(box, box[0, :1], 0.5)
    roi_align(box.new_ones(1, 1, 4, 4), torch.cat([box.new_zeros(1, 1), box], 1), 1, 1.0, 0, 'avg', True)


def lacking_on_gpu() -> str:
    """The line for MMCV's operators that do not run on the GPU; '' where they do, and where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return ''
    try:
        run_operators('cuda')
    except Exception as error:
        reason = ' '.join(str(error).split())[:200]
        command = 'pip install --force-reinstall torchvision, from the index that your torch is from'
        if _is_there('mmcv'):  # compiled without CUDA
            command = f'pip uninstall -y mmcv && pip install {PIP["mmcv"]}'
        return (
            f'NMS and RoIAlign do not run on the GPU ({reason}), so no detector trains there; mend it with: {command}'
        )
    return ''


def check(modules=WHOLE) -> list:
    """One line for every module that does not work; what fails only because of an earlier one is mended with that."""
    lines, broken = [], set()
    for module in modules:
        try:
            use(module)
        except Exception as error:
            culprit = getattr(error, 'name', None)
            if culprit not in broken:
                lines.append(explained(module, error))
            broken.update({module, culprit or module})
    gpu = '' if {'torch', 'mmcv', 'mmcv.ops'} & broken else lacking_on_gpu()
    return [*lines, gpu] if gpu else lines
