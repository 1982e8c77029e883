# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Learning rates that decay layer by layer: MMPretrain's constructor, and ours for detectors and segmentors."""

import copy
import inspect

import pytest
import torch
from config_helpers import build
from mmengine.config import ConfigDict
from mmengine.model import BaseModel
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from torch import nn

import mmlinattn.backbones as backbones
from mmlinattn.backbones.base import Backbone, PyramidBackbone
from mmlinattn.engine.optimizers import layer_decay

RATE = 0.5
# Every host, the next one that is written included
HOSTS = sorted(
    name
    for name, host in vars(backbones).items()
    if inspect.isclass(host) and issubclass(host, Backbone) and host.arch_zoo
)


class Detector(BaseModel):
    """A backbone and a linear head."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(4, 4)

    def forward(self, inputs, data_samples=None, mode='loss'):
        return {}


def smallest(host, **options):
    """The first size of a host's zoo, without random weights."""
    with torch.device('meta'):
        return MODELS.build(dict(type=host, arch=next(iter(MODELS.get(host).arch_zoo)), **options))


def blocks_of(model) -> list:
    """Every block of a backbone, shallow to deep."""
    return list(model.blocks) if hasattr(model, 'blocks') else [block for stage in model.stages for block in stage]


@pytest.mark.parametrize('host', HOSTS)
def test_depths_are_those_of_the_blocks(host):
    model = smallest(host)
    blocks = blocks_of(model)
    of_block = {id(p): i + 1 for i, block in enumerate(blocks) for p in block.parameters()}
    depths = {name: model.get_layer_depth(f'backbone.{name}', 'backbone.') for name, _ in model.named_parameters()}
    assert {number for _, number in depths.values()} == {len(blocks) + 2}
    for name, parameter in model.named_parameters():
        depth = depths[name][0]
        if id(parameter) in of_block:
            assert depth == of_block[id(parameter)], name
        else:
            assert 0 <= depth <= len(blocks) + 1, name
    assert depths[next(iter(depths))][0] == 0 or model.get_layer_depth('patch_embeds.0.x')[0] == 0
    assert model.get_layer_depth('head.weight', 'backbone.') == (len(blocks) + 1, len(blocks) + 2)


@pytest.mark.parametrize('host', [host for host in HOSTS if issubclass(getattr(backbones, host), PyramidBackbone)])
def test_what_is_between_stages_lies_between_their_blocks(host):
    model = smallest(host)
    ends = [0]
    for stage in model.stages:
        ends.append(ends[-1] + len(stage))
    for i in range(len(model.stages)):
        for name, _ in model.patch_embeds[i].named_parameters():
            assert model.get_layer_depth(f'patch_embeds.{i}.{name}')[0] == ends[i]
    feeds_on = ends[1] if model.norms_feed_on else ends[-1] + 1
    assert model.get_layer_depth('out_norms.0.weight')[0] == feeds_on
    assert model.get_layer_depth('out_norms.3.weight')[0] == ends[-1] + 1


def test_what_comes_before_the_blocks_of_a_stage_has_the_depth_of_the_block_before():
    """Position tables of PVT, one a stage of two blocks; all that DeiT has before its first block, and its norm."""
    pvt = smallest('LinearPVT')
    assert [pvt.get_layer_depth(f'position_tables.{i}.weight') for i in range(4)] == [(2 * i, 10) for i in range(4)]
    deit = smallest('LinearDeiT', out_indices=(4,))
    parts = {name.split('.')[0] for name, _ in deit.named_parameters()} - {'blocks'}
    assert {part: deit.get_layer_depth(f'x.{part}.weight', 'x.') for part in parts} == {
        'patch_embeds': (0, 7),
        'cls_token': (0, 7),
        'position_table': (0, 7),
        'out_norm': (6, 7),
    }
    assert deit.get_layer_depth('x.blocks.4.norm1.weight', 'x.') == (5, 7)
    assert deit.get_layer_depth('head.weight', 'x.') == (6, 7)


def test_stages_that_are_not_built_do_not_count():
    assert smallest('RAVLT', out_indices=(1,)).get_layer_depth('stages.0.0.x') == (1, 2 + 2 + 2)


