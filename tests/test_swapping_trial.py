# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Trials of models and the reading of upstream configs, with toys in place of detectors."""

import copy
import logging
import warnings

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub, MMLogger
from mmengine.model import BaseModel, PretrainedInit, XavierInit
from mmengine.optim import AmpOptimWrapper
from mmengine.registry import MODELS
from torch import nn

from mmlinattn.checkpoints.loading import is_pretrained
from mmlinattn.swapping import NoModel, NoPlace, invented, trial, upstream
from mmlinattn.swapping.trial import Trial, TrialError, try_model
from mmlinattn.swapping.upstream import Measured, Upstream, inherit, measure, read_upstream
from mmlinattn.swapping.zoo import FeatureMap
from mmlinattn.utils.errors import RunError

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)


class Foreign(Exception):
    """As other projects have errors of their own."""


def fails(*args, **kwargs):
    raise Foreign('why')


class TrialBackbone(nn.Module):
    """Two maps; ``unused`` has no part in them, ``frozen`` is not trained."""

    def __init__(self, fails=None):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 2, 2)
        self.unused, self.frozen = nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False)

    def forward(self, x):
        first = self.first(x)
        return first, self.second(first)


class TrialPreprocessor(nn.Module):
    def forward(self, data, training):
        self.training_asked = training
        return dict(inputs=torch.stack(data['inputs']).float(), data_samples=data['data_samples'])


class TrialModel(BaseModel):
    """Notes what it was asked; ``fails`` with this error where pictures are smaller than ``needs``."""

    log = []

    def __init__(self, fails='', needs=0, scale=1.0, stops='', data_preprocessor=None, init_cfg=None, **settings):
        super().__init__(init_cfg=init_cfg)
        self.backbone, self.data_preprocessor = TrialBackbone(), TrialPreprocessor()
        self.fails, self.needs, self.scale, self.stops = fails, needs, scale, stops
        self.log.append(dict(settings, sizes=[]))
        if 'cannot_be_built' in settings:
            raise ValueError(settings['cannot_be_built'])

    def init_weights(self):
        super().init_weights()
        self.log[-1]['initialised'] = True
        if 'freezes' in self.log[-1]:
            self.backbone.requires_grad_(False)
            self.extra = nn.Parameter(torch.ones(()))
            self.scale = self.extra

    def forward(self, inputs, data_samples, mode):
        self.log[-1]['sizes'].append((mode, self.training, torch.is_grad_enabled(), tuple(inputs.shape)))
        self.log[-1]['weight'] = self.backbone.first.weight.detach().clone()
        assert self.data_preprocessor.training_asked is self.training
        if mode == 'loss' and inputs.shape[2] < self.needs:
            raise ValueError(self.fails)
        if mode != 'loss' and self.stops:
            raise KeyError(self.stops)
        first, second = self.backbone(inputs)
        self.log[-1]['frozen'] = self.backbone.frozen.weight
        return dict(loss=second.mean() * self.scale, acc=torch.tensor(50.0))


for kind in (TrialModel, TrialPreprocessor):
    MODELS.register_module(module=kind)


@pytest.fixture
def log():
    TrialModel.log.clear()
    return TrialModel.log


def test_what_a_step_shows(log):
    found = try_model(dict(type='TrialModel'), 'mmseg', dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=1.0)))
    assert np.isfinite(found.loss) and found.stops == ''
    # the second map is read, the first through it only as a part of the backbone itself
    assert found.read == (True, True)
    assert found.without_gradient == ('unused.weight', 'unused.bias')  # what is frozen is no surprise
    (seen,) = log
    assert seen['sizes'] == [('loss', True, True, (2, 3, 128, 128)), ('predict', False, False, (2, 3, 128, 128))]
    assert MessageHub.get_current_instance().get_info('epoch') == 0


def test_outputs_that_nobody_reads(log):
    class Second(TrialBackbone):
        def forward(self, x):
            return [self.first(x), self.second(self.first(x)), 'no map']

    original = TrialModel.__init__

    def build(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.backbone = Second()
        self.backbone.forward_hooks_before = len(self.backbone._forward_hooks)

    model = TrialModel.__new__(TrialModel)
    build(model)
    model.forward = lambda inputs, data_samples, mode: dict(loss=model.backbone(inputs)[1].mean())
    optimizer = trial.build_optim_wrapper(model, dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=100.0)))
    before = model.backbone.second.weight.detach().clone()
    batch = invented.segmentation_batch((8, 8))
    found = trial._train(model.eval(), batch, optimizer)
    assert model.training and found.read == (False, True) and not model.backbone._forward_hooks
    assert not torch.equal(before, model.backbone.second.weight)  # the optimizer took its step


def test_what_a_step_is_given(log, monkeypatch):
    """Data of its own for the step and for the prediction; types are looked for where the task has them."""
    asked, scopes = [], []

    def batch_for(model, task, cfg, size, masks):
        asked.append((type(model).__name__, task, cfg['mine'], size, masks))
        return invented.segmentation_batch(size)

    monkeypatch.setattr(trial, 'batch_for', batch_for)
    monkeypatch.setattr(trial, 'init_default_scope', scopes.append)
    for task, masks in (('mmdet', False), ('mmseg', True)):
        try_model(dict(type='TrialModel', mine=5), task, masks=masks)
        assert asked == [('TrialModel', task, 5, (128, 128), masks)] * 2 and scopes == [task]
        asked.clear(), scopes.clear()
    # settings may be read as attributes; norms that distributed runs have are others here
    try_model(dict(type='TrialModel', mine=5, deep=dict(norm_cfg=dict(type='MMSyncBN'))), 'mmseg')
    assert log[-1]['deep'].norm_cfg.type == 'SyncBN'
    with pytest.raises(TrialError, match='^it cannot be built: '):
        try_model(dict(type='TrialModel'), 'mmseg', dict(type='OptimWrapper', optimizer=dict(type='NoSuchOptimizer')))


