# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Backbones by their names, and their recipes."""

import pytest
import torch

from mmlinattn.tooling.swapping import zoo
from mmlinattn.tooling.swapping.zoo import FeatureMap
from mmlinattn.utils.errors import RunError

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)


def test_a_backbone_is_that_of_the_tasks_config():
    numbers = torch.get_rng_state()
    detector, classifier = (zoo.find_backbone('ravlt_t', task) for task in ('mmdet', 'mmpretrain'))
    assert detector.cfg == dict(type='RAVLT', arch='tiny', norm_cfg=dict(type='SyncBN'))
    assert 'norm_cfg' not in classifier.cfg and not classifier.plain
    assert [out.channels for out in classifier.stages] == [64, 128, 256, 512]
    assert classifier.checkpoint == 'mmlinattn://ravlt_t'
    larger = zoo.find_backbone('inline_swin_b_384', 'mmdet')  # only classifiers have this size
    assert larger.checkpoint == 'mmlinattn://inline_swin_b' and larger.cfg['arch'] == 'inline-base-384'
    deit = zoo.find_backbone('hydra_deit_t', 'mmpretrain')
    assert torch.equal(torch.get_rng_state(), numbers)  # nothing was initialised
    assert deit.plain and deit.stages == (FeatureMap(192, 16),) and deit.checkpoint is None


def test_unknown_backbones():
    with pytest.raises(RunError) as error:
        zoo.find_backbone('ravlt_z', 'mmdet')
    names = zoo.backbone_names()
    assert str(error.value) == f"BACKBONE='ravlt_z': expected one of ({', '.join(names)})" and names == sorted(
        set(names)
    )


def test_recipes_without_a_row_of_their_own():
    several = zoo.recipe('ravlt_b', 'mmdet')  # the schedule of 12 epochs comes first
    assert (several.model.type, several.train_cfg.max_epochs) == ('MaskRCNN', 12)
    assert zoo.recipe('inline_swin_b', 'mmpretrain').model.backbone.arch == 'inline-base'  # not that of 384 pixels
    assert zoo.recipe('inline_swin_x', 'mmseg').model.backbone.type == 'LinearSwin'
    assert zoo.recipe('hydra_deit_t', 'mmseg').model.backbone.type == 'RAVLT'
