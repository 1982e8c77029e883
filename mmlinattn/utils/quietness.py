# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Iterator
from contextlib import contextmanager

from mmengine.logging import MMLogger


@contextmanager
def log_level(lowest: int) -> Iterator[None]:
    """Suppress lines of MMEngine's logger below a level. Setting the level also clears what loggers have cached."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel(max(level, lowest))
    try:
        yield
    finally:
        logger.setLevel(level)
