# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Results of data checks, and helpers for their messages."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

MAX_NAMES = 30  # that are printed


class Finding(NamedTuple):
    """Result of a check: a message of one line; ``is_fault`` is True if training or testing would give wrong
    results."""

    text: str
    is_fault: bool = True


def classes_of(dataset: Any) -> list:
    """Return ``metainfo.classes`` of a data set, or an empty list if it has none."""
    meta = getattr(dataset, 'metainfo', None)  # a list, of joined data sets that differ
    names = meta.get('classes') if isinstance(meta, dict) else None
    return list(names) if isinstance(names, (list, tuple)) else []


def transforms_of(dataset: Any) -> Sequence:
    """Return the transforms in the pipeline of a data set."""
    return getattr(getattr(dataset, 'pipeline', None), 'transforms', ())


def is_metric_learning(model: Any) -> bool:
    """Return True if a model compares images by prototypes or a triplet loss, and is thus validated on other
    classes."""
    return hasattr(model, 'prototype') or hasattr(getattr(model, 'head', None), 'loss_triplet')


def decode_head_of(model: Any) -> Any:
    """Return the final ``decode_head`` of a segmentor, or None for other models."""
    head = getattr(model, 'decode_head', None)
    return head[-1] if isinstance(head, nn.ModuleList) else head


def format_names(names: Sequence) -> str:
    """Format class names as a tuple in a config, at most :data:`MAX_NAMES` of them."""
    shown = ', '.join(repr(name) for name in names[:MAX_NAMES])
    return f'({shown}{"," if len(names) == 1 else ", ..." if len(names) > MAX_NAMES else ""})'
