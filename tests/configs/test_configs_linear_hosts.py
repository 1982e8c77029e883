# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Recipes of InLine and FLatten on PVT, PVTv2, Swin, CSWin and DeiT: those of the hosts."""

import re

import cv2
import numpy as np
import pytest
import torch
from config_helpers import CASCADE, configs_of, decayed, load, norms_of, run_pipeline
from mmengine.registry import MODELS

import mmlinattn  # noqa: F401

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)

DETECTORS = configs_of('mmdet/inline') + configs_of('mmdet/flatten')
SEGMENTORS = configs_of('mmseg/inline') + configs_of('mmseg/flatten')
CLASSIFIERS = configs_of('mmpretrain/inline') + configs_of('mmpretrain/flatten')
FINE_TUNED = [name for name in CLASSIFIERS if '_384_' in name]


@pytest.mark.parametrize('name', FINE_TUNED)
def test_fine_tuning_begins_with_the_head_of_the_smaller_size(name):
    """Of the same file as the backbone, of which MMEngine's own loading takes the part that is named."""
    model = load(name).model
    backbone, head = model.backbone.init_cfg.checkpoint, model.head.init_cfg
    assert (head.type, head.prefix) == ('Pretrained', 'head.')
    assert head.checkpoint == (f'{backbone}_in1k' if backbone.startswith('mmlinattn://') else backbone)
    assert name.split('/')[1].replace('_384_in1k', '') in backbone


@pytest.mark.parametrize('name', DETECTORS)
def test_detection_recipe(name):
    cfg, like = load(name), load('mmdet/ravlt_b_maskrcnn_3x' if name.endswith('3x') else 'mmdet/ravlt_b_maskrcnn_1x')
    lr, decay = (2e-4, 1e-4) if '_pvt_' in name else (1e-4, 0.05)
    if 'retinanet' in name:
        lr, decay = 1e-4, 1e-4
    assert cfg.optim_wrapper.type == 'OptimWrapper'
    assert cfg.optim_wrapper.optimizer == dict(type='AdamW', lr=lr, betas=(0.9, 0.999), weight_decay=decay)
    # what RAVLT's tests pin: 12 or 36 epochs, steps, warm-up, images a step, scales
    for part in ('train_cfg', 'param_scheduler', 'auto_scale_lr', 'train_dataloader', 'test_dataloader'):
        if part.endswith('loader') and 'retinanet' in name:
            continue
        assert cfg[part] == like[part], part
    if 'cascade' in name:
        assert cfg.model.roi_head == load(CASCADE).model.roi_head
    if 'retinanet' in name:
        assert cfg.train_dataloader.batch_size == 2
        assert cfg.model.neck == load('mmdet/ravlt_b_retinanet_1x').model.neck | dict(in_channels=[128, 320, 512])


@pytest.mark.parametrize('name', SEGMENTORS)
def test_segmentation_recipe(name):
    cfg = load(name)
    method = 'upernet_160k' if 'upernet' in name else 'fpn_80k'
    assert ('swin' in name) is (method == 'upernet_160k')
    like = load(f'mmseg/ravlt_b_{method}')
    for part in ('train_cfg', 'param_scheduler', 'auto_scale_lr', 'train_dataloader', 'test_dataloader'):
        assert cfg[part] == like[part], part
    assert cfg.optim_wrapper.optimizer == like.optim_wrapper.optimizer
    assert cfg.optim_wrapper.type == 'OptimWrapper'


@pytest.mark.parametrize('name', CLASSIFIERS)
def test_classification_recipe(name):
    cfg = load(name)
    is_384 = name in FINE_TUNED
    epochs, warm_up_epochs, images = (30, 5, 512) if is_384 else (300, 20, 1024)
    optimizer = cfg.optim_wrapper.optimizer
    assert optimizer.type == 'AdamW' and cfg.optim_wrapper.clip_grad.max_norm == 5
    assert (optimizer.lr, optimizer.weight_decay) == ((2e-5, 1e-8) if is_384 else (1e-3, 0.05))
    assert cfg.train_dataloader.batch_size * 8 == cfg.auto_scale_lr.base_batch_size == images
    assert cfg.train_cfg.max_epochs == epochs
    warm_up, cosine = cfg.param_scheduler
    assert (warm_up.type, warm_up.end, warm_up.by_epoch) == ('LinearLR', warm_up_epochs, True)
    assert (cosine.type, cosine.begin, cosine.get('end', epochs)) == ('CosineAnnealingLR', warm_up_epochs, epochs)
    assert cosine.get('T_max', epochs - warm_up_epochs) == epochs - warm_up_epochs
    like = load('mmpretrain/ravlt_t_in1k')
    assert cfg.model.train_cfg == like.model.train_cfg and cfg.model.head.loss == like.model.head.loss
    kinds = [t.type for t in like.train_dataloader.dataset.pipeline]
    assert [t.type for t in cfg.train_dataloader.dataset.pipeline] == kinds


