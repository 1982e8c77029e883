# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Models and pictures as the analysis tools load them: which weights, which pixels, and what is refused."""

import copy
import re
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from mmcv.transforms import CenterCrop, LoadImageFromFile, Pad, RandomFlip, Resize
from mmengine.config import Config
from mmengine.model import ImgDataPreprocessor, PretrainedInit
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mmlinattn.analysis import loading
from mmlinattn.utils.errors import RunError

# --- pictures ---------------------------------------------------------------------------------------------------------


class Pack:
    """As upstream's: the picture, and all that is known of it."""

    def __init__(self, times=None):
        self.times = times

    def __call__(self, results):
        inputs = torch.from_numpy(np.ascontiguousarray(results['img'].transpose(2, 0, 1)))
        return dict(inputs=[inputs] * self.times if self.times else inputs, data_samples=SimpleNamespace(**results))


class LoadAnnotations:
    """Fails where there are none."""


def config(*steps, **pack):
    steps = [dict(type=LoadImageFromFile), *steps, dict(type=LoadAnnotations), dict(type=Pack, **pack)]
    return Config(dict(test_dataloader=dict(dataset=dict(pipeline=steps))))


def model(**options):
    options = {**dict(mean=[10, 20, 30], std=[2, 4, 8], bgr_to_rgb=True, pad_size_divisor=32), **options}
    return SimpleNamespace(data_preprocessor=ImgDataPreprocessor(**options))


def photo(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_picture_as_the_pipeline_makes_it():
    """Resized by half, then its middle: 40 of 60 rows and 64 of 100 columns."""
    image = photo(120, 200)
    cfg = config(dict(type=Resize, scale_factor=0.5), dict(type=CenterCrop, crop_size=(64, 40)))
    picture = loading.prepare(cfg, model(), image, 'photo')
    half = cv2.resize(image, (100, 60), interpolation=cv2.INTER_LINEAR)[10:50, 18:82, ::-1]
    assert np.array_equal(picture.shown, half) and picture.shown.flags.c_contiguous
    assert picture.name == 'photo' and picture.size == (200, 120) and picture.inputs.shape == (1, 3, 64, 64)
    expected = (torch.from_numpy(half.copy()).permute(2, 0, 1) - torch.tensor([10.0, 20, 30])[:, None, None]) / (
        torch.tensor([2.0, 4, 8])[:, None, None]
    )
    torch.testing.assert_close(picture.inputs[0, :, :40], expected)
    assert not picture.inputs[0, :, 40:].any()  # padding
    sample = picture.sample
    assert (sample.img_path, sample.img_id, sample.ori_shape) == ('photo', 0, (120, 200))
    for (scale, offset), (true_scale, true_offset) in zip(picture.axes, ((2, 36.5), (2, 20.5))):
        assert scale == pytest.approx(true_scale, abs=0.03) and offset == pytest.approx(true_offset, abs=1.5)
    column, row = picture.to_shown(100, 60)
    assert abs(column - 32) <= 1 and abs(row - 20) <= 1
    x, y = picture.to_given(0, 39)
    assert abs(x - 36) <= 2 and abs(y - 98) <= 2


def test_sides_may_be_stretched_apart():
    cfg = config(dict(type=Resize, scale=(64, 96)))  # width and height
    picture = loading.prepare(cfg, model(), photo(48, 320), 'photo')
    assert picture.shown.shape == (96, 64, 3)
    assert [scale for scale, _ in picture.axes] == pytest.approx([5, 0.5], rel=0.02)


@pytest.mark.parametrize('direction', ['horizontal', 'vertical'])
def test_mirrored_pictures_are_refused(direction):
    cfg = config(dict(type=RandomFlip, prob=1.0, direction=direction))
    with pytest.raises(RunError, match='the test pipeline turns or mirrors pictures; give --shape H W.'):
        loading.prepare(cfg, model(), photo(64, 64), 'photo')


class Turn:
    def __init__(self, degrees):
        self.degrees = degrees

    def __call__(self, results):
        height, width = results['img'].shape[:2]
        turn = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), self.degrees, 1)
        return {**results, 'img': cv2.warpAffine(results['img'], turn, (width, height))}


