# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Hooks of MMEngine's Runner."""

from .checkpoint_match import CheckpointMatchHook
from .checkpointing import SafeCheckpointHook
from .compiling import CompileHook
from .data_check import DataCheckHook
from .exact_resume import ExactResumeHook
from .finite_loss import FiniteLossHook
from .progress import ProgressHook
from .rehearsal import RehearsalHook
from .results import ResultsHook
from .schedule_check import ScheduleCheckHook
from .stop import StopHook
from .unused_parameters import UnusedParametersHook

__all__ = [
    'CheckpointMatchHook',
    'CompileHook',
    'DataCheckHook',
    'ExactResumeHook',
    'FiniteLossHook',
    'ProgressHook',
    'RehearsalHook',
    'ResultsHook',
    'SafeCheckpointHook',
    'ScheduleCheckHook',
    'StopHook',
    'UnusedParametersHook',
]
