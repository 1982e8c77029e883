# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Hooks, imports, optimizers, schedules and preprocessors of a swapped config."""

import copy
from types import SimpleNamespace

import pytest
from mmengine.config import Config

from mmlinattn.tooling.swapping.settings import check_pipelines, normalise, settings_for
from mmlinattn.tooling.swapping.zoo import find_backbone
from mmlinattn.utils.errors import RunError

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)

RGB = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        # ResNet's caffe weights: BGR, not scaled
        (dict(mean=[103.53, 116.28, 123.675], std=[1, 1, 1], bgr_to_rgb=False), dict(RGB, bgr_to_rgb=True)),
        (dict(RGB, to_rgb=True), dict(RGB, to_rgb=True)),
        (dict(RGB, to_rgb=False), dict(RGB, to_rgb=False)),  # images are RGB as they are read
        (dict(RGB), dict(RGB, bgr_to_rgb=False)),
        (dict(mean=[0, 0, 0], std=[255, 255, 255]), dict(RGB, bgr_to_rgb=True)),
        (dict(pad_size_divisor=32), dict(RGB, bgr_to_rgb=True, pad_size_divisor=32)),
        (dict(RGB, bgr_to_rgb=False, rgb_to_bgr=True), dict(RGB, bgr_to_rgb=True)),  # either flag reverses
        # the images are RGB
        (dict(mean=RGB['mean'][::-1], std=[1, 1, 1], rgb_to_bgr=True), dict(RGB, bgr_to_rgb=False)),
        (dict(mean=[33.46], std=[78.87]), dict(mean=[33.46], std=[78.87])),
    ],
)
def test_images_are_normalised_for_the_released_weights(given, expected):
    model = dict(type='M', data_preprocessor=dict(type='P', **given), reid=dict(data_preprocessor=dict(given)))
    normalise(model, 'mmdet')
    assert model == dict(type='M', data_preprocessor=dict(type='P', **expected), reid=dict(data_preprocessor=expected))
    # also behind one of grey images
    grey = dict(mean=[33.46], std=[78.87])
    model = dict(data_preprocessor=dict(grey), reid=dict(data_preprocessor=dict(given)))
    normalise(model, 'mmdet')
    assert model == dict(data_preprocessor=grey, reid=dict(data_preprocessor=expected))
    # a wrapper of preprocessors: those inside
    model = dict(data_preprocessor=dict(type='Multi', data_preprocessor=dict(given)))
    normalise(model, 'mmdet')
    assert model == dict(data_preprocessor=dict(type='Multi', data_preprocessor=expected))


def test_images_are_not_normalised_twice():
    steps = [dict(type='LoadImageFromFile'), dict(type='TestTimeAug', transforms=[[dict(type='Flip')]])]
    cfg = Config(dict(val_dataloader=dict(dataset=dict(dataset=dict(pipeline=steps)))))
    check_pipelines(cfg)
    steps[1]['transforms'][0].append(dict(RGB, type='mmcv.Normalize'))
    cfg = Config(dict(val_dataloader=dict(dataset=dict(dataset=dict(pipeline=steps)))))
    with pytest.raises(RunError, match='Normalize.*twice.*data_preprocessor'):
        check_pipelines(cfg)


def settings_of(task, model, cfg, keep=False, name='ravlt_t'):
    source = SimpleNamespace(cfg=Config(cfg), model=model, task=task)
    return settings_for(source, find_backbone(name, task), keep)


def test_imports_of_upstream_stay():
    """Keep upstream's hooks and runner; the tools add those of this project."""
    cfg = dict(custom_imports=dict(imports=['mmlinattn', 'mine']), custom_hooks=[dict(type='EMAHook')])
    found, remarks = settings_of('mmdet', {}, cfg)
    assert found['custom_imports'] == dict(imports=['mine', 'mmlinattn'], allow_failed_imports=False)
    assert not {'custom_hooks', 'runner_type'} & found.keys() and remarks == []
    found, _ = settings_of('mmdet', {}, dict(custom_imports=dict(imports='mine'), load_from='whole.pth'))
    assert found['custom_imports']['imports'] == ['mine', 'mmlinattn'] and found['load_from'] is None


SGD = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.02), paramwise_cfg=dict(bypass_duplicate=True))
GIVEN = dict(
    custom_imports=dict(imports='mine'),
    load_from='whole.pth',
    optim_wrapper=dict(SGD, clip_grad=dict(max_norm=1.0), accumulative_counts=2),
    param_scheduler=[dict(type='CosineAnnealingLR', eta_min=0.002)],
)