@pytest.mark.parametrize('degrees', [15, 90, 180])
def test_turned_pictures_are_refused(degrees):
    with pytest.raises(RunError, match='the test pipeline turns or mirrors pictures; give --shape H W.'):
        loading.prepare(config(dict(type=Turn, degrees=degrees)), model(), photo(64, 64), 'photo')


def test_padding_by_the_pipeline_moves_no_pixel():
    """50 x 40 pixels in the upper left of 64 x 64."""
    picture = loading.prepare(config(dict(type=Pad, size=(64, 64))), model(), photo(40, 50), 'photo')
    assert picture.shown.shape == (64, 64, 3) and not picture.shown[40:].any()
    for scale, offset in picture.axes:
        assert scale == pytest.approx(1, abs=0.03) and offset == pytest.approx(0, abs=1)
    assert picture.to_shown(49, 39) == (49, 39)


class Brighten:
    """Gives what is no byte any more."""

    def __call__(self, results):
        return {**results, 'img': results['img'].astype(np.float32) * 1.5 - 20}


def test_what_is_shown_of_pictures_that_are_no_bytes():
    """As bright and as dark as a picture can be; the network sees the numbers themselves."""
    image = photo(40, 50)
    picture = loading.prepare(config(dict(type=Brighten)), model(), image, 'photo')
    bright = (image.astype(np.float32) * 1.5 - 20)[..., ::-1]
    assert bright.min() < -10 and bright.max() > 300 and picture.shown.dtype == np.uint8
    assert np.array_equal(picture.shown, bright.clip(0, 255).astype(np.uint8))
    seen = picture.inputs[0, :, :40, :50].permute(1, 2, 0).numpy() * [2, 4, 8] + [10, 20, 30]
    np.testing.assert_allclose(seen, bright, atol=1e-3)


def test_what_a_preprocessor_gives(monkeypatch):
    """A list of one picture as well as a batch of it, and its own sample; sizes are height and width."""
    given = []

    def preprocessor(data, training):
        given.append((data, training))
        return dict(inputs=[data['inputs'][0].float()], data_samples=['prepared'])

    image = photo(40, 50)
    picture = loading.prepare(config(), SimpleNamespace(data_preprocessor=preprocessor), image, 'photo')
    assert picture.inputs.shape == (1, 3, 40, 50) and picture.sample == 'prepared'
    ((data, training),) = given
    (sample,) = data['data_samples']
    assert training is False and sample.img_shape == sample.ori_shape == (40, 50)
    assert np.array_equal(picture.inputs[0].permute(1, 2, 0).numpy(), image)


def test_pictures_that_the_network_cannot_see_are_refused():
    with pytest.raises(RunError, match='makes several pictures of one; give --shape H W.'):
        loading.prepare(config(times=2), model(), photo(64, 64), 'photo')
    narrow = model(pad_size_divisor=1)
    with pytest.raises(RunError, match='photo is 31 x 64 pixels for the network; 32 are the least.'):
        loading.prepare(config(), narrow, photo(64, 31), 'photo')
    assert loading.prepare(config(), narrow, photo(32, 33), 'photo').inputs.shape[-2:] == (32, 33)
    small = dict(type=Resize, scale=(160, 160), keep_ratio=True)
    for shape in ((2, 1024), (1024, 2)):
        with pytest.raises(RunError, match=f'cannot resize photo, {shape[1]} x {shape[0]} pixels'):
            loading.prepare(config(small), model(), photo(*shape), 'photo')