class PairOfTrial(nn.Module):
    """Gives what preprocessors of some models give: no dict."""

    def forward(self, data, training):
        self.training_asked = training
        return torch.stack(data['inputs']).float(), data['data_samples']


class Passes(nn.Module):
    """As many maps as it is asked for."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x, count):
        return [self.conv(x) * i for i in range(1, count + 1)]


def test_steps_that_pass_the_backbone_several_times():
    """As a detector does for pictures with and without labels, and a teacher without gradients."""
    model = TrialModel()
    model.backbone, model.data_preprocessor = Passes(), PairOfTrial()

    def forward(inputs, data_samples, mode):
        assert len(data_samples) == 2 and mode == 'loss'
        with torch.no_grad():
            model.backbone(inputs, 4)
        return dict(loss=model.backbone(inputs, 1)[0].mean() + model.backbone(inputs, 3)[2].mean())

    model.forward = forward
    optimizer = trial.build_optim_wrapper(model, dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=1.0)))
    found = trial._train(model, invented.segmentation_batch((8, 8)), optimizer)
    assert found.read == (True, False, True) and found.without_gradient == ()
    # of a backbone whose first stages are frozen it is not known what is read
    model.backbone.forward = lambda x: [x, model.backbone.conv(x)]
    model.forward = lambda inputs, data_samples, mode: dict(loss=model.backbone(inputs)[1].mean())
    found = trial._train(model, invented.segmentation_batch((8, 8)), optimizer)
    assert found.read == () and found.without_gradient == ()
    model.forward = lambda *args, mode: dict(loss=torch.tensor(float('nan'), requires_grad=True))
    with pytest.raises(TrialError, match='^the loss of the first step is nan$'):
        trial._train(model, invented.segmentation_batch((8, 8)), optimizer)
    assert not model.backbone._forward_hooks  # nothing of the trial is left


def test_a_gradient_of_zeros_is_one():
    """As behind a gain that starts at zero."""
    model = TrialModel()
    model.backbone, model.data_preprocessor = Passes(), PairOfTrial()
    model.forward = lambda inputs, data_samples, mode: dict(loss=model.backbone(inputs, 1)[0].mean() * 0)
    optimizer = trial.build_optim_wrapper(model, dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=1.0)))
    assert trial._train(model, invented.segmentation_batch((8, 8)), optimizer).without_gradient == ()


def test_nothing_is_heard_of_a_trial():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with trial.quiet():
            warnings.warn('of upstream', stacklevel=1)
        with pytest.raises(UserWarning):
            warnings.warn('of ours', stacklevel=1)


@pytest.mark.parametrize(
    ('network', 'sizes', 'message'),
    [
        (dict(fails='spatial size', needs=300), [128, 320], None),
        (dict(fails='Expected more than 1 value per channel', needs=600), [128, 320, 640], None),
        (dict(fails='shape', needs=999), [128, 320, 640], 'training stops: ValueError: shape'),
        (dict(fails='no\n  labels', needs=300), [128], 'training stops: ValueError: no labels'),
        (dict(scale=float('nan')), [128], 'the loss of the first step is nan'),
        (dict(scale=float('inf')), [128], 'the loss of the first step is [-]?inf'),
        (dict(bad_argument=1, needs='x'), [128], 'training stops: TypeError'),
        (dict(type='NoSuchModel'), [], "it cannot be built: KeyError: 'NoSuchModel is not in"),
    ],
)
def test_larger_pictures_where_small_ones_vanish(log, network, sizes, message):
    """128, 320, then the recipe's size; only what is about sizes is tried again."""
    network = dict(dict(type='TrialModel'), **network)
    if message is None:
        assert try_model(network, 'mmseg', image_size=(640, 96)).stops == ''
    else:
        with pytest.raises(TrialError, match=f'^{message}'):
            try_model(network, 'mmseg', image_size=(640, 96))
    assert [each['sizes'][0][3][2] for each in log] == sizes


def test_models_are_built_and_initialised_once(log):
    with pytest.raises(TrialError, match='^it cannot be built: ValueError: a wrong size$'):
        try_model(dict(type='TrialModel', cannot_be_built='a wrong size'), 'mmseg')
    assert len(log) == 1  # another size of the pictures would not help
    found = try_model(dict(type='TrialModel', freezes=True), 'mmseg')
    assert log[-1]['initialised'] and found.read == () and found.without_gradient == ()


def test_a_prediction_that_stops_is_said_and_no_error(log):
    found = try_model(dict(type='TrialModel', stops='meta'), 'mmseg')
    assert found.stops == "prediction stops: KeyError: 'meta'" and np.isfinite(found.loss)


def test_errors_of_any_class_say_how_far_it_came(log, monkeypatch):
    monkeypatch.setattr(trial, '_predict', fails)
    assert try_model(dict(type='TrialModel'), 'mmseg').stops == 'prediction stops: Foreign: why'
    for step, said in (('_train', 'training stops'), ('build_optim_wrapper', 'it cannot be built')):
        monkeypatch.setattr(trial, step, fails)
        with pytest.raises(TrialError, match=f'^{said}: Foreign: why$'):
            try_model(dict(type='TrialModel'), 'mmseg')