@pytest.mark.parametrize(
    ('name', 'size', 'edge'),
    [
        ('mmpretrain/inline_swin_s_in1k', 224, 256),
        ('mmpretrain/inline_deit_t_in1k', 224, 256),
        ('mmpretrain/inline_deit_s_in1k', 288, 329),
        ('mmpretrain/inline_deit_b_in1k', 448, 512),
        *((name, 384, None) for name in FINE_TUNED),
    ],
)
def test_size_of_the_pictures(name, size, edge, tmp_path):
    path = str(tmp_path / 'picture.png')
    cv2.imwrite(path, np.random.RandomState(0).randint(0, 255, (427, 640, 3), np.uint8))
    sample = dict(img_path=path, gt_label=3)
    for result in run_pipeline(name, sample, 2):
        assert result['inputs'].shape == (3, size, size)
    [tested] = run_pipeline(name, sample, 1, 'test_dataloader')
    assert tested['inputs'].shape == (3, size, size)
    # at 384 the whole image, else the middle of one resized
    resized = [t.scale for t in load(name).test_dataloader.dataset.pipeline if t.type == 'ResizeEdge']
    assert resized == ([] if edge is None else [edge])


@pytest.mark.parametrize(
    ('name', 'rate'),
    [
        *((f'mmpretrain/inline_pvt_{s}_in1k', r) for s, r in zip('tsml', (0.1, 0.1, 0.3, 0.3))),
        *((f'mmpretrain/flatten_pvt_v2_b{i}_in1k', r) for i, r in enumerate((0.1, 0.1, 0.1, 0.3, 0.3))),
        *((f'mmdet/inline_swin_{s}_cascade_3x', r) for s, r in zip('tsb', (0.2, 0.3, 0.5))),
        *((f'mmpretrain/flatten_swin_{s}_in1k', r) for s, r in zip(('t', 's', 'b', 'b_384'), (0.2, 0.3, 0.5, 0.5))),
        *((f'mmpretrain/inline_cswin_{s}_in1k', r) for s, r in zip('tsb', (0.2, 0.4, 0.5))),
        *((f'mmpretrain/flatten_cswin_{s}_in1k', r) for s, r in zip('tsb', (0.2, 0.4, 0.5))),
        *((f'mmseg/{name}_fpn_80k', 0.1) for name in ('inline_pvt_t', 'flatten_pvt_t', 'flatten_pvt_v2_b1')),
    ],
)
def test_stochastic_depth(name, rate):
    backbone = load(name).model.backbone
    with torch.device('meta'):
        model = MODELS.build(dict(backbone, init_cfg=None))
    assert model.drop_paths[-1][-1] == pytest.approx(rate)


TABLES = r'(relative_bias\.table|position_tables?\.(\d\.)?weight|cls_token|mixer\.position\.weight|mixer\.scale)$'


@pytest.mark.parametrize(
    'name',
    [
        'mmdet/flatten_swin_t_maskrcnn_1x',
        'mmdet/inline_swin_t_cascade_3x',
        'mmdet/flatten_cswin_t_maskrcnn_1x',
        'mmdet/inline_deit_t_maskrcnn_1x',
        'mmseg/flatten_swin_t_upernet_160k',
        'mmseg/flatten_cswin_t_upernet_160k',
        'mmpretrain/flatten_swin_b_384_in1k',
        'mmpretrain/flatten_swin_t_in1k',
        'mmpretrain/flatten_cswin_t_in1k',
        'mmpretrain/inline_pvt_t_in1k',
        'mmpretrain/flatten_pvt_v2_b0_in1k',
        'mmpretrain/inline_deit_t_in1k',
    ],
)
def test_norms_and_tables_do_not_decay(name):
    decay, model = decayed(name)
    expected = norms_of(model) | {key for key in decay if re.search(TABLES, key)}
    assert expected - norms_of(model), 'there are tables'
    if name.startswith('mmdet'):  # upstream goes by the name, which the norms of the box heads do not have
        expected -= {key for key in expected if '.shared_convs.' in key}
    if name.startswith('mmpretrain'):
        expected |= {key for key in decay if key.endswith('.bias')}
    assert {key for key, value in decay.items() if value == 0} == expected


def test_tables_alone_do_not_decay_in_semantic_fpn_on_swin():
    """The recipe is RAVLT's, whose norms decay, without decay of position tables."""
    decay, _ = decayed('mmseg/rala_swin_t_fpn_80k')
    tables = {key for key in decay if re.search(TABLES, key)}
    assert tables and {key for key, value in decay.items() if value == 0} == tables


@pytest.mark.parametrize(
    'name', [name for name in configs_of('mmdet') + configs_of('mmseg') if re.search('_(swin|cswin|deit)_', name)]
)
def test_no_dense_recipe_of_swin_and_its_successors_lets_tables_decay(name):
    keys = load(name).optim_wrapper.paramwise_cfg.custom_keys
    tables = 'relative_bias.table', 'position_table', 'cls_token', 'mixer.position', 'mixer.scale'
    assert all(keys[table].decay_mult == 0 for table in tables)


@pytest.mark.parametrize(
    'name', ['mmdet/flatten_pvt_t_maskrcnn_1x', 'mmdet/flatten_pvt_v2_b1_retinanet_1x', 'mmseg/inline_pvt_t_fpn_80k']
)
def test_everything_decays_in_the_recipes_of_pvt(name):
    assert set(decayed(name)[0].values()) == {1e-4}