@pytest.mark.parametrize(
    ('scope', 'resize', 'pack'),
    [
        ('mmdet', dict(keep_ratio=False), 'PackDetInputs'),
        ('mmseg', dict(keep_ratio=False), 'PackSegInputs'),
        ('mmpretrain', {}, 'PackInputs'),
    ],
)
def test_a_shape_takes_the_place_of_the_pipeline(monkeypatch, scope, resize, pack):
    def stop(steps):
        assert DefaultScope.get_current_instance().scope_name == scope  # names of transforms are looked up there
        raise KeyError(steps)

    monkeypatch.setattr(loading, 'Compose', stop)
    cfg = Config(dict(default_scope=scope, test_dataloader=dict(dataset=dict(pipeline=[dict(type='Unknown')]))))
    with pytest.raises(KeyError) as steps:
        loading.prepare(cfg, None, photo(40, 50), 'photo', (75, 101))
    assert steps.value.args[0] == [dict(type='Resize', scale=(101, 75), **resize), dict(type=pack)]


def test_the_pipeline_of_wrapped_data():
    """Without what needs files and annotations, by name or by class."""
    kinds = ['LoadImageFromFile', 'Resize', LoadAnnotations, 'LoadPanopticAnnotations', 'LoadImageFromNDArray', Pack]
    steps = [dict(type=kind) for kind in kinds]
    expected = [dict(type='Resize'), dict(type=Pack)]
    plain = dict(type='Data', pipeline=steps)
    for dataset in (plain, dict(type='Repeat', dataset=plain), dict(datasets=[dict(dataset=plain), {}])):
        cfg = Config(dict(test_dataloader=dict(dataset=dataset)))
        assert [dict(step) for step in loading.test_pipeline(cfg)] == expected
    for cfg in ({}, dict(test_dataloader=None), dict(test_dataloader=dict(dataset=dict(datasets=[])))):
        with pytest.raises(RunError, match='the config has no test_dataloader.dataset.pipeline; give --shape H W.'):
            loading.test_pipeline(Config(cfg))


def test_pixels_of_a_picture():
    """Of a picture of 100 x 80, every second pixel of the 40 x 30 from (10, 20) on is shown: 20 x 15."""
    shown = np.zeros((15, 20, 3), np.uint8)
    picture = loading.Picture('photo', shown, torch.zeros(1, 3, 32, 32), None, ((2.0, 10.0), (2.0, 20.0)), (100, 80))
    assert picture.to_shown(10, 20) == (0, 0) and picture.to_shown(30, 24) == (10, 2)
    assert picture.to_given(10, 2) == (30, 24)
    # a pixel beside what is kept is the one at its border
    assert picture.to_shown(8, 18) == (0, 0) and picture.to_shown(50, 50) == (19, 14)
    kept = re.escape('of photo is cropped away by the test pipeline, which keeps x from 10 to 48 and y from 20 to 48.')
    for x, y in ((6, 30), (52, 30), (30, 16), (30, 52)):
        with pytest.raises(RunError, match=f'query {x} {y} {kept}'):
            picture.to_shown(x, y)
    for x, y in ((-0.5, 30), (100, 30), (30, -1), (30, 80)):
        with pytest.raises(RunError, match=rf'query {x:g} {y:g} is outside of photo \(100 x 80 pixels\)\.'):
            picture.to_shown(x, y)


def test_files_that_are_no_pictures(tmp_path):
    for name, content in (('a.png', b'no picture'), ('empty.jpg', b'')):
        (tmp_path / name).write_bytes(content)
    for name in ('a.png', 'empty.jpg', 'gone.jpg'):
        with pytest.raises(RunError, match=f"image '.*{name}' cannot be read as a picture."):
            loading.read_picture(str(tmp_path / name))
    image = photo(5, 7)
    cv2.imwrite(str(tmp_path / 'b.png'), image)
    assert np.array_equal(loading.read_picture(str(tmp_path / 'b.png')), image)  # blue first


def test_large_pictures_are_made_smaller():
    image = photo(30, 50)
    assert loading.resized(image, 50) is image and loading.resized(image, 100) is image
    assert loading.resized(image, 25).shape == (15, 25, 3)
    assert loading.resized(image.transpose(1, 0, 2), 10).shape == (10, 6, 3)
    assert loading.resized(photo(8, 20000), 1024).shape == (1, 1024, 3)
    assert loading.resized(photo(20000, 8), 1024).shape == (1024, 1, 3)
    assert abs(loading.resized(image, 5).mean() - image.mean()) < 3  # areas are averaged


