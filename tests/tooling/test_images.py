# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Channels, sizes and pixels of the images of a config, for all tools that feed a model."""

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

import mmlinattn  # noqa: F401
from mmlinattn.tooling import images
from mmlinattn.tooling.analysis.flops import count_model
from mmlinattn.tooling.analysis.loading import prepare
from mmlinattn.tooling.export.models import Sizes, export_model
from mmlinattn.utils.errors import RunError


def config(scope='mmpretrain', *steps, **settings):
    return Config(dict(default_scope=scope, test_dataloader=dict(dataset=dict(pipeline=list(steps))), **settings))


CROP = dict(type='CenterCrop', crop_size=384)
EDGE = dict(scale=256, edge='short')
RESIZE = dict(type='Resize', scale=(640, 480))
KEEP = dict(type='Resize', scale=(1333, 800), keep_ratio=True)


@pytest.mark.parametrize(
    ('scope', 'steps', 'settings', 'size'),
    [
        ('mmpretrain', [CROP, dict(type='P')], {}, (384, 384)),
        ('mmpretrain', [dict(type='mmpretrain.CenterCrop', crop_size=(96, 128))], {}, (128, 96)),
        ('mmpretrain', [dict(type='ResizeEdge', scale=256), CROP, RESIZE], {}, (480, 640)),
        ('mmpretrain', [dict(type='ResizeEdge', scale=256)], {}, (224, 224)),
        ('mmseg', [KEEP], dict(crop_size=(512, 1024)), (512, 1024)),
        ('mmseg', [dict(RESIZE, scale=(480, 320))], dict(crop_size=(512, 1024)), (320, 480)),
        ('mmseg', [], {}, (512, 512)),
        ('mmdet', [KEEP], dict(crop_size=(512, 1024)), (800, 1216)),
        ('mmdet', [dict(KEEP, scale=(256, 192))], {}, (192, 256)),
        ('mmdet', [dict(RESIZE, keep_ratio=False)], dict(data_preprocessor=dict(pad_size_divisor=64)), (512, 640)),
        ('mmseg', [RESIZE], dict(data_preprocessor=dict(test_cfg=dict(size_divisor=64))), (512, 640)),
        ('mmdet', [KEEP, dict(type='Pad', size=(640, 608))], {}, (608, 640)),
        ('mmdet', [KEEP, dict(type='Pad', size_divisor=32)], {}, (800, 1216)),
        ('mmdet', [], {}, (800, 1216)),
    ],
)
def test_the_size_that_a_config_tests_at(scope, steps, settings, size):
    assert images.usual_size(config(scope, *steps, **settings)) == size


@pytest.mark.parametrize(
    ('steps', 'resize', 'crop'),
    [
        ([KEEP], dict(scale=[1333, 800], keep_ratio=True), None),
        ([dict(EDGE, type='mmpretrain.ResizeEdge'), CROP], EDGE, [384, 384]),
        ([RESIZE, dict(CROP, crop_size=(96, 128))], dict(scale=[640, 480]), [128, 96]),
        ([dict(type='Pad', size=(640, 608))], None, None),
    ],
)
def test_resizing_for_the_metadata_of_a_graph(steps, resize, crop):
    assert images.resizing(config('mmpretrain', *steps)) == dict(resize=resize, crop=crop)


@pytest.mark.parametrize(
    ('backbone', 'mean', 'channels'),
    [
        (dict(type='RAVLT'), [1.0], 3),
        (dict(type='RAVLT', in_channels=5), [1.0] * 3, 5),
        (dict(type='LoRAModel', module=dict(type='RAVLT', in_channels=4)), None, 4),
        (dict(type='mmpretrain.LeNet5'), [1.0], 1),
        (dict(type='ResNet', depth=18), [1.0], 3),  # of the scope of the config
        (dict(type=torch.nn.Identity), None, 3),
    ],
)
def test_channels_follow_from_the_model(backbone, mean, channels):
    pytest.importorskip('mmpretrain')
    init_default_scope('mmengine')
    assert images.image_channels(config(model=dict(backbone=backbone, data_preprocessor=dict(mean=mean)))) == channels


ARCH = dict(embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))


@pytest.mark.parametrize(('channels', 'dtype'), [(1, np.uint8), (1, np.uint16), (4, np.uint16)])
def test_images_of_other_channels_reach_the_model_as_they_are(channels, dtype, tmp_path):
    pytest.importorskip('mmpretrain')
    init_default_scope('mmpretrain')
    most = np.iinfo(dtype).max
    pixels = np.random.default_rng(0).integers(0, most, (48, 80, channels), endpoint=True).astype(dtype)
    cv2.imwrite(str(tmp_path / 'image.png'), pixels)
    color = 'grayscale' if channels == 1 and dtype is np.uint8 else 'unchanged'
    cfg = config(
        'mmpretrain',
        dict(type='LoadImageFromFile', color_type=color),
        dict(type='CenterCrop', crop_size=(64, 48)),
        dict(type='PackInputs'),
        model=dict(
            type='ImageClassifier',
            data_preprocessor=dict(mean=[most / 2] * channels, std=[most / 4] * channels, num_classes=3),
            backbone=dict(type='RAVLT', arch=ARCH, in_channels=channels, out_indices=(3,)),
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=3, in_channels=16),
        ),
    )
    model = MODELS.build(cfg.model)
    picture = prepare(cfg, model, images.read_picture(tmp_path / 'image.png', cfg), 'image')
    expected = torch.from_numpy(pixels[:, 8:72].astype(np.float32)).permute(2, 0, 1)
    torch.testing.assert_close(picture.inputs[0], (expected - most / 2) / (most / 4))
    assert picture.shown.shape == (48, 64, 3) and picture.shown.dtype == np.uint8 and picture.shown.std() > 30
    assert picture.to_shown(8, 0) == (0, 0) and picture.to_shown(40, 20) == (32, 20)
    with pytest.raises(RunError, match=f'image has 3 channels after the test pipeline, the model takes {channels}'):
        prepare(cfg, model, np.zeros((48, 80, 3), np.uint8), 'image')
    assert count_model(cfg).total_params == sum(parameter.numel() for parameter in model.parameters())
    sizes = Sizes(1, *images.usual_size(cfg), channels=images.image_channels(cfg))
    meta = export_model(model, cfg, tmp_path / 'graph.pt', 'torchscript', sizes).metadata
    assert meta['serves'] == f'image (1, {channels}, 48, 64), no other size' and meta['channel_order'] is None
    assert meta['input_range'] == (None if color == 'unchanged' else [0, 255]) and len(meta['mean']) == channels


def test_a_file_that_the_pipeline_does_not_read_is_named(tmp_path):
    (tmp_path / 'image.png').write_text('no image')
    for cfg in (None, config('mmpretrain', dict(type='LoadImageFromFile'))):
        with pytest.raises(RunError, match=r"image '.*image.png' cannot be read as an image"):
            images.read_picture(tmp_path / 'image.png', cfg)
