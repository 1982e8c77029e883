# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Layer-wise learning rate decay: MMPretrain's constructor, and ours for detectors and segmentors."""

import inspect
import itertools
import re

import pytest
import torch
from helpers.config_helpers import build
from helpers.small_backbones import blocks_of
from mmengine.config import ConfigDict
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from torch import nn

import mmlinattn.backbones as backbones
from mmlinattn.backbones.base import Backbone, PyramidBackbone

OURS = 'BackboneLayerDecayOptimWrapperConstructor'
# all hosts, future ones included
BACKBONES = sorted(
    name
    for name, backbone in vars(backbones).items()
    if inspect.isclass(backbone) and issubclass(backbone, Backbone) and backbone.arch_zoo
)


class Detector(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(4, 4)


def smallest(backbone, **options):
    """Build the first size of a backbone's zoo, without weights."""
    with torch.device('meta'):
        return MODELS.build(dict(type=backbone, arch=next(iter(MODELS.get(backbone).arch_zoo)), **options))


def depths_of(model) -> dict:
    """Map parameters of a backbone to depths: blocks count from one, patch embeddings and tables of a stage have the
    depth of the block before it. Other parameters between the blocks are left out."""
    blocks = blocks_of(model)
    last = len(blocks) + 1
    depths = {p: i + 1 for i, block in enumerate(blocks) for p in block.parameters()}
    if isinstance(model, PyramidBackbone):
        ends = [0, *itertools.accumulate(map(len, model.stages))]
        depths.update((p, ends[i]) for i, embed in enumerate(model.patch_embeds) for p in embed.parameters())
        depths.update((table.weight, ends[i]) for i, table in enumerate(getattr(model, 'position_tables', ())))
        norms = [ends[i + 1] if model.norms_feed_on else last for i in range(3)] + [last]
        depths.update((p, norms[int(i)]) for i, norm in model.out_norms.items() for p in norm.parameters())
    else:
        depths.update((p, 0) for p in [model.cls_token, model.position_table, *model.patch_embeds.parameters()])
        depths.update((p, last) for p in model.out_norm.parameters())
    return depths


def test_parts_that_are_not_there():
    assert smallest('RAVLT', out_indices=(1,)).get_layer_depth('stages.0.0.x') == (1, 2 + 2 + 2)  # two stages are built
    deit = smallest('LinearDeiT', out_indices=(4,))  # five blocks
    assert [deit.get_layer_depth(f'{name}.weight') for name in ('out_norm', 'blocks.4.norm1')] == [(6, 7), (5, 7)]
    for name in ('nonsense.weight', 'stages.norm.weight', 'stages', 'stages.4.0.x', 'stages.0.9.x', 'stages.-1.0.x'):
        with pytest.raises(ValueError) as error:
            smallest('RAVLT').get_layer_depth(f'backbone.{name}', 'backbone.')
        assert str(error.value) == f"param_name='backbone.{name}' is no parameter of a stage of RAVLT"
    assert smallest('RAVLT').get_layer_depth('head.weight', 'backbone.') == (13, 14)


class Layers(nn.Module):
    """A backbone of two blocks, with a token and a table that no recipe decays."""

    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Linear(2, 2), nn.Linear(2, 2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 2))
        self.position_table = nn.Parameter(torch.zeros(2, 2))

    def no_weight_decay(self):
        return {'cls_token', 'position_table'}

    def get_layer_depth(self, name, prefix):
        assert name[len(prefix) :] in dict(self.named_parameters())
        return int(name[len(prefix) :].startswith('block')), 3


def groups_of(rate=0.5, optimizer=None, model=None, constructor=OURS, **paramwise):
    model = Detector(Layers()) if model is None else model
    wrapper = build_optim_wrapper(
        model,
        ConfigDict(
            type='OptimWrapper',
            constructor=constructor,
            optimizer=optimizer or dict(type='AdamW', lr=8.0, weight_decay=0.1),
            paramwise_cfg=dict(layer_decay_rate=rate, **paramwise),
        ),
    )
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group for group in wrapper.optimizer.param_groups for p in group['params']}


