# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Linear-attention backbones for MMDetection, MMSegmentation and MMPretrain.

``import mmlinattn`` registers everything in MMEngine's root registries: hooks, the runner and optimizer constructors by
name, so that their modules are imported when a config names them. It needs torch, einops, filelock, numpy, mmengine and
mmcv (or mmcv-lite) only.
"""

import sys
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from mmengine.config.utils import MODULE2PACKAGE

if not sys.warnoptions:  # MMEngine imports it at every look-up of a package
    warnings.filterwarnings('ignore', message='pkg_resources is deprecated')
with warnings.catch_warnings():
    # mmengine.model imports parts of torch.distributed that PyTorch still writes in TorchScript: nothing of ours
    warnings.filterwarnings('ignore', message='`torch.jit', category=DeprecationWarning)
    import mmengine.model  # noqa: F401

from . import backbones, necks, registry
from . import forward_pass as inference  # former name, for tools that import it
from .checkpoints import schemes
from .version import __version__

# lets a config inherit ours: _base_ = 'mmlinattn::mmdet/ravlt_b_cascade_3x.py'
# 'mmlinattn.version' is no distribution, so MMEngine looks the package up by import: right for wheels and editable
# installs
MODULE2PACKAGE.setdefault('mmlinattn', 'mmlinattn.version')
# MMEngine knows mmseg by the name of its original distribution; where another one provides it, by the module's own
try:
    distribution(MODULE2PACKAGE['mmseg'])
except PackageNotFoundError:
    MODULE2PACKAGE['mmseg'] = 'mmseg'
schemes.register()

__all__ = ['__version__', 'backbones', 'inference', 'necks', 'registry']


def __getattr__(name: str) -> Any:
    if name == 'engine':
        return import_module('.engine', __name__)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
