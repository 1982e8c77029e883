# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mmengine.logging import MMLogger


@contextmanager
def log_level(lowest: int, *others: logging.Logger) -> Iterator[None]:
    """Suppress messages below the level ``lowest`` in MMEngine's logger and ``others``, inside a ``with`` block."""
    levels = {logger: logger.level for logger in (MMLogger.get_current_instance(), *others)}
    for logger, level in levels.items():
        logger.setLevel(max(level, lowest))
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