def test_weights_are_not_loaded_and_loggers_left_as_they_were(log, tmp_path):
    levels = MMLogger.get_current_instance().level, logging.getLogger().level
    weights = dict(type='Pretrained', checkpoint=str(tmp_path / 'none.pth'))
    try_model(dict(type='TrialModel', init_cfg=weights, pretrained='x.pth', other=dict(init_cfg=[weights])), 'mmseg')
    assert log[-1].get('pretrained') is None and log[-1]['other'] == {}
    assert (MMLogger.get_current_instance().level, logging.getLogger().level) == levels
    with pytest.raises(KeyError), trial.quiet():
        assert MMLogger.get_current_instance().level == logging.getLogger().level == logging.CRITICAL
        raise KeyError
    assert (MMLogger.get_current_instance().level, logging.getLogger().level) == levels


def test_networks_are_made_small():
    """What costs time and memory only: padding to the recipe's size, tiles, proposals by the thousand."""
    network = dict(
        data_preprocessor=dict(
            type='P', size=(512, 1024), test_cfg=dict(size_divisor=32), batch_augments=[1], mean=[0]
        ),
        test_cfg=dict(mode='slide', crop_size=(512, 512)),
        train_cfg=[dict(sampler=dict(type='RandomSampler', num=512, pos_fraction=0.25)), dict(num=512)],
    )
    given = copy.deepcopy(network)
    assert trial._small(network, (128, 96)) == dict(
        data_preprocessor=dict(type='P', size=(128, 96), test_cfg=None, mean=[0]),
        test_cfg=dict(mode='whole'),
        train_cfg=[dict(sampler=dict(type='RandomSampler', num=32, pos_fraction=0.25)), dict(num=512)],
    )
    assert network == given
    whole = dict(test_cfg=dict(mode='whole', crop_size=(64, 64)))
    assert trial._small(whole, (128, 96)) == whole
    network = dict(
        data_preprocessor=dict(type='P'),
        test_cfg=dict(rpn=dict(max_per_img=1000, nms_pre=1000), rcnn=dict(max_per_img=20, num=8, score_thr=0.05)),
        train_cfg=None,
    )
    assert trial._small(network, (128, 96)) == dict(
        network,
        test_cfg=dict(rpn=dict(max_per_img=50, nms_pre=1000), rcnn=dict(max_per_img=20, num=8, score_thr=0.05)),
    )
    norm = dict(type='MMSyncBN', requires_grad=True)
    assert trial._alone(dict(a=[dict(norm_cfg=norm)], b=('MMSyncBN',))) == dict(
        a=[dict(norm_cfg=dict(norm, type='SyncBN'))], b=('MMSyncBN',)
    )


def test_optimizers_run_on_cpus():
    adam = dict(type='AdamW', lr=1.0)
    amp = dict(loss_scale='dynamic', dtype='float16', use_fsdp=False)
    wrapper = dict(type='AmpOptimWrapper', optimizer=adam, clip_grad=dict(a=1), **amp)
    for kind in ('AmpOptimWrapper', 'mmengine.optim.AmpOptimWrapper', AmpOptimWrapper):
        plain = dict(type='OptimWrapper', optimizer=adam, clip_grad=dict(a=1))
        assert trial._on_cpu(dict(wrapper, type=kind)) == plain
    assert trial._on_cpu(dict(type='OptimWrapper', optimizer=adam)) == dict(type='OptimWrapper', optimizer=adam)
    assert trial._on_cpu(None)['optimizer']['type'] == 'SGD'
    assert len(trial._one_line(ValueError('a\nb ' * 200))) == 300
    assert trial._one_line(ValueError('a\n  b')) == 'ValueError: a b'


# ------------------------------------------------------------------------------------ invented data


def test_detection_batch():
    batch = invented.detection_batch((50, 100))
    assert [tuple(image.shape) for image in batch['inputs']] == [(3, 50, 100)] * 2
    assert batch['inputs'][0].dtype == torch.uint8
    first, second = batch['data_samples']
    assert (first.img_id, second.img_id) == (0, 1)
    for key in ('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'):
        assert first.metainfo[key] == (50, 100)
    boxes = [[10.0, 5.0, 60.0, 35.0], [40.0, 15.0, 90.0, 47.5]]  # x before y
    torch.testing.assert_close(first.gt_instances.bboxes, torch.tensor(boxes))
    assert first.gt_instances.labels.tolist() == [0, 0] and len(first.ignored_instances) == 0
    masks = first.gt_instances.masks.masks
    assert masks.shape == (2, 50, 100) and masks.sum(axis=(1, 2)).tolist() == [50 * 30, 50 * 32]
    assert masks[0, 5:35, 10:60].all() and masks[1, 15:47, 40:90].all()
    assert first.gt_sem_seg.sem_seg.shape == (1, 50, 100) and 'proposals' not in first
    bare, _ = invented.detection_batch((50, 100), masks=False, proposals=True)['data_samples']
    assert 'masks' not in bare.gt_instances and bare.proposals.bboxes.shape == (4, 4)
    torch.testing.assert_close(bare.proposals.bboxes[2:], torch.tensor(boxes) + 4)
    assert bare.proposals.scores.tolist() == [1] * 4 and first.gt_sem_seg.sem_seg.count_nonzero() == 0


