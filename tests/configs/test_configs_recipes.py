# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Recipes, against the released ones: optimisers, schedules, augmentation."""

import cv2
import numpy as np
import pytest
from config_helpers import CASCADE, configs_of, decayed, load, norms_of, run_pipeline
from mmengine.config import Config

import mmlinattn  # noqa: F401

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)


def milestones(cfg: Config) -> list:
    return [scheduler.get('milestones') for scheduler in cfg.param_scheduler]


@pytest.mark.parametrize('name', configs_of('mmdet/ravlt'))
def test_detection_recipe_of_ravlt(name):
    cfg = load(name)
    is_long = name.endswith('3x')
    assert cfg.optim_wrapper.type == 'OptimWrapper'  # mixed precision is --amp's business
    assert cfg.optim_wrapper.optimizer == dict(
        type='AdamW',
        lr=1e-4,
        betas=(0.9, 0.999),
        weight_decay=1e-4 if 'retinanet' in name else 0.05,
    )
    assert cfg.train_dataloader.batch_size == 2
    assert cfg.auto_scale_lr == dict(enable=False, base_batch_size=16)
    assert cfg.train_cfg.max_epochs == (36 if is_long else 12)
    assert milestones(cfg) == [None, [27, 33] if is_long else [8, 11]]
    warm_up, steps = cfg.param_scheduler
    assert (warm_up.type, warm_up.start_factor, warm_up.end) == ('LinearLR', 0.001, 500)
    assert warm_up.by_epoch is False and steps.by_epoch is True and steps.gamma == 0.1
    assert steps.end == cfg.train_cfg.max_epochs
    resize = [t for t in cfg.test_dataloader.dataset.pipeline if t.type == 'Resize']
    assert [t.scale for t in resize] == [(1333, 800)]
    if not is_long:
        resize = [t for t in cfg.train_dataloader.dataset.pipeline if t.type == 'Resize']
        assert [t.scale for t in resize] == [(1333, 800)]


def test_cascade_heads():
    for head in load(CASCADE).model.roi_head.bbox_head:
        assert (head.type, head.num_shared_convs, head.num_shared_fcs) == ('ConvFCBBoxHead', 4, 1)
        assert head.norm_cfg.type == 'SyncBN'
        assert head.reg_decoded_bbox is True and head.reg_class_agnostic is False
        assert (head.loss_bbox.type, head.loss_bbox.loss_weight) == ('GIoULoss', 10.0)
    stds = [head.bbox_coder.target_stds[0] for head in load(CASCADE).model.roi_head.bbox_head]
    assert stds == [0.1, 0.05, 0.033]


@pytest.mark.parametrize('name', ['mmdet/ravlt_t_maskrcnn_1x', 'mmdet/ravlt_s_cascade_3x'])
def test_keys_with_norm_do_not_decay_in_detection(name):
    decay, model = decayed(name)
    # norms without 'norm' in the release's names: those of the stem and of the box heads
    named_otherwise = {key for key in norms_of(model) if 'patch_embeds.0' in key or '.shared_convs.' in key}
    assert {k for k, value in decay.items() if value == 0} == norms_of(model) - named_otherwise
    assert set(decay.values()) == {0, 0.05}


@pytest.mark.parametrize(
    ('name', 'undecayed'),
    [
        ('mmseg/ravlt_t_fpn_80k', 'none'),
        ('mmseg/ravlt_t_upernet_160k', 'norms'),
        ('mmpretrain/ravlt_t_in1k', 'norms and biases'),
    ],
)
def test_weight_decay_elsewhere(name, undecayed):
    decay, model = decayed(name)
    expected = norms_of(model) if 'norms' in undecayed else set()
    if 'biases' in undecayed:
        expected |= {key for key in decay if key.endswith('.bias')}
    assert {key for key, value in decay.items() if value == 0} == expected


