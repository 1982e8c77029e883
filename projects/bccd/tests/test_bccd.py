# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
from mmengine.registry import MODELS, init_default_scope

from projects.bccd.__main__ import BACKBONES, make_config
from projects.bccd.page import page_of


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