def test_batches_of_other_tasks():
    video = invented.video_batch((32, 64))
    assert [tuple(frames.shape) for frames in video['inputs']] == [(2, 3, 32, 64)]
    (track,) = video['data_samples']
    ids = [frame.gt_instances.instances_ids.tolist() for frame in track.video_data_samples]
    assert ids == [[0, 1], [0, 1]]
    people = invented.reid_batch((32, 64))
    assert len(people['inputs']) == 4 and [s.gt_label.label.item() for s in people['data_samples']] == [0, 0, 1, 1]
    sample = invented.segmentation_batch((4, 10))['data_samples'][1]
    labels, edges = sample.gt_sem_seg.data[0], sample.gt_edge_map.data[0]
    assert labels.tolist() == [[0] * 5 + [1] * 5] * 4 and edges.tolist() == [[0] * 4 + [1] * 2 + [0] * 4] * 4
    depth = sample.gt_depth_map.data
    assert depth.shape == (1, 4, 10) and depth.min() >= 0.5 and depth.max() <= 1.5
    views = invented.views_batch((8, 16), 3)
    assert [tuple(view.shape) for view in views['inputs']] == [(2, 3, 8, 16)] * 3 and len(views['data_samples']) == 2
    assert len({tuple(view.flatten().tolist()) for view in views['inputs']}) == 3  # of which each is another one
    one, two = invented.classification_batch((8, 8), 4, channels=1)['data_samples']
    assert (one.gt_label.item(), two.gt_label.item()) == (0, 1)
    assert one.gt_score.tolist() == [1, 0, 0, 0] and two.gt_score.tolist() == [0, 1, 0, 0]
    assert len(invented.classification_batch((8, 8), 1)['data_samples'][0].gt_score) == 2


def test_what_samples_say_of_their_pictures():
    """All that heads and visualisers of upstream ask for; pictures are neither scaled nor padded nor flipped."""
    size, whole = (32, 64), (1.0, 1.0)

    def metas(batch):
        return [sample.metainfo for sample in batch['data_samples']]

    detection = metas(invented.detection_batch(size))
    assert [meta.pop('border').tolist() for meta in detection] == [[0, 32, 0, 64]] * 2
    shapes = dict.fromkeys(('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'), size)
    said = dict(shapes, scale_factor=whole, flip=False, flip_direction=None, text='thing .', custom_entities=False)
    assert detection == [dict(said, img_id=i, img_path=f'{i}.jpg') for i in range(2)]
    both = dict(img_shape=size, ori_shape=size)
    segmentation = metas(invented.segmentation_batch(size))
    assert segmentation == [dict(both, pad_shape=size, scale_factor=whole)] * 2
    people = metas(invented.reid_batch(size))
    assert [{key: meta[key] for key in both} for meta in people] == [both] * 4
    for i, meta in enumerate(metas(invented.classification_batch(size, 3))):
        assert {key: meta[key] for key in ('img_shape', 'ori_shape', 'sample_idx')} == dict(both, sample_idx=i)
    assert [meta['sample_idx'] for meta in metas(invented.views_batch(size, 2))] == [0, 1]
    ignored = invented.detection_batch(size)['data_samples'][0].ignored_instances
    assert (tuple(ignored.bboxes.shape), tuple(ignored.labels.shape)) == ((0, 4), (0,))
    noise = torch.stack(invented._pictures((64, 64), 3, 2))
    assert noise.shape == (3, 2, 64, 64) and noise.min() < 3 and 251 < noise.max() < 255 and len(noise.unique()) > 240


def test_batches_suit_the_model():
    """Proposals for detectors that have a second stage only; views as a loss counts them; the backbone's channels."""
    from mmdet.models.data_preprocessors import TrackDataPreprocessor
    from mmdet.models.data_preprocessors.reid_data_preprocessor import ReIDDataPreprocessor
    from mmpretrain.models import MoCo

    model = TrialModel()
    for cfg, expected in (
        (dict(roi_head={}), True),
        (dict(roi_head={}, rpn_head=None), True),
        (dict(roi_head={}, rpn_head=dict(type='RPNHead')), False),
        ({}, False),
    ):
        batch = invented.batch_for(model, 'mmdet', cfg, (16, 16), masks=False)
        assert ('proposals' in batch['data_samples'][0]) is expected
        assert 'masks' not in batch['data_samples'][0].gt_instances
    assert 'masks' in invented.batch_for(model, 'mmdet', {}, (16, 16))['data_samples'][0].gt_instances
    model.data_preprocessor = TrackDataPreprocessor()
    for masks in (True, False):
        batch = invented.batch_for(model, 'mmdet', {}, (16, 16), masks=masks)
        assert len(batch['inputs']) == 1
        frames = batch['data_samples'][0].video_data_samples
        assert [('masks' in frame.gt_instances) for frame in frames] == [masks] * 2
    model.data_preprocessor = ReIDDataPreprocessor()
    assert len(invented.batch_for(model, 'mmdet', {}, (16, 16))['inputs']) == 4
    assert 'gt_edge_map' in invented.batch_for(model, 'mmseg', {}, (16, 16))['data_samples'][0]

    cfg = dict(head=dict(num_classes=7), backbone=dict(in_channels=1))
    batch = invented.batch_for(model, 'mmpretrain', cfg, (16, 20))
    assert batch['inputs'][0].shape == (1, 16, 20) and len(batch['data_samples'][0].gt_score) == 7
    batch = invented.batch_for(model, 'mmpretrain', dict(head=[1], backbone=dict(in_channels=(3, 6))), (16, 20))
    assert batch['inputs'][0].shape == (3, 16, 20) and len(batch['data_samples'][0].gt_score) == 2
    views = MoCo.__new__(MoCo)
    for cfg, count in ((dict(head=dict(loss=dict(num_crops=[2, 6]))), 8), (dict(head=dict(loss={})), 2), ({}, 2)):
        assert len(invented.batch_for(views, 'mmpretrain', cfg, (8, 8))['inputs']) == count
    assert invented.is_self_supervised(views) and not invented.is_self_supervised(model)