def test_unknown_parts_are_refused():
    model = smallest('RAVLT')
    for name in ('nonsense.weight', 'stages.norm.weight', 'stages'):
        with pytest.raises(ValueError) as error:
            model.get_layer_depth(f'backbone.{name}', 'backbone.')
        assert str(error.value) == f"param_name='backbone.{name}' is no parameter of a stage of RAVLT"


def rates(model, constructor, **paramwise):
    """Parameter name -> learning rate and weight decay, over those of the optimizer."""
    wrapper = build_optim_wrapper(
        model,
        ConfigDict(
            type='OptimWrapper',
            constructor=constructor,
            optimizer=dict(type='AdamW', lr=2.0, weight_decay=0.1),
            paramwise_cfg=dict(layer_decay_rate=RATE, **paramwise),
        ),
    )
    groups = wrapper.optimizer.param_groups
    found = {id(p): (group['lr'] / 2.0, group['weight_decay'] / 0.1) for group in groups for p in group['params']}
    return {name: found[id(p)] for name, p in model.named_parameters()}


@pytest.mark.parametrize('scope', ['mmdet', 'mmseg'])
@pytest.mark.parametrize('host', HOSTS)
def test_detectors_and_segmentors(host, scope):
    pytest.importorskip(scope)
    init_default_scope(scope)
    model = Detector(smallest(host))
    found = rates(model, 'BackboneLayerDecayOptimWrapperConstructor')
    blocks = blocks_of(model.backbone)
    assert found['head.weight'] == (1.0, 1.0)
    assert found['head.bias'] == (1.0, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    for i, block in enumerate(blocks):
        for parameter in block.parameters():
            assert found[names[id(parameter)]][0] == pytest.approx(RATE ** (len(blocks) - i))
    stem = next(name for name in found if name.startswith('backbone.patch_embeds.0'))
    assert found[stem][0] == pytest.approx(RATE ** (len(blocks) + 1))
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            is_table = name.endswith(('relative_bias', 'position_table')) or 'mixer' in name and parameter.dim() < 4
            vector = parameter.dim() == 1 or leaf in ('bias', 'cls_token') or is_table
            if vector and not isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv1d)) or leaf == 'bias':
                assert found[f'{name}.{leaf}'.lstrip('.')][1] == 0, (name, leaf)
            elif isinstance(module, (nn.Linear, nn.Conv2d)):
                assert found[f'{name}.{leaf}'.lstrip('.')][1] == 1, (name, leaf)


def test_other_factors_come_on_top():
    found = rates(
        Detector(smallest('RAVLT')),
        'BackboneLayerDecayOptimWrapperConstructor',
        custom_keys={'head': dict(lr_mult=10.0)},
        norm_decay_mult=0.5,
    )
    assert found['head.weight'] == (10.0, 1.0)
    assert found['backbone.stages.0.0.norm1.weight'][1] == 0.5


@pytest.mark.parametrize(
    'wrapper, match',
    [
        (dict(paramwise_cfg=dict(layer_decay_rate=1.5)), 'layer_decay_rate=1.5'),
        (dict(paramwise_cfg=dict(norm_decay_mult=0.0)), 'layer_decay_rate=None'),
        (dict(paramwise_cfg=dict(layer_decay_rate=0.5), optimizer=dict(type='Adadelta')), 'lr is missing'),
    ],
)
def test_mistakes_have_one_line(wrapper, match):
    given = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=1.0))
    constructor = 'BackboneLayerDecayOptimWrapperConstructor'
    with pytest.raises(ValueError, match=match):
        build_optim_wrapper(Detector(smallest('RAVLT')), ConfigDict({**given, 'constructor': constructor, **wrapper}))


def test_a_model_without_such_a_backbone_is_refused():
    with pytest.raises(ValueError, match='Detector called backbone has a get_layer_depth'):
        rates(Detector(nn.Linear(2, 2)), 'BackboneLayerDecayOptimWrapperConstructor')
    with pytest.raises(ValueError, match='ModuleDict called backbone has a get_layer_depth'):
        groups_of(model=nn.ModuleDict(dict(img_backbone=Layers())))  # the name as a whole


