# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Findings of checks of data, and how they write class names."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

MOST_NAMES = 30  # that are printed


class Finding(NamedTuple):
    """A finding of a check: a line, and whether training or testing would be wrong."""

    text: str
    is_fault: bool = True


def classes_of(dataset: Any) -> list:
    """``metainfo.classes``, empty where there are none."""
    meta = getattr(dataset, 'metainfo', None)  # a list, of joined data sets that differ
    names = meta.get('classes') if isinstance(meta, dict) else None
    return list(names) if isinstance(names, (list, tuple)) else []


def transforms_of(dataset: Any) -> Sequence:
    """The steps of its pipeline."""
    return getattr(getattr(dataset, 'pipeline', None), 'transforms', ())


def compares_images(model: Any) -> bool:
    """Return True if a model compares images, by prototypes or a triplet loss: it is validated with other classes."""
    return hasattr(model, 'prototype') or hasattr(getattr(model, 'head', None), 'loss_triplet')


def decode_head_of(model: Any) -> Any:
    """The head of a segmentor that decides, the last of a cascade; None of other models."""
    head = getattr(model, 'decode_head', None)
    return head[-1] if isinstance(head, nn.ModuleList) else head


def written(names: Sequence) -> str:
    """Class names as a config has them."""
    shown = ', '.join(repr(name) for name in names[:MOST_NAMES])
    return f'({shown}{"," if len(names) == 1 else ", ..." if len(names) > MOST_NAMES else ""})'
