# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What MMEngine would do with the contents of a checkpoint after it was read, made harmless."""

from collections import OrderedDict
from typing import Any

import numpy as np
from torch import Tensor

from ..utils.errors import CheckpointError, printable
from .config_text import count_gpus

_MAX_KEY = 1000  # characters
_STATES = ('state_dict', 'model', 'model_ema', 'state_dict_ema', 'ema_state_dict')


def make_inert(checkpoint: Any, source: str) -> Any:
    """Check the form of a loaded checkpoint, and take out of it what MMEngine would run.

    ``Runner.resume`` executes ``meta['config']`` to learn how many GPUs the saved run used. That number stays; the text
    moves to ``meta['config_text']``, which nothing runs.

    Args:
        checkpoint: what a loader gave; changed in place.
        source: where it came from, for messages.

    Raises:
        CheckpointError: it is neither a dict nor a tensor, has keys that no model has, or ``meta`` is no dict.
    """
    if isinstance(checkpoint, (Tensor, np.ndarray)):  # tables of embeddings, which some models load
        return checkpoint
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f'{source} holds a {type(checkpoint).__name__}, not a state dict')
    _check_keys(checkpoint, 'the top level', source, only_tensors=True)
    if not isinstance(checkpoint.get('state_dict', {}), dict):
        raise CheckpointError(f'state_dict of {source} is a {type(checkpoint["state_dict"]).__name__}, not a dict')
    for name in _STATES:
        _check_keys(checkpoint.get(name), name, source)
    hub = checkpoint.get('message_hub')
    for name in ('log_scalars', 'runtime_info', 'resumed_keys') if isinstance(hub, dict) else ():
        _check_keys(hub.get(name), f'message_hub.{name}', source)
    if checkpoint.get('meta') is not None:
        _make_meta_inert(checkpoint['meta'], source)
    return checkpoint


def _make_meta_inert(meta: Any, source: str) -> None:
    if not isinstance(meta, dict):
        raise CheckpointError(f'meta of {source} is a {type(meta).__name__}, not a dict')
    if 'config' in meta:
        meta['config_text'] = meta.pop('config')
        num_gpus = count_gpus(meta['config_text'])
        if num_gpus is not None:
            meta['config'] = f'gpu_ids = range({num_gpus})'
    for key in ('dataset_meta', 'CLASSES'):
        if key in meta:
            meta[key] = _printable_names(meta[key])


def _printable_names(node: Any) -> Any:
    """Class names end up on the terminal and in drawings."""
    if isinstance(node, str):
        return printable(node)
    if isinstance(node, dict):
        return type(node)((_printable_names(key), _printable_names(value)) for key, value in node.items())
    if type(node) in (list, tuple, set):
        return type(node)(map(_printable_names, node))
    return node


def _check_keys(part: Any, name: str, source: str, only_tensors: bool = False) -> None:
    """Refuse keys that are no names, and attributes hung on a dict, which would stand in for its methods."""
    if not isinstance(part, dict):
        return
    if isinstance(part, OrderedDict) and not set(vars(part)) <= {'_metadata'}:
        raise CheckpointError(f'{name} of {source} has attributes, which no state dict has')
    for key, value in part.items():
        if not isinstance(key, str):
            if not only_tensors or isinstance(value, Tensor):
                raise CheckpointError(
                    f'{name} of {source} has a key that is no string: {type(key).__name__} {key!r:.80}'
                )
        elif len(key) > _MAX_KEY:
            raise CheckpointError(f'{name} of {source} has a key of {len(key)} characters: {key[:80]}...')
        elif not key.isprintable():
            raise CheckpointError(f'{name} of {source} has a key with control characters: {key[:80]!r}')
