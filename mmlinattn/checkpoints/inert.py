# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What MMEngine would do with the contents of a checkpoint after it was read, made harmless."""

from typing import Any

from .config_text import count_gpus
from .safe import CheckpointError


def make_inert(checkpoint: Any, source: str) -> Any:
    """Take the parts out of a loaded checkpoint that MMEngine would run.

    ``Runner.resume`` executes ``meta['config']`` to learn how many GPUs the saved run used. That number stays; the text
    moves to ``meta['config_text']``, which nothing runs.

    Args:
        checkpoint: what a loader gave; changed in place.
        source: where it came from, for messages.

    Raises:
        CheckpointError: ``meta`` is there and is no dict.
    """
    meta = checkpoint.get('meta') if isinstance(checkpoint, dict) else None
    if meta is None:
        return checkpoint
    if not isinstance(meta, dict):
        raise CheckpointError(f'meta of {source} is a {type(meta).__name__}, not a dict')
    if 'config' in meta:
        meta['config_text'] = meta.pop('config')
        num_gpus = count_gpus(meta['config_text'])
        if num_gpus is not None:
            meta['config'] = f'gpu_ids = range({num_gpus})'
    return checkpoint
