# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Process groups, and a Runner that is careful with files."""

from .distributed import CPUDistributedDataParallel, leave_process_group, prepare_distributed
from .safe_runner import SafeRunner, find_latest_checkpoint

__all__ = [
    'CPUDistributedDataParallel',
    'SafeRunner',
    'find_latest_checkpoint',
    'leave_process_group',
    'prepare_distributed',
]
