# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Weights of models and pixels of images under analysis, and unsupported inputs."""

import copy
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from mmcv.transforms import CenterCrop, LoadImageFromFile, Resize
from mmengine.config import Config
from mmengine.model import ImgDataPreprocessor
from mmengine.registry import MODELS
from torch import nn

from mmlinattn.tooling.analysis import loading
from mmlinattn.utils.errors import RunError

# --- images ---------------------------------------------------------------------------------------------------------


class Pack:
    """Stand-in for upstream's packing transform."""

    def __init__(self, times=None):
        self.times = times

    def __call__(self, results):
        inputs = torch.from_numpy(np.ascontiguousarray(results['img'].transpose(2, 0, 1)))
        return dict(inputs=[inputs] * self.times if self.times else inputs, data_samples=SimpleNamespace(**results))


class LoadAnnotations:
    """Stand-in for a transform that fails without annotations."""


def config(*steps, **pack):
    steps = [dict(type=LoadImageFromFile), *steps, dict(type=LoadAnnotations), dict(type=Pack, **pack)]
    dataset = dict(type='Wrapper', dataset=dict(datasets=[dict(pipeline=steps)]))  # inside two wrappers
    return Config(dict(test_dataloader=dict(dataset=dataset)))


def model(**options):
    options = {**dict(mean=[10, 20, 30], std=[2, 4, 8], bgr_to_rgb=True, pad_size_divisor=32), **options}
    preprocess = ImgDataPreprocessor(**options)

    def data_preprocessor(data, training):
        assert training is False  # no batch augmentation
        return preprocess(data, training)

    return SimpleNamespace(data_preprocessor=data_preprocessor)


def photo(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_picture_as_the_pipeline_makes_it():
    """Resize by half, then crop the middle to 40 of 60 rows and 64 of 100 columns."""
    image = photo(120, 200)
    cfg = config(dict(type=Resize, scale_factor=0.5), dict(type=CenterCrop, crop_size=(64, 40)))
    picture = loading.prepare(cfg, model(), image, 'photo')
    half = cv2.resize(image, (100, 60), interpolation=cv2.INTER_LINEAR)[10:50, 18:82, ::-1]
    assert np.array_equal(picture.shown, half) and picture.name == 'photo' and picture.size == (200, 120)
    mean, std = torch.tensor([10.0, 20, 30])[:, None, None], torch.tensor([2.0, 4, 8])[:, None, None]
    expected = (torch.from_numpy(half.copy()).permute(2, 0, 1) - mean) / std
    assert picture.inputs.shape == (1, 3, 64, 64) and not picture.inputs[0, :, 40:].any()  # padding
    torch.testing.assert_close(picture.inputs[0, :, :40], expected)
    assert (picture.sample.img_path, picture.sample.ori_shape) == ('photo', (120, 200))
    for query, at in (((36, 20), (0, 0)), ((100, 60), (32, 20)), ((163, 99), (63, 39))):
        assert max(abs(a - b) for a, b in zip(picture.to_shown(*query), at)) <= 1
    for x, y in ((30, 60), (170, 60), (100, 14), (100, 106)):
        with pytest.raises(RunError, match=f'query {x} {y} of photo is cropped away by the test pipeline'):
            picture.to_shown(x, y)
    for x, y in ((-0.5, 30), (200, 30), (30, -1), (30, 120)):
        with pytest.raises(RunError, match=rf'query {x:g} {y:g} is outside of photo \(200 x 120 pixels\)'):
            picture.to_shown(x, y)


@pytest.mark.parametrize(('dtype', 'white'), [('uint8', 255), ('uint16', 65535), ('float32', 255)])
def test_pixels_of_every_type_are_located(dtype, white):
    """Pass levels through the pipeline in the type of the image, and find its pixels."""
    cfg = config(dict(type=Resize, scale_factor=0.5))
    picture = loading.prepare(cfg, model(), photo(120, 200).astype(dtype), 'photo')
    assert (picture.pipeline(np.ones((120, 200))) == white).all()
    column, row = picture.to_shown(120, 40)
    assert abs(column - 60) <= 1 and abs(row - 20) <= 1


KEEP_RATIO = dict(type=Resize, scale=(160, 160), keep_ratio=True)
NO_PIPELINE = 'has no test_dataloader.dataset.pipeline; give --shape H W'


@pytest.mark.parametrize(
    ('cfg', 'image', 'message'),
    [
        (config(KEEP_RATIO), (2, 1024), 'cannot resize photo, 1024 x 2 pixels'),
        (config(), (64, 31), 'photo is 31 x 64 pixels for the network; 32 are the least'),
        (config(times=2), (64, 64), 'makes several images of one; give --shape H W'),
        (Config(), (64, 64), NO_PIPELINE),
        (Config(dict(test_dataloader=None)), (64, 64), NO_PIPELINE),
        (Config(dict(test_dataloader=dict(dataset=dict(datasets=[])))), (64, 64), NO_PIPELINE),
    ],
)
def test_pictures_and_pipelines_that_cannot_be_used(cfg, image, message):
    with pytest.raises(RunError, match=message):
        loading.prepare(cfg, model(pad_size_divisor=1), photo(*image), 'photo')


@pytest.mark.parametrize('scope', ['mmdet', 'mmseg', 'mmpretrain'])
def test_a_shape_replaces_the_pipeline(scope):
    pytest.importorskip(f'{scope}.datasets')
    cfg = Config(dict(default_scope=scope, test_dataloader=dict(dataset=dict(pipeline=[dict(type='Unknown')]))))
    picture = loading.prepare(cfg, model(), photo(40, 50), 'photo', (75, 101))
    assert picture.shown.shape == (75, 101, 3) and picture.inputs.shape == (1, 3, 96, 128)
    assert type(picture.sample).__module__.startswith(scope)


# --- models -----------------------------------------------------------------------------------------------------------

SMALL = dict(embed_dims=(8, 8, 8, 8), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))