@pytest.mark.parametrize('backbone', BACKBONES)
def test_rates_and_decay_in_every_backbone(backbone):
    model = Detector(smallest(backbone))
    groups = groups_of(model=model)
    depths = depths_of(model.backbone)
    last = len(blocks_of(model.backbone)) + 1
    rates = [8 * 0.5 ** (last - depth) for depth in range(last + 1)]
    assert len(depths) > 0.9 * len(list(model.backbone.parameters()))
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f'{prefix}.{leaf}'.lstrip('.')
            group = groups[name]
            depth = depths.get(parameter, rates.index(group['lr']) if prefix.startswith('backbone') else last)
            assert group['lr'] == rates[depth], name
            is_weight = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) and leaf == 'weight'
            is_table = prefix.endswith(('relative_bias', 'position_table'))
            if is_weight or is_table or parameter.dim() == 1 or leaf in ('bias', 'cls_token'):
                assert group['weight_decay'] == 0.1 * is_weight, name


def test_classifiers_by_mmpretrain():
    pytest.importorskip('mmpretrain')
    model, _ = build('mmpretrain/ravlt_t_in1k', random_init=False)
    found = groups_of(model=model, constructor='LearningRateDecayOptimWrapperConstructor')
    blocks = blocks_of(model.backbone)
    names = {id(p): key for key, p in model.named_parameters()}
    for i, block in enumerate(blocks):
        assert {found[names[id(p)]]['lr'] for p in block.parameters()} == {8 * 0.5 ** (len(blocks) - i)}
    assert {group['lr'] for key, group in found.items() if key.startswith('head')} == {8.0}


@pytest.mark.parametrize('scope', ['mmengine', 'mmdet', 'mmseg'])
def test_constructors_and_optimizers_are_found_in_every_scope(scope):
    pytest.importorskip(scope)
    init_default_scope(scope)
    groups = groups_of(optimizer=dict(type='AdamW', lr=8.0))  # the optimizer's own decay, the config has none
    for name, group in groups.items():
        assert group['weight_decay'] == 0.01 * name.endswith('.weight'), name
    scales = [groups[f'{part}.weight']['lr_scale'] for part in ('backbone.stem', 'backbone.block', 'head')]
    assert scales == [0.25, 0.5, 1]


def test_two_backbones_and_factors_of_the_user():
    model = nn.ModuleDict(dict(student=Detector(Layers()), teacher=Detector(Layers())))
    keys = {'cls_token': dict(decay_mult=1.0, lr_mult=0.5), 'teacher': dict(lr_mult=2.0)}
    groups = groups_of(0.1, model=model, custom_keys=keys, bias_decay_mult=0.5)
    assert groups['student.backbone.cls_token']['lr'] == pytest.approx(8 * 0.01 * 0.5)
    assert groups['student.backbone.cls_token']['weight_decay'] == 0.1
    assert groups['student.backbone.position_table']['weight_decay'] == 0
    assert groups['student.head.bias']['weight_decay'] == pytest.approx(0.05)
    assert groups['teacher.backbone.block.weight']['lr'] == pytest.approx(8 * 0.1 * 2)
    assert groups['teacher.backbone.position_table']['weight_decay'] == 0  # that key sets no decay_mult


def adapted(backbone):
    """Wrap a backbone in a module with the same attributes, as MMPretrain's LoRAModel does."""
    adapter = nn.ModuleDict(dict(module=backbone))
    adapter.get_layer_depth = backbone.get_layer_depth
    return adapter


@pytest.mark.parametrize(
    ('backbone', 'inside'),
    [(adapted(Layers()), ['module']), (nn.ModuleDict(dict(rgb=Layers(), depth=Layers())), ['rgb', 'depth'])],
)
def test_backbones_inside_of_others(backbone, inside):
    groups = groups_of(model=Detector(backbone))
    for part in inside:
        scales = [groups[f'backbone.{part}.{layer}.weight']['lr_scale'] for layer in ('stem', 'block')]
        assert scales == [0.25, 0.5]


@pytest.mark.parametrize(
    'arguments, line',
    [
        *((dict(rate=r), f'paramwise_cfg.layer_decay_rate={r!r}: expected a number in (0, 1]') for r in (0, 1.01, '1')),
        (dict(optimizer=dict(type='Adadelta')), 'optim_wrapper.optimizer.lr is missing'),
        (dict(model=Detector(nn.Linear(2, 2))), 'no module of Detector called backbone, or inside of one'),
        (dict(model=nn.ModuleDict(dict(img_backbone=Layers()))), 'no module of ModuleDict called backbone'),
    ],
    ids=['zero', 'above one', 'text', 'no lr', 'other backbone', 'other name'],
)
def test_mistakes_have_one_line(arguments, line):
    with pytest.raises(ValueError, match=re.escape(line)):
        groups_of(**arguments)
