# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Loops, models, data sets and COCO files for the tests of ``DataCheckHook``."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from mmengine.registry import DATASETS, init_default_scope
from mmengine.runner.base_loop import BaseLoop
from PIL import Image
from torch import nn


class Loop(BaseLoop):
    def __init__(self, dataset, *metrics):
        self.dataloader, self.evaluator = SimpleNamespace(dataset=dataset), SimpleNamespace(metrics=metrics)

    def run(self):
        raise NotImplementedError


def model(**heads):
    """Return a model with the given numbers of classes by the name of the head."""
    made = nn.Module()
    made.__dict__.update({name: SimpleNamespace(num_classes=count) for name, count in heads.items()})
    return made


DETECTOR, SEGMENTOR, CLASSIFIER = model(bbox_head=3), model(decode_head=2), model(head=3)


class Data(list):
    get_data_info = list.__getitem__

    def __init__(self, *infos, classes=(), **more):
        super().__init__(infos)
        self.metainfo = dict(classes=classes)
        vars(self).update(more)


def build(scope, config):
    """Build a data set of an upstream project, or skip the test without the project."""
    pytest.importorskip(scope)
    init_default_scope(scope)
    return DATASETS.build(config)


IMAGES = [dict(id=i, file_name=f'{i}.png', width=40, height=30) for i in (1, 2)]
BOX = dict(iscrowd=0, area=100, bbox=[2, 2, 10, 10])
NAMES = ('cat', 'dog', 'owl')


def write_coco(folder, names=NAMES, name='a.json', box=(), **changes):
    """Write two images, and a COCO file with an object of each category and gaps between the ids. Return its path.

    ``names`` are the categories and ``name`` is the file. ``box`` replaces fields of the objects, ``changes`` replace
    the lists ``images``, ``annotations`` and ``categories``.
    """
    for entry in IMAGES:
        Image.new('RGB', (40, 30)).save(folder / entry['file_name'])
    ids = [7 * i + 3 for i in range(len(names))]
    boxes = [dict(BOX, id=i + 1, image_id=1 + i % 2, category_id=each) | dict(box) for i, each in enumerate(ids)]
    categories = [dict(id=i, name=name) for i, name in zip(ids, names)]
    content = {**dict(images=IMAGES, annotations=boxes, categories=categories), **changes}
    (folder / name).write_text(json.dumps(content))
    return folder / name


def coco_data(file, classes=NAMES, **settings):
    folder = str(file.parent) + '/'
    config = dict(type='CocoDataset', ann_file=str(file), data_prefix=dict(img=folder), metainfo=dict(classes=classes))
    return build('mmdet', dict(config, **settings))


def segmentation(root, *pictures, names=('sky', 'bird'), dtype=np.uint8, loading=None, **settings):
    """Write 8 x 8 images with segmentation masks below ``root``, and return MMSegmentation's data set of them.

    Each of ``pictures`` is the list of values that its mask repeats row by row, in ``dtype``. ``names`` are the
    classes, ``loading`` the arguments of ``LoadAnnotations``, and ``settings`` others of ``BaseSegDataset``.
    """
    for i, values in enumerate(pictures):
        for kind in ('img', 'ann'):
            (root / kind).mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (8, 8)).save(root / 'img' / f'{i}.jpg')
        labels = np.resize(np.array(values, dtype), (8, 8) + np.shape(values)[1:])
        Image.fromarray(labels).save(root / 'ann' / f'{i}.png')
    prefix = dict(img_path=str(root / 'img'), seg_map_path=str(root / 'ann'))
    load = dict(type='LoadAnnotations', **(loading or {}))
    pipeline = [dict(type='LoadImageFromFile'), load, dict(type='PackSegInputs')]
    config = dict(type='BaseSegDataset', data_prefix=prefix, metainfo=dict(classes=names), pipeline=pipeline)
    return build('mmseg', dict(config, **settings))
