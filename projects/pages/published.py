# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rows of the papers' tables, and their config names."""

import csv
from pathlib import Path
from typing import NamedTuple, Optional

from mmlinattn.checkpoints.released import released_checkpoints

TABLES = Path(__file__).with_name('published_tables')
_METHODS = {
    'Mask R-CNN': 'maskrcnn',
    'Cascade Mask R-CNN': 'cascade',
    'RetinaNet': 'retinanet',
    'Semantic FPN': 'fpn',
    'UperNet': 'upernet',
}
_FLOPS = {'mmdet': 'flops_G_1280x800', 'mmseg': 'flops_G_512x2048', 'mmpretrain': 'flops_G'}
_METRICS = {
    'mmdet': {
        'AP_b': 'box AP',
        'AP50_b': 'box AP50',
        'AP75_b': 'box AP75',
        'AP_m': 'mask AP',
        'AP50_m': 'mask AP50',
        'AP75_m': 'mask AP75',
    },
    'mmseg': {'mIoU': 'mIoU', 'mAcc': 'mAcc'},
    'mmpretrain': {'top1': 'Top 1 Accuracy'},
}


class Row(NamedTuple):
    """Row of a paper's table.

    Attributes:
        task: ``mmdet``, ``mmseg`` or ``mmpretrain``.
        model: name of the backbone in the paper.
        recipe: method and schedule, or the resolution of a classifier.
        source: paper and table.
        params: millions of parameters as printed, or ''.
        released_params: those of the released code, to 0.01 M, or ''.
        flops: the paper's operations in G as printed, or ''.
        metrics: printed figures by metric.
        resolution: side of a classifier's image in pixels, else None.
    """

    task: str
    model: str
    recipe: str
    source: str
    params: str
    released_params: str
    flops: str
    metrics: dict
    resolution: Optional[int]

    @property
    def config_name(self) -> str:
        backbone = self.model.lower().replace('-', '_').replace('pvtv2', 'pvt_v2')
        if self.task == 'mmpretrain':
            return f'{backbone}_in1k'
        method, _, schedule = self.recipe.rpartition(' ')
        return f'{backbone}_{_METHODS[method]}_{schedule.replace("+MS", "")}'

    @property
    def name(self) -> str:
        """Task and config name, ``task/name``."""
        return f'{self.task}/{self.config_name}'

    @property
    def paper(self) -> str:
        """Name of the paper, the first word of the source."""
        return self.source.split()[0]

    @property
    def link(self) -> Optional[str]:
        """Link of the authors' checkpoint of the whole model."""
        released = released_checkpoints().get(self.config_name)
        return released and released.link


def read_rows(task: str) -> list[Row]:
    """Return the rows of a task's table in their order.

    Args:
        task: ``mmdet``, ``mmseg`` or ``mmpretrain``.
    """
    table = {'mmdet': 'detection', 'mmseg': 'segmentation', 'mmpretrain': 'classification'}[task]
    rows = []
    with open(TABLES / f'{table}.csv', newline='', encoding='utf-8') as file:
        for line in csv.DictReader(file):
            is_classifier = task == 'mmpretrain'
            rows.append(
                Row(
                    task=task,
                    model=line['model'] if is_classifier else line['backbone'],
                    recipe=line['resolution'] if is_classifier else f'{line["method"]} {line["schedule"]}',
                    source=line['source'],
                    params=line['params_M'],
                    released_params=line.get('released_params_M', ''),
                    flops=line[_FLOPS[task]],
                    metrics={name: float(line[key]) for key, name in _METRICS[task].items() if line[key]},
                    resolution=int(line['resolution']) if is_classifier else None,
                )
            )
    return rows