@pytest.mark.parametrize('key', [*GIVEN, *(f'optim_wrapper.{key}' for key in GIVEN['optim_wrapper'] if key != 'type')])
def test_a_setting_of_none_is_as_no_setting(key):
    found = []
    for is_given in (True, False):
        cfg = copy.deepcopy(GIVEN)
        *parents, name = key.split('.')
        node = cfg[parents[0]] if parents else cfg
        del node[name]
        if is_given:
            node[name] = None
        found.append(settings_of('mmdet', {}, cfg))
    assert found[0] == found[1] != settings_of('mmdet', {}, GIVEN)


@pytest.mark.parametrize(
    ('task', 'model', 'rate', 'decay', 'batch'),
    [
        ('mmdet', dict(type='MaskRCNN'), 1e-4, 0.05, 16),
        ('mmdet', dict(type='RetinaNet'), 1e-4, 1e-4, 16),
        ('mmseg', dict(decode_head=dict(type='UPerHead')), 6e-5, 0.01, 16),
        ('mmseg', dict(decode_head=[dict(type='FPNHead')]), 1e-4, 1e-4, 16),
        ('mmpretrain', dict(head=dict(type='FPNHead')), 1e-3, 0.05, 1024),
    ],
)
def test_the_papers_recipe_for_such_a_network(task, model, rate, decay, batch):
    wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.02), accumulative_counts=4)
    wrapper['paramwise_cfg'] = dict(bypass_duplicate=True, norm_decay_mult=0.5)
    found, remarks = settings_of(task, model, dict(optim_wrapper=wrapper))
    made = found['optim_wrapper']
    assert (made['optimizer']['lr'], made['optimizer']['weight_decay']) == (rate, decay)
    assert made['accumulative_counts'] == 4 and made['paramwise_cfg']['bypass_duplicate'] is True
    assert '_scope_' not in made['optimizer'] and made['paramwise_cfg'].get('norm_decay_mult') != 0.5
    assert found['auto_scale_lr'] == dict(base_batch_size=batch)
    assert remarks == [f'the learning rate is for {batch} images per step (--auto-scale-lr scales it)']


def test_recipes_are_merged():
    """Replace upstream's settings by the paper's, except those of heads. Either may clip gradients."""
    keys = dict(norm=dict(decay_mult=0.5), query=dict(lr_mult=10.0), backbone=dict(lr_mult=0.1))
    theirs = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.02), paramwise_cfg=dict(custom_keys=keys))

    def made(task, name='ravlt_t', **more):
        return settings_of(task, {}, dict(optim_wrapper=dict(theirs, **more)), name=name)[0]['optim_wrapper']

    detector = made('mmdet')
    assert detector['paramwise_cfg'] == dict(custom_keys=dict(norm=dict(decay_mult=0.0), query=dict(lr_mult=10.0)))
    assert list(detector) == ['type', 'constructor', 'optimizer', 'paramwise_cfg'] and detector['optimizer'][
        'betas'
    ] == (0.9, 0.999)
    assert made('mmseg', paramwise_cfg={})['paramwise_cfg'] == dict(custom_keys=dict(norm=dict(decay_mult=0.0)))
    assert 'clip_grad' not in made('mmpretrain')
    assert made('mmpretrain', 'inline_deit_t')['clip_grad'] == dict(max_norm=5.0)
    assert made('mmpretrain', 'inline_deit_t', clip_grad=dict(max_norm=1.0))['clip_grad'] == dict(max_norm=1.0)


def test_schedules_end_in_proportion_and_precision_is_a_switch_of_the_tools():
    steps = [dict(type='LinearLR', start_factor=0.1), dict(type='CosineAnnealingLR', eta_min=0.002, _scope_='mmdet')]
    wrapper = dict(type='mmengine.AmpOptimWrapper', optimizer=dict(type='SGD', lr=0.02))
    cfg = dict(optim_wrapper=wrapper, param_scheduler=[*steps, dict(type='OneCycleLR', eta_max=0.02)])
    found, remarks = settings_of('mmdet', {}, cfg)
    assert found['optim_wrapper']['type'] == 'OptimWrapper' and any('--amp' in remark for remark in remarks)
    assert not any('_scope_' in each for each in found['param_scheduler'])
    ends = [(each.get('eta_min'), each.get('eta_max')) for each in found['param_scheduler']]
    assert ends == [(None, None), (1e-5, None), (None, 1e-4)]
    for unchanged in (dict(type='LinearLR'), [dict(type='CosineAnnealingLR', eta_min=0.0)]):
        found, remarks = settings_of('mmdet', {}, dict(cfg, param_scheduler=unchanged))
        assert 'param_scheduler' not in found
    kept, remarks = settings_of('mmdet', {}, cfg, keep=True)
    assert not {'optim_wrapper', 'param_scheduler', 'auto_scale_lr'} & set(kept) and remarks == []