# --------------------------------------------------------------------------------- upstream configs


def upstream_of(task='mmpretrain', path=(), model=None, **cfg):
    return Upstream('base.py', Config(dict(model=model or dict(type='M', backbone=dict(type='B')), **cfg)), task, path)


def test_what_a_config_says_of_its_pictures():
    def loader(*pipeline):
        return dict(train_dataloader=dict(dataset=dict(dataset=dict(pipeline=list(pipeline)))))

    masks = dict(type='LoadAnnotations', with_mask=True)
    assert upstream_of(**loader(masks)).has_masks and not upstream_of(**loader(dict(masks, with_mask=False))).has_masks
    assert not upstream_of().has_masks
    resize = dict(type='Resize', scale=(96, 64), keep_ratio=False)  # width first
    assert upstream_of(**loader(masks, resize)).image_size == (64, 96)
    assert upstream_of(**loader(dict(resize, keep_ratio=True))).image_size is None
    assert upstream_of(**loader(dict(resize, scale=[96, 64, 32]))).image_size is None
    assert upstream_of(**loader(dict(resize, type='RandomResize'))).image_size is None  # what is cut from it is open
    sized = dict(type='M', backbone=dict(type='B'), data_preprocessor=dict(size=(32, 48)))
    assert upstream_of(model=sized, **loader(resize)).image_size == (32, 48)  # padded to, in the end
    for model, channels in (
        (dict(backbone=dict(in_channels=4), data_preprocessor=dict(mean=[1.0])), 4),
        (dict(backbone=dict(in_channels=(1, 2)), data_preprocessor=dict(mean=[1.0])), 1),
        (dict(backbone={}, data_preprocessor=dict(mean=[1.0] * 3)), 3),
        (dict(backbone={}), 3),
    ):
        assert upstream_of(model=model).image_channels == channels
    beside = upstream_of(data_preprocessor=dict(mean=[2.0]))
    assert beside.image_channels == 1 and type(beside.model['data_preprocessor']) is dict
    own = dict(type='M', backbone=dict(type='B'), data_preprocessor=dict(mean=[1.0] * 3))
    assert upstream_of(model=own, data_preprocessor=dict(mean=[2.0])).model == own
    inner = upstream_of(path=('detector',), model=dict(detector=dict(backbone=dict(in_channels=2))))
    assert inner.image_channels == 2 and inner.network(inner.model) == dict(backbone=dict(in_channels=2))


def read(tmp_path, text):
    path = tmp_path / 'upstream.py'
    path.write_text(text)
    return read_upstream(str(path)), path


def test_a_config_by_path(tmp_path, monkeypatch):
    text = "default_scope = 'mmseg'\nmodel = dict(type='T', detector=dict(backbone=dict(type='mmdet.ResNet')))\n"
    found, path = read(tmp_path, text)
    assert found.base == str(path.resolve()) and (found.task, found.path) == ('mmseg', ('detector',))
    assert inherit(found.base).model.type == 'T'
    # from here, from home, in folders of any name
    folder = tmp_path / "o'neills größe"
    folder.mkdir()
    path.rename(folder / path.name)
    monkeypatch.chdir(folder)
    monkeypatch.setenv('HOME', str(tmp_path))
    for spec in (path.name, f'~/{folder.name}/{path.name}'):
        found = read_upstream(spec)
        assert found.base == str(folder.resolve() / path.name) and found.cfg.model.type == 'T'
    outer = "default_scope = 'mmdet'\nmodel = dict(backbone=dict(type='A'), detector=dict(backbone=dict(type='B')))"
    assert read(tmp_path, outer)[0].path == ()


def test_the_task_of_a_config_that_names_none(monkeypatch):
    scopes = []
    monkeypatch.setattr(upstream, 'init_default_scope', scopes.append)
    found = read_upstream('mmdet::_base_/models/retinanet_r50_fpn.py')
    assert (found.task, found.path, found.cfg.get('default_scope')) == ('mmdet', (), None) and scopes == ['mmdet']
    assert found.model['backbone']['type'] == 'ResNet'


