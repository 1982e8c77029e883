# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Set up distributed processes; a Runner that protects files and checks loaded checkpoints."""

from .distributed import CPUDistributedDataParallel, launched_rank, leave_process_group, prepare_distributed
from .safe_runner import SafeRunner
from .start import find_latest_checkpoint

__all__ = [
    'CPUDistributedDataParallel',
    'SafeRunner',
    'find_latest_checkpoint',
    'launched_rank',
    'leave_process_group',
    'prepare_distributed',
]