@pytest.mark.parametrize('optimizer', [dict(type='SGD', lr=1.0), dict(type='SGD', lr=1.0, weight_decay=0.1)])
def test_what_is_given_stays_as_it_is(optimizer):
    """A config that is built from twice, or written down after it, has its rate."""
    wrapper = dict(type='OptimWrapper', optimizer=optimizer)
    given = dict(layer_decay_rate=0.5, custom_keys={'head': dict(lr_mult=2.0)})
    before = copy.deepcopy((wrapper, given))
    for _ in range(2):
        constructor = layer_decay.BackboneLayerDecayOptimWrapperConstructor(wrapper, given)
        assert constructor(Detector(Layers())).optimizer.param_groups[-1]['lr'] == 2.0
    assert (wrapper, given) == before


@pytest.mark.parametrize('name', ['ravlt_t_in1k', 'inline_deit_t_in1k', 'flatten_pvt_v2_b1_in1k'])
def test_classifiers_by_mmpretrain(name):
    pytest.importorskip('mmpretrain')
    model, _ = build(f'mmpretrain/{name}', random_init=False)
    found = rates(model, 'LearningRateDecayOptimWrapperConstructor')
    blocks = blocks_of(model.backbone)
    names = {id(p): key for key, p in model.named_parameters()}
    for i, block in enumerate(blocks):
        assert {found[names[id(p)]][0] for p in block.parameters()} == {RATE ** (len(blocks) - i)}
    assert {rate for key, (rate, _) in found.items() if key.startswith('head')} == {1.0}


class Layers(nn.Module):
    """A backbone of two blocks, with what no recipe decays."""

    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Linear(2, 2), nn.Linear(2, 2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 2))
        self.block.mixer = nn.Module()
        self.block.mixer.scale, self.block.mixer.position = (nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
        self.position_table = nn.Parameter(torch.zeros(2, 2))
        self.relative_bias = nn.Module()
        self.relative_bias.table = nn.Parameter(torch.zeros(2, 2))

    def get_layer_depth(self, name, prefix):
        assert name.startswith(prefix)
        return int(name[len(prefix) :].startswith('block')), 3


def groups_of(rate=0.5, optimizer=None, model=None, **paramwise):
    model = Detector(Layers()) if model is None else model
    wrapper = build_optim_wrapper(
        model,
        ConfigDict(
            type='OptimWrapper',
            constructor='BackboneLayerDecayOptimWrapperConstructor',
            optimizer=optimizer or dict(type='AdamW', lr=8.0, weight_decay=0.1),
            paramwise_cfg=dict(layer_decay_rate=rate, **paramwise),
        ),
    )
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(group['params'][0])]: group for group in wrapper.optimizer.param_groups}


def test_rates_scales_and_decay_of_every_parameter(monkeypatch):
    lines = []
    monkeypatch.setattr(layer_decay, 'print_log', lambda *args: lines.append(args))
    found = {name: (group['lr'], group['lr_scale'], group['weight_decay']) for name, group in groups_of().items()}
    stem, block, rest = (2.0, 0.25), (4.0, 0.5), (8.0, 1.0)
    assert found == {
        'backbone.cls_token': (*stem, 0),
        'backbone.position_table': (*stem, 0),
        'backbone.stem.weight': (*stem, 0.1),
        'backbone.stem.bias': (*stem, 0),
        'backbone.block.weight': (*block, 0.1),
        'backbone.block.bias': (*block, 0),
        'backbone.block.mixer.scale': (*block, 0),
        'backbone.block.mixer.position': (*block, 0),
        'backbone.relative_bias.table': (*stem, 0),
        'head.weight': (*rest, 0.1),
        'head.bias': (*rest, 0),
    }
    assert lines == [('learning rates of backbone: 2 depths, 2 to 4; of the rest 8', 'current')]


