# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Findings of data checks, and helpers for their messages."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

MAX_NAMES = 30  # that are printed


class Finding(NamedTuple):
    """A finding of a check: a line, and True if training or testing would be wrong."""

    text: str
    is_fault: bool = True


def classes_of(dataset: Any) -> list:
    """Return ``metainfo.classes``, empty without any."""
    meta = getattr(dataset, 'metainfo', None)  # a list, of joined data sets that differ
    names = meta.get('classes') if isinstance(meta, dict) else None
    return list(names) if isinstance(names, (list, tuple)) else []


def transforms_of(dataset: Any) -> Sequence:
    """Return the transforms of its pipeline."""
    return getattr(getattr(dataset, 'pipeline', None), 'transforms', ())


def is_metric_learning(model: Any) -> bool:
    """Return True if a model compares images, by prototypes or a triplet loss: it is validated with other classes."""
    return hasattr(model, 'prototype') or hasattr(getattr(model, 'head', None), 'loss_triplet')


def decode_head_of(model: Any) -> Any:
    """Return the final head of a segmentor, None of other models."""
    head = getattr(model, 'decode_head', None)
    return head[-1] if isinstance(head, nn.ModuleList) else head


def format_names(names: Sequence) -> str:
    """Return class names as written in a config."""
    shown = ', '.join(repr(name) for name in names[:MAX_NAMES])
    return f'({shown}{"," if len(names) == 1 else ", ..." if len(names) > MAX_NAMES else ""})'