# --- models -----------------------------------------------------------------------------------------------------------

SMALL = dict(embed_dims=(8, 8, 8, 8), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))


class SmallModel(nn.Module):
    def __init__(self, backbone, extra=None, data_preprocessor=None, head=None):
        super().__init__()
        self.backbone = MODELS.build(backbone)
        self.head, self.norm = nn.Linear(4, 3), nn.SyncBatchNorm(4)
        self.backbone_scale = nn.Linear(1, 1)  # a name that begins alike is another one
        self.given = dict(extra=extra, data_preprocessor=data_preprocessor)

    def init_weights(self):
        self.backbone.init_weights()


@pytest.fixture
def cfg(monkeypatch):
    monkeypatch.setitem(MODELS._module_dict, 'SmallModel', SmallModel)
    return Config(
        dict(
            default_scope='mmengine',
            model=dict(
                type='SmallModel',
                backbone=dict(type='RAVLT', arch=SMALL, init_cfg=dict(type='Pretrained', checkpoint='gone.pth')),
                extra=[
                    dict(init_cfg=[dict(type='Normal'), dict(type='Pretrained', checkpoint='gone')]),
                    dict(init_cfg=dict(type='Normal')),
                ],
                head=dict(num_classes=3),
            ),
            data_preprocessor=dict(mean=[1]),
            test_dataloader=dict(dataset=dict(metainfo=dict(classes=('x', 'y', 'z')))),
        )
    )


def test_a_model_without_a_checkpoint_fetches_nothing(cfg):
    before = copy.deepcopy(cfg.model.to_dict())
    for nothing in ('none', 'None'):
        model = loading.load_model(cfg, nothing)
        assert not model.training and not isinstance(model.norm, nn.SyncBatchNorm)
    assert [dict(part) for part in model.given['extra']] == [dict(init_cfg=None), dict(init_cfg=dict(type='Normal'))]
    assert model.given['data_preprocessor'] == dict(mean=[1])
    assert model.dataset_meta == dict(classes=['x', 'y', 'z'])
    assert cfg.model.to_dict() == before
    assert DefaultScope.get_current_instance().scope_name == 'mmengine'
    own = copy.deepcopy(cfg)
    own.model.data_preprocessor = dict(mean=[2])
    assert loading.load_model(own, 'none').given['data_preprocessor'] == dict(mean=[2])
    changed = loading.load_model(cfg, 'none', 'cpu', dict(stage_attns=('hydra',) * 4))
    assert [list(blocks) for blocks in changed.backbone.block_attns] == [['hydra']] * 4
    assert loading.load_model(cfg, 'none', 'meta').head.weight.is_meta


@pytest.mark.parametrize(
    'given',
    [
        dict(init_cfg=dict(type=PretrainedInit, checkpoint='gone.pth')),
        dict(init_cfg=(dict(type='Normal'), dict(type='Pretrained', checkpoint='gone.pth'))),
        dict(pretrained='gone.pth'),
        dict(teacher_ckpt='gone.pth'),
    ],
)
def test_weights_are_not_fetched_however_a_config_names_them(cfg, given, monkeypatch):
    (key,) = given
    for node in (given, (given,), [given]):
        cfg.model.extra = node
        extra = loading.load_model(cfg, 'none').given['extra']
        assert (extra if isinstance(node, dict) else extra[0])[key] is None
        assert type(loading.without_pretrained(node)) is type(node)
    monkeypatch.setattr(SmallModel, 'train', lambda self, mode: nn.Module.train(self, mode) and None)  # as students'
    assert not loading.load_model(cfg, 'none').training
    kept = dict(pretrained=True, init_cfg=dict(type='Normal'))
    assert loading.without_pretrained(kept) == kept