def test_two_backbones_and_the_user_s_own_factors(monkeypatch):
    lines = []
    monkeypatch.setattr(layer_decay, 'print_log', lambda line, _: lines.append(line))
    model = nn.ModuleDict(dict(student=Detector(Layers()), teacher=Detector(Layers())))
    keys = {'cls_token': dict(decay_mult=1.0, lr_mult=0.5), 'teacher': dict(lr_mult=2.0)}
    groups = groups_of(0.1, model=model, custom_keys=keys, bias_decay_mult=0.5)
    assert groups['student.backbone.cls_token']['lr'] == pytest.approx(8 * 0.01 * 0.5)
    assert groups['student.backbone.cls_token']['weight_decay'] == 0.1
    assert groups['student.backbone.position_table']['weight_decay'] == 0
    assert groups['student.head.bias']['weight_decay'] == pytest.approx(0.05)
    assert groups['teacher.backbone.block.weight']['lr'] == pytest.approx(8 * 0.1 * 2)
    assert lines == ['learning rates of student.backbone, teacher.backbone: 2 depths, 0.08 to 0.8; of the rest 8']


@pytest.mark.parametrize(
    'rules',
    [
        {},
        dict(norm_decay_mult=0.5, bias_decay_mult=0.25, dwconv_decay_mult=0.125, flat_decay_mult=0.75),
        dict(norm_decay_mult=None, bias_decay_mult=None, flat_decay_mult=None),
    ],
    ids=['as it is', 'others', 'none'],
)
def test_a_key_that_says_nothing_of_decay_changes_none(rules):
    """Rates alone, of tables, too; what is said of decay holds, of norms and tables, too."""
    model = Detector(Layers())
    model.backbone.extra = nn.ModuleList([nn.LayerNorm(2), nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2)])
    model.backbone.extra += [nn.InstanceNorm2d(2, affine=True), nn.Conv2d(2, 2, 3, groups=2), nn.PReLU(3)]
    plain = groups_of(model=model, **rules)
    slow = groups_of(model=model, custom_keys={'backbone': dict(lr_mult=0.1), 'backbone.s': dict(lr_mult=0.2)}, **rules)
    assert slow.keys() == plain.keys()
    for name, group in slow.items():
        factor = 0.2 if name.startswith('backbone.s') else 0.1 if name.startswith('backbone') else 1
        assert group['lr'] == pytest.approx(factor * plain[name]['lr']), name
        assert group['weight_decay'] == plain[name]['weight_decay'], name
    # the longest key counts, as in MMEngine
    keys = {'backbone': dict(decay_mult=0.5), 'backbone.relative_bias': dict(lr_mult=0.1)}
    half = groups_of(model=model, custom_keys=keys, **rules)
    decay = {name: group['weight_decay'] for name, group in half.items() if name.startswith('backbone')}
    assert decay.pop('backbone.relative_bias.table') == 0 and set(decay.values()) == {0.05}


def test_an_optimizer_s_own_decay_spares_the_same():
    own = groups_of(optimizer=dict(type='AdamW', lr=8.0))
    given = groups_of(optimizer=dict(type='AdamW', lr=8.0, weight_decay=0.01))
    assert {name: group['weight_decay'] for name, group in own.items()} == {
        name: group['weight_decay'] for name, group in given.items()
    }
    assert {group['weight_decay'] for group in own.values()} == {0, 0.01}
    assert groups_of(optimizer=dict(type=torch.optim.AdamW, lr=8.0))['head.bias']['weight_decay'] == 0
    assert 'weight_decay' not in groups_of(optimizer=dict(type='Rprop', lr=8.0))['head.bias']  # it has none


def test_the_ends_of_the_range():
    assert {group['lr'] for group in groups_of(1).values()} == {8.0}
    sgd = groups_of(0.5, dict(type='SGD', lr=8.0))
    assert {group['weight_decay'] for group in sgd.values()} == {0} and sgd['backbone.stem.weight']['lr'] == 2.0
    for rate in (0, -0.5, 1.01, '0.5', None):
        with pytest.raises(ValueError) as found:
            groups_of(rate)
        assert str(found.value) == f'paramwise_cfg.layer_decay_rate={rate!r} has to be a number in (0, 1]'
