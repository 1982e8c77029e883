# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import json

import mmcv
import numpy as np
import pytest
from helpers.own_files import text, voc
from mmengine.registry import MODELS, init_default_scope

from projects.bccd.__main__ import BACKBONES, convert, make_config
from projects.bccd.page import page_of


def test_annotations_are_converted(tmp_path):
    for split, name in dict(trainval='a', test='b').items():
        text(tmp_path / f'ImageSets/Main/{split}.txt', f'{name}\n')
        content = voc(('RBC', [1, 2, 11, 12]), ('WBC', [5, 5, 5, 9]), size=(40, 30))
        text(tmp_path / f'Annotations/{name}.xml', content)
        mmcv.imwrite(np.zeros((30, 40, 3), np.uint8), str(tmp_path / f'JPEGImages/{name}.jpg'))
    convert(tmp_path, tmp_path / 'out')
    for split, name in dict(train='a', test='b').items():
        coco = json.loads((tmp_path / f'out/{split}.json').read_text())
        assert [image['file_name'] for image in coco['images']] == [f'{name}.jpg']
        (box,) = coco['annotations']  # the other has no area
        assert box['bbox'][2:] == [10, 10] and coco['categories'][box['category_id'] - 1]['name'] == 'RBC'


@pytest.mark.parametrize('backbone', BACKBONES)
def test_every_backbone_fits_the_recipe(tmp_path, backbone):
    cfg = make_config(tmp_path / 'data', tmp_path, backbone, (512, 384), 1)
    init_default_scope('mmdet')
    model = MODELS.build(cfg.model)
    assert model.bbox_head.num_classes == 3 and len(model.neck.in_channels) == 3
    assert cfg.train_pipeline[2].scale == cfg.test_pipeline[1].scale == (512, 384)
    assert cfg.randomness.seed == 1 and cfg.test_dataloader.dataset.ann_file == str(tmp_path / 'test.json')


def test_page_says_what_was_not_run():
    scores = dict(AP=0.4, AP50=0.6, AP75=0.5, by_class=dict(RBC=0.7, WBC=0.9, Platelets=0.2), train_MiB=2048)
    page = page_of([dict(scores, backbone='swin_t', size='256x192', seed=0)])
    assert '| 256x192 | Swin-T, MMDetection | 27.5 | 40.0 | 60.0 | 70.0 | 90.0 | 20.0 | 2.0 |' in page
    assert 'Not run yet, seed 1 at 256x192: Swin-T, MMDetection.' in page
    assert 'Not run yet, seed 0 and 1 at 512x384: RAVLT-T, InLine-Swin-T,' in page