def test_what_of_a_checkpoint_is_loaded(cfg, tmp_path):
    """Backbone and head; under other attentions what still fits; never a backbone in part without a word."""
    own = loading.load_model(cfg, 'none')
    for parameter in own.parameters():
        nn.init.normal_(parameter)
    path = str(tmp_path / 'own.pth')
    torch.save(dict(state_dict=own.state_dict(), meta=dict(dataset_meta=dict(classes=('a', 'b', 'c')))), path)
    model = loading.load_model(cfg, path)
    assert all(torch.equal(value, own.state_dict()[key]) for key, value in model.state_dict().items())
    assert model.dataset_meta == dict(classes=['a', 'b', 'c'])
    with pytest.raises(RunError, match=f'{path} does not fit the backbone of the config; missing or of another shape'):
        cfg.model.backbone.stage_attns = ('focused',) * 4
        loading.load_model(cfg, path)
    cfg.model.backbone.pop('stage_attns')
    other_shape = {**own.state_dict(), 'backbone.stages.0.0.norm1.weight': torch.ones(9)}
    torch.save(dict(state_dict=other_shape), tmp_path / 'shape.pth')
    with pytest.raises(RunError, match=r'shape.pth does not fit .*of another shape: stages\.0\.0\.norm1\.weight'):
        loading.load_model(cfg, str(tmp_path / 'shape.pth'))
    switched = loading.load_model(cfg, path, backbone=dict(stage_attns=('focused',) * 4))
    assert torch.equal(switched.head.weight, own.head.weight)
    name = 'stages.0.0.norm1.weight'
    assert torch.equal(switched.backbone.state_dict()[name], own.backbone.state_dict()[name])
    # a head of as many classes as it had: this one starts at random
    state = {**own.state_dict(), 'head.weight': torch.ones(7, 4), 'norm.weight': torch.full((4,), 5.0)}
    torch.save(dict(state_dict=state), tmp_path / 'seven.pth')
    other = loading.load_model(cfg, str(tmp_path / 'seven.pth'))
    assert other.head.weight.shape == (3, 4) and other.norm.weight.tolist() == [5] * 4
    assert torch.equal(other.backbone.state_dict()[name], own.backbone.state_dict()[name])
    # nothing of a backbone is not a part of it
    torch.save(dict(state_dict={'head.weight': own.head.weight}), tmp_path / 'head.pth')
    with pytest.raises(RunError, match='head.pth does not fit the backbone'):
        loading.load_model(cfg, str(tmp_path / 'head.pth'), backbone=dict(stage_attns=('focused',) * 4))
    (tmp_path / 'text.pth').write_text('no checkpoint')
    with pytest.raises(RunError, match='text.pth'):
        loading.load_model(cfg, str(tmp_path / 'text.pth'))


def test_checkpoints_are_read_into_memory_and_in_silence(cfg, monkeypatch):
    """Wherever the model runs; under the names of this project, too."""
    asked, own = [], loading.load_model(cfg, 'none')

    def load_checkpoint(path, map_location, logger):
        asked.append((path, map_location, logger))
        return dict(state_dict=own.state_dict())

    monkeypatch.setattr(loading, 'CheckpointLoader', SimpleNamespace(load_checkpoint=load_checkpoint))
    loading.load_model(cfg, 'mmlinattn://ravlt_t', 'meta')
    assert asked == [('mmlinattn://ravlt_t', 'cpu', 'silent')]


def test_models_that_cannot_be_looked_into(cfg):
    with pytest.raises(RunError, match='the config has no model.backbone to look into.'):
        loading.load_model(Config(dict(model=dict(type='SmallModel'))), 'none')
    cfg.model.backbone.arch = 'huge'
    with pytest.raises(RunError, match="the model of the config cannot be built: .*'huge'"):
        loading.load_model(cfg, 'none')


def test_the_backbone_runs_alone_and_without_gradients():
    seen = []

    def backbone(inputs):
        seen.append((inputs, torch.is_grad_enabled()))

    loading.run_backbone(SimpleNamespace(backbone=backbone), 'inputs')
    assert seen == [('inputs', False)]
