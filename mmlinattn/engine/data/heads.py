# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Find the heads of a model and the numbers of their classes."""

from typing import Any

from torch import nn

_NAMES = ('bbox_head', 'mask_head', 'head', 'decode_head', 'auxiliary_head')
_NO_CLASSES = ('rpn_conv', 'max_depth', 'boundary_threshold')  # attributes of heads of proposals, depth and edges


def counts_of_stages(model: nn.Module) -> dict[str, list[int]]:
    """Return ``num_classes`` of all stages by name of the classifying head; {} for models that take names as text."""
    if hasattr(model, 'language_model'):
        return {}
    found: dict[str, list[int]] = {}
    for name in _NAMES:
        head: Any = getattr(getattr(model, 'roi_head', None), name, None) or getattr(model, name, None)
        for stage in head if isinstance(head, nn.ModuleList) else [head]:
            count: Any = getattr(stage, 'num_classes', None)
            is_other = getattr(stage, 'class_agnostic', False) or any(hasattr(stage, each) for each in _NO_CLASSES)
            if type(count) is int and not is_other:
                found.setdefault(name, []).append(count)
    return found


def decode_head_of(model: Any) -> Any:
    """Return the final ``decode_head`` of a segmentor, or None for other models."""
    head = getattr(model, 'decode_head', None)
    return head[-1] if isinstance(head, nn.ModuleList) else head


def is_metric_learning(model: Any) -> bool:
    """Return True if a model compares images by prototypes or a triplet loss: its validation has other classes."""
    return hasattr(model, 'prototype') or hasattr(getattr(model, 'head', None), 'loss_triplet')


def max_per_image(model: nn.Module) -> int:
    """Return the largest number of objects that a detector returns for an image; 0 for no limit and other models."""
    head = getattr(model, 'roi_head', None) or getattr(model, 'bbox_head', None)
    limits = getattr(head, 'test_cfg', None) or {}
    return int(limits.get('max_per_img', 0) or 0) if isinstance(limits, dict) else 0