@pytest.mark.parametrize(
    ('text', 'kind', 'message'),
    [
        ("default_scope = 'mmpose'\nmodel = dict()", RunError, 'has default_scope {x}; allowed are: mmdet, mmseg, '),
        ("default_scope = 'mmdet'\n", NoModel, 'has no model: it is a part that other configs inherit'),
        ("default_scope = 'mmdet'\nmodel = 1 / 0", RunError, 'cannot be read: ZeroDivisionError: division by zero'),
        ("raise __import__('queue').Empty('why')", RunError, 'cannot be read: Empty: why'),
        (
            "default_scope = 'mmdet'\nmodel = dict(type='M', backbone=dict(arch='x'))",
            NoPlace,
            'has no place for another backbone: M does not build its own from a type',
        ),
        (
            "default_scope = 'mmdet'\nmodel = dict(type='M', image_encoder=1, text_backbone=2, head=3)",
            NoPlace,
            'has no place for a pyramid: M has no backbone of its own (it has image_encoder, text_backbone)',
        ),
        (
            "default_scope = 'mmdet'\nmodel = dict(type='M', head=3)",
            NoPlace,
            'has no place for a pyramid: M has no backbone of its own',
        ),
        (
            "default_scope = 'mmdet'\nmodel = dict(backbone=dict(type='mmdet.HourglassNet'))",
            NoPlace,
            'has no place for a pyramid: an hourglass gives equal maps of one stride, each supervised by a head of '
            'its own',
        ),
    ],
)
def test_configs_without_a_place(tmp_path, text, kind, message):
    with pytest.raises(RunError) as error:
        read(tmp_path, text)
    said = f'{tmp_path / "upstream.py"} {message}'.replace('{x}', "'mmpose'")
    assert type(error.value) is kind
    assert str(error.value) == said or (said.endswith(', ') and str(error.value) == f'{said}mmpretrain')


def test_configs_in_pure_python_are_refused(tmp_path):
    with pytest.raises(RunError, match='is written in pure Python, .* use its text config$'):
        read(tmp_path, 'from mmengine.config import read_base\nwith read_base():\n    pass\n')
    with pytest.raises(RunError, match="^UPSTREAM is 'mmdet::%%/%%', and mmdet has no such config$"):
        read_upstream('mmdet::%%/%%')


def test_lines_about_upstream_s_names(tmp_path, monkeypatch):
    folder = tmp_path / '.mim' / 'configs' / 'dino'
    folder.mkdir(parents=True)
    for name in ('dino_r50.py', 'dino_r101.py'):
        (folder / name).write_text("default_scope = 'mmdet'\nmodel = dict(backbone=dict(type='R'))\n")
    monkeypatch.setattr(
        upstream, 'get_installed_path', lambda scope: str(tmp_path / ('' if scope == 'mmdet' else scope))
    )
    assert upstream._base('mmdet::dino/dino_r50.py') == 'mmdet::dino/dino_r50.py'
    for spec, line in (
        (
            'mmdet::dino/dino_r500.py',
            ', and mmdet has no such config; did you mean mmdet::dino/dino_r50.py or mmdet::dino/dino_r101.py?',
        ),
        ('mmdet::%%', ', and mmdet has no such config'),
        ('mmpose::dino/dino_r50.py', '; allowed before :: are: mmdet, mmseg, mmpretrain'),
        ('dino_r50.py', ': no such file (of an installed project: mmdet::FOLDER/CONFIG.py)'),
    ):
        with pytest.raises(RunError) as error:
            upstream._base(spec)
        assert str(error.value) == f'UPSTREAM is {spec!r}{line}'

    def fails(scope):
        raise ValueError(scope)

    monkeypatch.setattr(upstream, 'get_installed_path', fails)
    with pytest.raises(RunError) as error:
        upstream._base('mmseg::a/b.py')
    assert str(error.value) == (
        'mmseg::a/b.py needs mmseg, which is not installed: pip install "mmsegmentation>=1.2.2,<1.3" ftfy regex'
    )


def test_which_init_cfgs_name_weights():
    weights = dict(type='Pretrained', checkpoint='x')
    assert is_pretrained(weights) and is_pretrained([dict(type='Xavier'), weights])
    assert is_pretrained(dict(weights, type=PretrainedInit)) and not is_pretrained(dict(type=XavierInit))
    assert not is_pretrained(dict(type='Xavier')) and not is_pretrained(None) and not is_pretrained('x')
    kept = dict(a=dict(init_cfg=dict(type='Xavier')), pretrained=None, other=weights, d=(dict(pretrained=dict(x=1)), 3))
    named = dict(kept, b=[dict(init_cfg=weights, c=1), dict(pretrained='x.pth', init_cfg=[weights])])
    assert upstream.without_weights(named) == dict(kept, b=[dict(c=1), {}])


