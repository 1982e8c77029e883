# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Hide configuration dumps and deprecation warnings of upstream libraries on the console; the log file has them."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from mmengine.logging import MMLogger

# beginnings of MMEngine's messages for the log file only; its records have no other identification
HIDDEN = (
    '\n----',  # system environment
    'Config:',
    'Hooks will be executed in the following order',
    'paramwise_options',
    'Distributed training is not used',
    'Exp name:',
    'LR is set based on batch size of',  # the notice of ToolRunner counts accumulated steps
    'Checkpoints will be saved to',
    'Evaluating ',
    'bbox_mAP_copypaste',
    'segm_mAP_copypaste',
    'Converting ground truth to coco format',
    '"FileClient" will be deprecated',
    '"HardDiskBackend" is the alias',
    'Failed to search registry with scope',
    'The prefix is not set in metric class',
    'Failed to import `None.registry`',
    'Failed to add None',
)
# warnings of dependencies about deprecations or their own defaults
WARNINGS = (
    '(?is).*deprecat',
    'torch.meshgrid',
    'The draw is False',
    'Failed to add <class',  # a visualizer without folder, as inferencers have
    'Setting (MKL|OMP)_NUM_THREADS',
    'Default ``avg_non_ignore`` is False',
    'Warning: The (bbox|polygon) is out of bounds',
)


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING or not record.getMessage().startswith(HIDDEN)


def quiet_console(logger: MMLogger) -> None:
    """Hide records that begin as :data:`HIDDEN` on the console, unless the log level is DEBUG; the log file has
    them."""
    for handler in logger.handlers:
        if not isinstance(handler, logging.FileHandler) and handler.level > logging.DEBUG:
            handler.addFilter(_is_shown)


@contextmanager
def quiet_programs() -> Iterator[None]:
    """Hide stderr of started programs: MMEngine asks a compiler that may be missing for its version."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, 'w') as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def quiet_upstream() -> None:
    """Silence deprecation warnings of dependencies and the output of pycocotools in this process.

    ``python -W`` and ``PYTHONWARNINGS`` restore the warnings.
    """
    if not sys.warnoptions:
        for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter('ignore', kind)
        for message in WARNINGS:
            warnings.filterwarnings('ignore', message=message)
    try:
        from pycocotools import coco, cocoeval
    except ImportError:  # of detectors only
        return
    for module in (coco, cocoeval):  # 24 lines per evaluation; the log has the metrics
        module.print = lambda *args, **kwargs: None
