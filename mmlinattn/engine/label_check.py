# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Labels of a detection or classification data set that the model's head has no class for."""

from numbers import Integral
from typing import Optional

import numpy as np
from mmengine.model import is_model_wrapper
from torch import nn

from ..utils.errors import RunError

__all__ = ['check_labels']

_NUM_READ = 2000  # samples, spread evenly


def check_labels(dataset, model: nn.Module) -> None:
    """Compare the labels of some samples with the classes of the head; PyTorch's own error names neither.

    Args:
        dataset: the data set that trains, in any wrappers.
        model: a detector or classifier; others are passed over.

    Raises:
        RunError: a label is beyond ``num_classes``.
    """
    while is_model_wrapper(model):
        model = model.module
    num_classes = _num_classes(model)
    if num_classes is None or not hasattr(dataset, 'get_data_info'):
        return
    for index in range(0, len(dataset), max(1, len(dataset) // _NUM_READ)):
        info = dataset.get_data_info(index)
        for label in _labels(info):
            if label >= num_classes:
                names = dataset.metainfo.get('classes') or ()
                name = f' ({names[label]})' if label < len(names) else ''
                raise RunError(
                    f'num_classes = {num_classes} of the head is too small for the data: {info.get("img_path")} has '
                    f'label {label}{name}, and the data set {len(names)} classes. Set num_classes of the head, or '
                    'metainfo.classes of the data set to those that count.'
                )


def _num_classes(model: nn.Module) -> Optional[int]:
    head = getattr(getattr(model, 'roi_head', None), 'bbox_head', None) or getattr(model, 'bbox_head', None)
    head = head if head is not None else getattr(model, 'head', None)
    heads = head if isinstance(head, nn.ModuleList) else [head]
    counts = [getattr(head, 'num_classes', None) for head in heads]
    return min(counts) if counts and all(type(count) is int for count in counts) else None


def _labels(info: dict) -> list[Integral]:
    """Labels of the objects, and that of the picture, of which data sets of several labels a picture have a list."""
    found = [instance.get('bbox_label') for instance in info.get('instances') or () if isinstance(instance, dict)]
    label = info.get('gt_label')
    label = label.tolist() if isinstance(label, np.ndarray) else label
    found += label if isinstance(label, (list, tuple)) else [label]
    return [label for label in found if isinstance(label, Integral) and not isinstance(label, bool)]
