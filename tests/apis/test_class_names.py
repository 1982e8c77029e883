# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the labels of a model are called."""

import copy

import pytest
from config_helpers import load

from mmlinattn.apis.class_names import class_names
from mmlinattn.datasets.shapes import COCO_CLASSES


@pytest.mark.parametrize(
    ('meta', 'expected'),
    [
        (dict(dataset_meta=dict(classes=tuple('abcdef'))), list('abcdef')),  # the checkpoint's own come first
        (dict(dataset_meta=dict(CLASSES=tuple('abcdef'))), list('abcdef')),
        (dict(CLASSES=tuple('abcdef')), list('abcdef')),  # MMDetection 2.x
        (dict(dataset_meta=dict(classes=tuple('abc'))), None),  # of another head: those of the config
        (dict(dataset_meta=None), None),
        (None, None),
    ],
)
def test_where_class_names_come_from(meta, expected):
    pytest.importorskip('mmdet')
    cfg = copy.deepcopy(load('mmdet/ravlt_shapes_quickstart'))
    assert class_names(cfg, meta) == (expected or list(COCO_CLASSES))
    del cfg.test_dataloader.dataset['metainfo']
    assert class_names(cfg, meta) == expected  # COCO's 80 names are not of these six
    cfg.model.roi_head.bbox_head.num_classes = 80
    assert class_names(cfg)[:2] == ['person', 'bicycle']
