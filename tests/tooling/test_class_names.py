# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Class names of a model, from config and checkpoint."""

import copy

import pytest
from helpers.config_helpers import load
from mmengine.config import Config

from mmlinattn.tooling.class_names import class_names, num_classes
from mmlinattn.tooling.datasets.shapes import COCO_CLASSES


@pytest.mark.parametrize(
    ('meta', 'expected'),
    [
        (dict(dataset_meta=dict(classes=tuple('abcdef'))), list('abcdef')),  # the checkpoint's own come first
        (dict(dataset_meta=dict(CLASSES=tuple('abcdef'))), list('abcdef')),
        (dict(CLASSES=tuple('abcdef')), list('abcdef')),  # MMDetection 2.x
        (dict(dataset_meta=dict(classes=tuple('abc'))), None),  # another head: the names of the config
        (None, None),
    ],
)
def test_class_names_of_checkpoint_and_config(meta, expected):
    pytest.importorskip('mmdet')
    cfg = copy.deepcopy(load('mmdet/ravlt_shapes_quickstart'))
    assert class_names(cfg, meta) == (expected or list(COCO_CLASSES))
    del cfg.test_dataloader.dataset['metainfo']
    assert class_names(cfg, meta) == expected  # COCO's 80 names are not of these six
    cfg.model.roi_head.bbox_head.num_classes = 80
    assert class_names(cfg)[:2] == ['person', 'bicycle']


@pytest.mark.parametrize(
    ('model', 'expected'),
    [
        (dict(bbox_head=dict(num_classes=3)), 3),
        (dict(decode_head=[dict(num_classes=2), dict(num_classes=3)]), 3),  # cascades: the last decides
        (dict(roi_head=dict(bbox_head=[dict(num_classes=3)]), bbox_head=dict(num_classes=1)), 3),
        (dict(head=dict(num_classes=3), neck=None), 3),
        (dict(), 0),
    ],
    ids=str,
)
def test_names_of_the_data_if_the_head_has_as_many(model, expected):
    for names, given in ((['x', 'y', 'z'], 'metainfo'), (('x', 'y', 'z'), 'classes'), (['x'], 'metainfo')):
        data = dict(metainfo=dict(classes=names)) if given == 'metainfo' else dict(classes=names)
        cfg = Config(dict(model=model, test_dataloader=dict(dataset=dict(datasets=[data, {}]))))
        assert num_classes(cfg) == expected
        assert class_names(cfg) == (list(names) if expected in (0, len(names)) else None)
    assert class_names(Config(dict(model=model))) is None
