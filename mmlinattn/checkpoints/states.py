# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Split loaded checkpoints into parts and rename their weights to the names of this project."""

import re
from collections.abc import Mapping
from typing import Any, Optional

from torch import Tensor

from ..utils.errors import CheckpointError
from .fit import some
from .key_mappings import find_key_mapping
from .safe import STATE_KEYS

# prefixes of all parts of an OpenMMLab model other than its backbone
_HEADS = tuple(
    f'{part}.'
    for part in ('head neck rpn_head roi_head bbox_head mask_head decode_head auxiliary_head data_preprocessor').split()
)


def state_dict_of(checkpoint: Any, source: str) -> dict[str, Tensor]:
    """Return the tensors of a loaded checkpoint by name, without the prefixes of DDP and ``torch.compile``.

    Args:
        checkpoint (dict): A state dict, or a dict with one under ``state_dict``, ``model``, ``model_ema`` or
            ``state_dict_ema`` (the first one present).
        source (str): Path or address of the checkpoint, for messages.

    Raises:
        CheckpointError: The checkpoint holds no tensors.
    """
    state = checkpoint
    for key in STATE_KEYS:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
            break
    if not isinstance(state, Mapping):
        raise CheckpointError(f'{source} holds a {type(state).__name__}, not a state dict')
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f'{source} holds no weights; it has {some(state)}')
    tensors = {not_compiled(key): value for key, value in tensors.items()}
    if all(key.startswith('module.') or key == 'n_averaged' for key in tensors):  # also of PyTorch's AveragedModel
        tensors.pop('n_averaged', None)
        tensors = {re.sub(r'^(module\.)+', '', key): value for key, value in tensors.items()}
    return tensors


def not_compiled(key: str) -> str:
    """Strip ``_orig_mod``, the prefix of ``torch.compile(module)``, from a key."""
    return re.sub(r'(^|\.)(_orig_mod\.)+', r'\1', key)


def strip_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries of ``state`` under ``prefix`` (``'backbone'`` or ``'backbone.'``), with the prefix removed."""
    prefix = prefix if prefix.endswith('.') else f'{prefix}.'
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}


def backbone_state(
    checkpoint: Any, source: str, prefix: Optional[str] = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Split a checkpoint into backbone weights, head weights and keys dropped on purpose.

    Args:
        checkpoint (dict): A file of this project, or a released one with a known key mapping. It holds a backbone, or a
            whole model with a ``backbone.`` part.
        source (str): Path or address of the checkpoint, for messages.
        prefix (str, optional): Prefix of the weights to take. Defaults to ``backbone.`` if the file has such keys, and
            to no prefix otherwise.

    Returns:
        tuple[dict, dict, list]: Backbone weights, head weights under the same prefix, and dropped keys (of released
            files only). The prefix is removed, and released keys are renamed to those of this project.

    Raises:
        CheckpointError: There are no tensors, or none under ``prefix``.
    """
    state = state_dict_of(checkpoint, source)
    part = strip_prefix(state, prefix or 'backbone')
    # for prefix='backbone.', a file of a backbone alone is accepted too
    if not part and prefix and prefix.rstrip('.') != 'backbone':
        raise CheckpointError(f'{source} holds nothing under prefix {prefix!r}; its keys are like {some(state)}')
    state = part or state
    mapping = find_key_mapping(state)
    if mapping is not None:
        return mapping.convert(state)
    head = {key: value for key, value in state.items() if key.startswith(_HEADS)}
    return {key: value for key, value in state.items() if key not in head}, head, []


def model_state(checkpoint: Any, source: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return all weights of a checkpoint under the names of MMDetection, MMSegmentation or MMPretrain.

    Weights of the backbone are renamed. So are the neck and the head of a released classifier. Other necks and heads
    keep their names: those of MMDetection 2.x and MMSegmentation 0.x are still current (FPN, RPN, RoI, RetinaNet,
    Semantic FPN, UperNet, FCN). ``source`` is the path or address in messages.

    Returns:
        tuple[dict, list[str]]: The state dict, and the keys dropped on purpose.

    Raises:
        CheckpointError: There are no tensors.
    """
    state = state_dict_of(checkpoint, source)
    backbone, head, dropped = backbone_state(state, source)
    whole = {f'backbone.{key}': value for key, value in backbone.items()}
    if strip_prefix(state, 'backbone'):
        dropped = [f'backbone.{key}' for key in dropped]
        whole.update((k, v) for k, v in state.items() if not k.startswith('backbone.'))
    whole.update(head)
    return whole, dropped