class SmallModel(nn.Module):
    def __init__(self, backbone, data_preprocessor=None, head=None):
        super().__init__()
        self.backbone = MODELS.build(backbone)
        self.head, self.norm = nn.Linear(4, 3), nn.SyncBatchNorm(4)
        self.backbone_scale = nn.Linear(1, 1)  # a name with the same beginning is another module

    def init_weights(self):
        self.backbone.init_weights()
        nn.init.constant_(self.head.weight, 7)


@pytest.fixture
def cfg(monkeypatch):
    monkeypatch.setitem(MODELS._module_dict, 'SmallModel', SmallModel)
    pretrained = dict(type='Pretrained', checkpoint='gone.pth')
    backbone = dict(type='RAVLT', arch=SMALL, init_cfg=pretrained)
    model = dict(type='SmallModel', backbone=backbone, head=dict(num_classes=3))
    return Config(dict(model=model, test_dataloader=dict(dataset=dict(metainfo=dict(classes=('x', 'y', 'z'))))))


def test_a_model_without_a_checkpoint_fetches_nothing(cfg):
    before = copy.deepcopy(cfg.model.to_dict())
    for nothing in ('none', 'None'):
        model = loading.load_model(cfg, nothing)
        assert not model.training and not isinstance(model.norm, nn.SyncBatchNorm)
        assert (model.head.weight == 7).all()  # of init_weights
    assert model.dataset_meta == dict(classes=['x', 'y', 'z']) and cfg.model.to_dict() == before
    assert loading.load_model(cfg, 'none', 'meta').head.weight.is_meta


def test_loaded_parts_of_a_checkpoint(cfg, tmp_path):
    own = loading.load_model(cfg, 'none')
    for parameter in own.parameters():
        nn.init.normal_(parameter)

    def saved(**changed):
        path = str(tmp_path / 'model.pth')
        state = {**own.state_dict(), **{key.replace('__', '.'): value for key, value in changed.items()}}
        torch.save(dict(state_dict=state, meta=dict(dataset_meta=dict(classes=('a', 'b', 'c')))), path)
        return path

    model = loading.load_model(cfg, saved())
    assert all(torch.equal(value, own.state_dict()[key]) for key, value in model.state_dict().items())
    assert model.dataset_meta == dict(classes=['a', 'b', 'c'])
    # a head of as many classes as it had: this one starts at random
    other = loading.load_model(cfg, saved(head__weight=torch.ones(7, 4), norm__weight=torch.full((4,), 5.0)))
    assert other.head.weight.shape == (3, 4) and other.norm.weight.tolist() == [5] * 4
    changed = {'backbone.stages.0.0.norm1.weight': torch.ones(9)}
    with pytest.raises(RunError, match='does not fit the model .*; mismatched: backbone.stages.0.0.norm1.weight'):
        loading.load_model(cfg, saved(**changed))
