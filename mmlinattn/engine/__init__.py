# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Hooks, optimizer constructors and the runner.

Importing this package registers them, the CPU model wrapper and the atomic storage backend. The tools add the hooks
that a config does not name, ``CompileHook`` only with ``--compile``.
"""

from ..utils.errors import RunError
from . import hooks
from .hooks import *  # noqa: F403
from .optimizers import BackboneLayerDecayOptimWrapperConstructor, MergedOptimWrapperConstructor
from .runner import CPUDistributedDataParallel, SafeRunner, prepare_distributed

__all__ = [
    'BackboneLayerDecayOptimWrapperConstructor',
    'CPUDistributedDataParallel',
    'MergedOptimWrapperConstructor',
    'RunError',
    'SafeRunner',
    'prepare_distributed',
]
__all__ += hooks.__all__
