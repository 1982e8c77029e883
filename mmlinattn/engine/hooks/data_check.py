# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Iterator
from numbers import Integral
from typing import Any, Optional

import numpy as np
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner.base_loop import BaseLoop
from torch import nn

from ...utils.building import unwrapped
from ...utils.errors import RunError

_NUM_READ = 2000  # samples whose labels are looked at, spread evenly


def _leaf_datasets(dataset) -> Iterator:
    """The data sets inside wrappers such as ``RepeatDataset`` and ``ConcatDataset``."""
    inner = vars(dataset).get('dataset', vars(dataset).get('_dataset'))
    children = dataset.datasets if hasattr(dataset, 'datasets') else [] if inner is None else [inner]
    for child in children:
        yield from _leaf_datasets(child)
    if not children:
        yield dataset


def _num_classes(model: nn.Module) -> Optional[int]:
    """Classes of the head of a detector or classifier."""
    head: Any = getattr(getattr(model, 'roi_head', None), 'bbox_head', None) or getattr(model, 'bbox_head', None)
    head = head if head is not None else getattr(model, 'head', None)
    stages = head if isinstance(head, nn.ModuleList) else [head]
    counts = [getattr(stage, 'num_classes', None) for stage in stages]
    return min((count for count in counts if type(count) is int), default=None)


def _labels(info: dict) -> list[int]:
    """Labels of the objects, and that, or those, of the image."""
    found = [instance.get('bbox_label') for instance in info.get('instances') or () if isinstance(instance, dict)]
    found += np.ravel(info['gt_label']).tolist() if info.get('gt_label') is not None else []
    return [int(label) for label in found if isinstance(label, Integral)]


def check_labels(dataset, model: nn.Module) -> None:
    """Compare the labels of a data set with the classes of the head; PyTorch's own error names neither.

    Args:
        dataset: The data set that trains. Of some 2000 samples the labels are read; of segmentation maps none is, there
            the number of class names counts.
        model: A detector, segmentor or classifier.

    Raises:
        RunError: A label is beyond ``num_classes``.
    """
    model = unwrapped(model)
    names = (getattr(dataset, 'metainfo', None) or {}).get('classes') or ()
    advice = 'Set num_classes of the head, or metainfo.classes of the data set to those that count.'
    if hasattr(model, 'decode_head'):
        count = getattr(model, 'num_classes', None)
        if type(count) is int and count < len(names):
            raise RunError(
                f'num_classes = {count} of the head is too small for the {len(names)} classes of the data. {advice}'
            )
        return
    num_classes = _num_classes(model)
    if num_classes is None or not hasattr(dataset, 'get_data_info'):
        return
    for index in range(0, len(dataset), max(1, len(dataset) // _NUM_READ)):
        info = dataset.get_data_info(index)
        for label in _labels(info):
            if label >= num_classes:
                name = f' ({names[label]})' if label < len(names) else ''
                raise RunError(
                    f'num_classes = {num_classes} of the head is too small for the data: {info.get("img_path")} has '
                    f'label {label}{name}, and the data set {len(names)} classes. {advice}'
                )


@HOOKS.register_module(force=True)
class DataCheckHook(Hook):
    """Before the first iteration, look whether the data sets hold images, and the labels fit the head.

    The main process looks; the others wait for it where the model is first synchronised.

    Raises:
        RunError: A data set holds no image; a label is beyond ``num_classes``.
    """

    priority = 'VERY_HIGH'

    def before_run(self, runner) -> None:
        """Check the data sets of all loops that will run."""
        if not is_main_process():
            return
        for stage in ('train', 'val', 'test'):
            loop = getattr(runner, f'_{stage}_loop')
            if not isinstance(loop, BaseLoop):  # not built: this run does not use it
                continue
            for dataset in _leaf_datasets(loop.dataloader.dataset):
                if len(dataset) == 0:
                    ann_file = getattr(dataset, 'ann_file', '')
                    raise RunError(
                        f'{stage}_dataloader ({type(dataset).__name__}, ann_file {ann_file!r}) holds no image.'
                    )
                if stage == 'train':
                    check_labels(dataset, runner.model)