@pytest.mark.parametrize('name', configs_of('mmseg/ravlt'))
def test_segmentation_recipe_of_ravlt(name):
    cfg = load(name)
    is_fpn = 'fpn_80k' in name
    iterations = 80000 if is_fpn else 160000
    optimizer = cfg.optim_wrapper.optimizer
    assert cfg.optim_wrapper.type == 'OptimWrapper' and optimizer.type == 'AdamW'
    assert (optimizer.lr, optimizer.weight_decay) == ((1e-4, 1e-4) if is_fpn else (6e-5, 0.01))
    assert optimizer.betas == (0.9, 0.999) and 'momentum' not in optimizer
    assert cfg.train_dataloader.batch_size == 2 and cfg.auto_scale_lr.base_batch_size == 16
    assert cfg.train_cfg.max_iters == iterations
    assert cfg.train_dataloader.dataset.type == 'ADE20KDataset'
    *warm_up, poly = cfg.param_scheduler
    assert (poly.type, poly.power, poly.eta_min) == ('PolyLR', 0.9 if is_fpn else 1.0, 0.0)
    assert (poly.begin, poly.end) == (0 if is_fpn else 1500, iterations)
    assert [(s.type, s.start_factor, s.end) for s in warm_up] == ([] if is_fpn else [('LinearLR', 1e-6, 1500)])
    assert not any(scheduler.by_epoch for scheduler in cfg.param_scheduler)
    resize = [t for t in cfg.test_dataloader.dataset.pipeline if t.type == 'Resize']
    assert [(t.scale, t.keep_ratio) for t in resize] == [((2048, 512), True)]
    assert cfg.model.decode_head.num_classes == 150
    assert cfg.model.decode_head.norm_cfg.type == 'SyncBN'
    if not is_fpn:
        head = cfg.model.auxiliary_head
        assert (head.type, head.in_index, head.loss_decode.loss_weight) == ('FCNHead', 2, 0.4)
        assert head.num_classes == 150


@pytest.mark.parametrize('name', configs_of('mmpretrain/ravlt'))
def test_classification_recipe_of_ravlt(name):
    cfg = load(name)
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 1e-3, 0.05)
    assert cfg.train_dataloader.batch_size * 8 == cfg.auto_scale_lr.base_batch_size == 1024
    assert cfg.train_cfg.max_epochs == 300
    warm_up, cosine = cfg.param_scheduler
    assert (warm_up.type, warm_up.end, warm_up.by_epoch) == ('LinearLR', 5, True)
    assert (cosine.type, cosine.begin, cosine.end) == ('CosineAnnealingLR', 5, 300)
    augments = {augment.type: augment.alpha for augment in cfg.model.train_cfg.augments}
    assert augments == dict(Mixup=0.8, CutMix=1.0)
    assert cfg.model.head.loss.label_smooth_val == 0.1
    transforms = {t.type: t for t in cfg.train_dataloader.dataset.pipeline}
    randaug = transforms['RandAugment']
    assert randaug.policies == 'timm_increasing'
    assert (randaug.magnitude_level, randaug.magnitude_std, randaug.num_policies) == (9, 0.5, 2)
    assert transforms['RandomErasing'].erase_prob == 0.25


# ---- data: the training pipelines, run on an image


@pytest.fixture
def picture(tmp_path):
    path = str(tmp_path / 'picture.png')
    cv2.imwrite(path, np.random.RandomState(0).randint(0, 255, (427, 640, 3), np.uint8))
    return path


def test_multi_scale_crop(picture):
    np.random.seed(0)
    box = [100, 100, 500, 400]
    polygon = [100.0, 100, 500, 100, 500, 400, 100, 400]
    instance = dict(bbox=box, bbox_label=0, mask=[polygon], ignore_flag=0)
    sample = dict(img_path=picture, img_id=1, height=427, width=640, instances=[instance])
    sizes = [tuple(r['inputs'].shape[1:]) for r in run_pipeline(CASCADE, sample, 30)]
    full = {size for size in sizes if abs(size[1] / size[0] - 640 / 427) < 0.01}
    cropped = set(sizes) - full
    assert len(full) > 5 and len(cropped) > 5, 'both branches, several scales'
    scales = set(range(480, 801, 32))
    assert all(min(size) in scales or max(size) == 1333 for size in sizes)


def test_crops_of_segmentation(picture, tmp_path):
    labels = str(tmp_path / 'labels.png')
    cv2.imwrite(labels, np.random.RandomState(1).randint(0, 151, (427, 640), np.uint8))
    sample = dict(img_path=picture, seg_map_path=labels, seg_fields=[], label_map=None, reduce_zero_label=True)
    for result in run_pipeline('mmseg/ravlt_t_upernet_160k', sample, 3):
        # smaller where the image is; the preprocessor fills up to 512x512
        assert max(result['inputs'].shape[1:]) <= 512
        truth = result['data_samples'].gt_sem_seg.data
        assert truth[truth != 255].max() == 149  # 150 classes, and 255 for what is none
    assert load('mmseg/ravlt_t_upernet_160k').model.data_preprocessor.size == (512, 512)


def test_pictures_of_classification(picture):
    sample = dict(img_path=picture, gt_label=3)
    for result in run_pipeline('mmpretrain/ravlt_t_in1k', sample, 3):
        assert result['inputs'].shape == (3, 224, 224)
