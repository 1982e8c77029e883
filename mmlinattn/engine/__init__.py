# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What happens around the training step: checks, checkpoints, resuming, processes.

Importing this registers the hooks, the CPU model wrapper and the atomic storage backend with
MMEngine.
"""

from ..utils.errors import RunError
from .checkpoint_match import CheckpointMatchHook
from .checkpointing import AtomicLocalBackend, CheckpointGuardHook, SafeCheckpointHook
from .data_check import DataCheckHook, check_data_config
from .distributed import CPUDistributedDataParallel, prepare_distributed
from .finite import FiniteLossHook
from .gradients import UnusedParametersHook
from .layer_decay import BackboneLayerDecayOptimWrapperConstructor
from .resume_guard import guard
from .resuming import ExactResumeHook
from .stopping import StopHook

__all__ = [
    'AtomicLocalBackend',
    'BackboneLayerDecayOptimWrapperConstructor',
    'CPUDistributedDataParallel',
    'CheckpointGuardHook',
    'CheckpointMatchHook',
    'DataCheckHook',
    'ExactResumeHook',
    'FiniteLossHook',
    'RunError',
    'SafeCheckpointHook',
    'StopHook',
    'UnusedParametersHook',
    'check_data_config',
    'guard',
    'prepare_distributed',
]