class Measurable(nn.Module):
    """Gives maps as its ``kind`` says, for pictures of ``size`` only, if given."""

    def __init__(self, kind='maps', size=None, in_channels=3, img_size=None, branches=None):
        super().__init__()
        self.kind, self.size, self.in_channels, self.branches = kind, size, in_channels, branches

    def forward(self, x):
        if self.size and x.shape[2:] != (self.size, self.size):
            raise ValueError('first\nsize' if x.shape[2] == 256 else 'other size')
        assert x.shape[:2] == (2, self.in_channels)
        maps = [x.new_zeros(2, 6 * i, -(-x.shape[2] // (4 * i)), 3) for i in (1, 2)]
        if self.branches is not None:
            if self.training:
                if self.branches == 'fails':
                    raise Foreign
                return [maps[i] for i in self.branches]
            return maps[1]
        return dict(
            maps=tuple(maps),
            last=maps[1],
            tokens=(x.new_zeros(2, 9, 8), x.new_zeros(2, 7)),
            with_token=[(maps[0], x.new_zeros(2, 6))],
            nothing=dict(a=1),
        )[self.kind]


class Masked(Measurable):
    def forward(self, x, mask):
        return super().forward(x)


for kind in (Measurable, Masked):
    MODELS.register_module(module=kind)


@pytest.mark.parametrize(
    ('cfg', 'expected'),
    [
        ({}, Measured([FeatureMap(6, 4), FeatureMap(12, 8)])),
        (dict(kind='last'), Measured([FeatureMap(12, 8)])),
        (dict(kind='tokens'), Measured([FeatureMap(8, None), FeatureMap(7, None)])),
        (dict(kind='with_token'), Measured([FeatureMap(6, 4)])),
        (dict(size=224), Measured([FeatureMap(6, 4), FeatureMap(12, 8)])),
        (dict(size=512), Measured([FeatureMap(6, 4), FeatureMap(12, 8)])),
        (dict(size=32), Measured([FeatureMap(6, 4), FeatureMap(12, 8)])),
        (dict(size=48, img_size=48), Measured([FeatureMap(6, 4), FeatureMap(12, 8)])),
        (dict(size=48, img_size=(48, 48)), Measured([FeatureMap(6, 4), FeatureMap(12, 8)])),
        (dict(in_channels=1), Measured([FeatureMap(6, 4), FeatureMap(12, 8)])),
        (dict(pretrained='whole.pth'), Measured([FeatureMap(6, 4), FeatureMap(12, 8)])),  # which is not loaded
        # in inference one of two branches, and not told which
        (dict(branches=(0, 1)), Measured([FeatureMap(6, 4), FeatureMap(12, 8)], alone=1)),
        (dict(branches=(1, 0)), Measured([FeatureMap(12, 8), FeatureMap(6, 4)], alone=0)),
        (dict(branches=(1, 1)), Measured([FeatureMap(12, 8)])),
        (dict(branches=(1,)), Measured([FeatureMap(12, 8)])),
        (dict(branches='fails'), Measured([FeatureMap(12, 8)])),
    ],
)
def test_maps_are_measured(cfg, expected):
    model = dict(type='M', backbone=dict(type='Measurable', **cfg))
    assert measure(upstream_of(model=model)) == expected


class AskedForSizes(nn.Module):
    """Runs at no size, and notes which it was asked for and how."""

    def __init__(self, **sizes):
        super().__init__()

    def forward(self, x):
        AskedForSizes.log.append((*x.shape[2:], self.training, torch.is_grad_enabled()))
        raise ValueError(f'not at {x.shape[2]}')


MODELS.register_module(module=AskedForSizes)


@pytest.mark.parametrize(
    ('cfg', 'second'),
    [
        (dict(img_size=48), [(48, 48)]),
        (dict(pretrain_img_size=(40, 56)), [(40, 56)]),
        (dict(img_size=48, pretrain_img_size=64), [(48, 48)]),
        ({}, []),
        (dict(img_size='large'), []),
    ],
)
def test_at_which_sizes_maps_are_measured(cfg, second, monkeypatch):
    """At one that divides by all strides, at its own, then at those that such backbones have."""
    asked, scopes = [], []
    monkeypatch.setattr(AskedForSizes, 'log', asked, raising=False)
    monkeypatch.setattr(upstream, 'init_default_scope', scopes.append)
    with pytest.raises(RunError, match='^the backbone of base.py does not run here: ValueError: not at 256$'):
        measure(upstream_of(task='mmseg', model=dict(type='M', backbone=dict(type='AskedForSizes', **cfg))))
    expected = [(256, 256), *second, (224, 224), (512, 512), (32, 32)]
    assert asked == [(*size, False, False) for size in expected] and scopes == ['mmseg']


def test_channels_and_strides_of_outputs():
    def maps(*shapes, side=64):
        return upstream._maps([torch.zeros(shape) for shape in shapes], side)

    assert maps((2, 8, 64, 3), (2, 4, 128, 3)) == [FeatureMap(8, 1), FeatureMap(4, 1)]  # a larger map has no half
    assert maps((1, 8, 14, 1), (1, 8, 1, 1)) == [FeatureMap(8, 5), FeatureMap(8, 64)]  # 4.6 to the next
    assert maps((2, 5), (2, 7, 5)) == [FeatureMap(5, None)] * 2
    assert maps((2, 8, 4, 4), (3,)) == [] and maps((1, 2, 3, 4, 5)) == []
    assert upstream._maps(torch.zeros(1, 8, 16, 16), 64) == [FeatureMap(8, 4)]
    assert upstream._maps([torch.zeros(1, 8, 16, 16), None], 64) == [] and upstream._maps([[]], 64) == []


@pytest.mark.parametrize(
    'forward',
    [
        lambda self, x, mask: x,
        lambda self, x, masks=None: x,
        lambda self, x, ids_restore=None: x,
        lambda self, x, importance=None: x,
    ],
)
def test_backbones_that_hide_tokens(forward, monkeypatch):
    monkeypatch.setattr(Masked, 'forward', forward)
    with pytest.raises(NoPlace) as error:
        measure(upstream_of(model=dict(type='M', backbone=dict(type='Masked'))))
    assert str(error.value) == ('base.py has no place for a pyramid: masked image modelling hides tokens from Masked')


@pytest.mark.parametrize(
    ('model', 'kind', 'message'),
    [
        (dict(backbone=dict(type='Measurable', kind='nothing')), NoPlace, 'Measurable returns no maps or tokens'),
        (dict(backbone=dict(type='Masked')), NoPlace, 'masked image modelling hides tokens from Masked'),
        (dict(type='SparK', backbone=dict(type='Measurable')), NoPlace, 'hides tokens from Measurable'),
        (
            dict(type='ImageClassifier', backbone=dict(type='Measurable')),
            NoPlace,
            'base.py has no place for another backbone: it has no head, so that nothing trains',
        ),
        (
            dict(backbone=dict(type='Measurable', output_cls_token=True)),
            NoPlace,
            'its head reads a class token beside each map',
        ),
        (
            dict(backbone=dict(type='Measurable', size=7)),
            RunError,
            'the backbone of base.py does not run here: ValueError: first size',
        ),
        (
            dict(backbone=dict(type='Measurable', nonsense=1)),
            RunError,
            'the backbone of base.py cannot be built here: TypeError: ',
        ),
    ],
)
def test_what_cannot_be_measured(model, kind, message):
    with pytest.raises(RunError) as error:
        measure(upstream_of(model=dict(dict(type='M'), **model)))
    assert type(error.value) is kind and message in str(error.value) and '\n' not in str(error.value)


def test_backbones_may_raise_errors_of_any_class(monkeypatch):
    source = upstream_of(model=dict(type='M', backbone=dict(type='Measurable')))
    for part, said in (('forward', 'does not run here'), ('__init__', 'cannot be built here')):
        monkeypatch.setattr(Measurable, part, fails)
        with pytest.raises(RunError, match=f'^the backbone of base.py {said}: Foreign: .*why'):
            measure(source)


def test_backbones_that_cannot_be_built_are_guessed_from_their_neck():
    for neck, channels, strides in (
        (dict(in_channels=[1, 2, 3, 4]), (1, 2, 3, 4), (4, 8, 16, 32)),
        ([dict(in_channels=(5, 6)), dict(in_channels=[1])], (5, 6), (16, 32)),
        (dict(in_channels=[7]), (7,), (32,)),
    ):
        model = dict(type='M', backbone=dict(type='Measurable', nonsense=1), neck=neck)
        maps = [FeatureMap(*each) for each in zip(channels, strides)]
        assert measure(upstream_of(model=model)) == Measured(maps)
    for neck in (dict(in_channels=[1] * 5), dict(in_channels=7), dict(in_channels=[]), []):
        with pytest.raises(RunError, match='cannot be built here'):
            measure(upstream_of(model=dict(type='M', backbone=dict(type='Measurable', nonsense=1), neck=neck)))


def test_trials_are_fine_unless_they_say_otherwise():
    assert Trial(1.0, (), ()).stops == ''


def test_how_models_are_asked_for_a_prediction():
    """MMPretrain's self-supervised ones and retrievers for features, of the first of several views."""
    asked = []

    def made(name, module, gives, *bases):
        def call(self, *args, **kwargs):
            asked.append((args, kwargs, torch.is_grad_enabled()))

        parts = dict(
            __module__=module,
            __call__=call,
            loss=None,
            eval=lambda self: asked.append('eval'),
            data_preprocessor=lambda self, batch, training: asked.append((batch, training)) or gives,
        )
        kind = type(name, bases, parts)
        return kind.__new__(kind)

    from mmpretrain.models.selfsup.base import BaseSelfSupervisor

    views, first = dict(inputs=['a', 'b'], data_samples=3), dict(inputs='a', data_samples=3)
    for model, expected in (
        (made('ImageToImageRetriever', 'mmpretrain.models', views), ((), dict(first, mode='tensor'))),
        (made('MoCo', 'mmpretrain.models', views, BaseSelfSupervisor), ((), dict(first, mode='tensor'))),
        (made('ImageToImageRetriever', 'mmpretrain.models', dict(inputs='c')), ((), dict(inputs='c', mode='tensor'))),
        (made('ImageClassifier', 'mmpretrain.models', views), ((), dict(views, mode='predict'))),
        (made('Retriever', 'mmdet.models', views), ((), dict(views, mode='predict'))),
        (made('Detector', 'mmdet.models', ('c', 'd')), (('c', 'd'), dict(mode='predict'))),
    ):
        asked.clear()
        trial._predict(model, 'batch')
        assert asked == ['eval', ('batch', False), (*expected, False)]
    assert views == dict(inputs=['a', 'b'], data_samples=3)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        *((f'training stops: ValueError: {word} 3', True) for word in ('Size', 'shape', 'smaller', 'spatial')),
        ('training stops: ValueError: Expected more than 1 value per channel', True),
        ('training stops: IndexError: index 7 is out of range', True),
        ('training stops: ValueError: labels', False),
        ('it cannot be built: ValueError: size', False),
    ],
)
def test_which_errors_larger_pictures_may_mend(text, expected):
    assert trial._is_about_size(TrialError(text)) is expected


def test_a_run_that_has_an_epoch_keeps_it(log):
    hub = MessageHub.get_current_instance()
    hub.update_info('epoch', 7)
    asked = []

    def tried(cfg, task, optim_wrapper, size, masks):
        asked.append((cfg['type'], task, optim_wrapper, size, masks))
        raise TrialError(f'training stops: size {size}')

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, '_try', tried)
        for masks, image_size in ((True, None), (False, (320, 320)), (False, (64, 96))):
            with pytest.raises(TrialError) as error:
                try_model(dict(type='TrialModel'), 'mmdet', dict(type='W'), masks, image_size)
            # that of the largest, whose maps do not vanish
            assert str(error.value) == f'training stops: size {image_size or (320, 320)}'
    sizes = [(128, 128), (320, 320)]  # none twice
    assert asked == [
        *(('TrialModel', 'mmdet', dict(type='W'), size, True) for size in sizes),
        *(('TrialModel', 'mmdet', dict(type='W'), size, False) for size in (*sizes, *sizes, (64, 96))),
    ]
    assert hub.get_info('epoch') == 7
