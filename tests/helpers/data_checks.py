# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Loops, models and data sets that ``DataCheckHook`` looks at."""

from types import SimpleNamespace

import pytest
from mmengine.registry import DATASETS, init_default_scope
from mmengine.runner.base_loop import BaseLoop
from torch import nn


class Loop(BaseLoop):
    """A loop over a data set, as a runner has it."""

    def __init__(self, dataset, *metrics):
        self.dataloader, self.evaluator = SimpleNamespace(dataset=dataset), SimpleNamespace(metrics=metrics)

    def run(self):
        raise NotImplementedError


def model(**heads):
    made = nn.Module()
    made.__dict__.update({name: SimpleNamespace(num_classes=count) for name, count in heads.items()})
    return made


DETECTOR, SEGMENTOR, CLASSIFIER = model(bbox_head=3), model(decode_head=2), model(head=3)


class Data(list):
    """Samples with names of classes."""

    get_data_info = list.__getitem__

    def __init__(self, *infos, classes=(), **more):
        super().__init__(infos)
        self.metainfo = dict(classes=classes)
        vars(self).update(more)


def build(scope, config):
    pytest.importorskip(scope)
    init_default_scope(scope)
    return DATASETS.build(config)
