# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Merged layers for deployment: branches, batch norms, layer scales."""

import copy

import pytest
import torch
from helpers.small_backbones import ARCHS, build, image
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm
from torch import nn

from mmlinattn import ops
from mmlinattn.layers import Block, PatchEmbed

COMPACT = {backbone: dict(arch=dict(arch, ffn=dict(type='compact'))) for backbone, arch in ARCHS.items()}
CASES = [
    *COMPACT.items(),
    ('LinearNextViT', dict(COMPACT['LinearNextViT'], norm_cfg=dict(type='SyncBN'))),
    *(('RAVLT', dict(norm_cfg=cfg)) for cfg in (None, dict(type='SyncBN'), dict(type='GN', num_groups=2))),
]


def cases():
    return [pytest.param(backbone, options, id=f'{backbone}-{i}') for i, (backbone, options) in enumerate(CASES)]


def assert_near(outs, expected):
    for out, other in zip(outs, expected, strict=True):
        assert (out - other).norm() < 1e-4 * other.norm()


@pytest.mark.parametrize(('backbone', 'options'), cases())
def test_the_merged_model_computes_the_same_and_its_weights_load(backbone, options, tmp_path):
    """Strictly, and through ``init_cfg``; merging twice changes nothing. Norms without statistics stay."""
    model, x = build(backbone, 'rala', **options).eval(), image(2, 70, 99)
    with ops.use('reference'):  # the fast backend of stems folds by itself
        expected, exact = model(x), copy.deepcopy(model).double()(x.double())
    wide = copy.deepcopy(model).double().switch_to_deploy()
    torch.testing.assert_close(wide(x.double()), exact)
    count = sum(p.numel() for p in model.parameters())
    assert model.train().switch_to_deploy() is model and not model.training
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'merged.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'merged.pth'))
    loaded, filled = (build(backbone, 'rala', deploy=True, **options, **cfg) for cfg in ({}, dict(init_cfg=init_cfg)))
    assert not loaded.training
    loaded.load_state_dict(model.state_dict(), strict=True)
    filled.init_weights()
    merged = model(x)
    for copied in (loaded, filled.eval(), model.switch_to_deploy()):
        assert all(torch.equal(*pair) for pair in zip(copied(x), merged))
    assert_near(merged, expected)
    assert not any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
    assert sum(p.numel() for p in model.parameters()) <= count
    if backbone == 'RAVLT':
        assert not any(isinstance(module, _BatchNorm) for module in model.modules())
        assert not [key for key in model.state_dict() if 'gamma' in key or 'running' in key]
        assert all(module is None for block in model.stages[0] for module in (block.gamma1, block.gamma2))


def doubled(layer):
    layer.register_forward_hook(lambda module, inputs, out: 2 * out)


@pytest.mark.parametrize('place', ['attn.proj', 'ffn.fc2'])
def test_a_layer_scale_beside_a_changed_layer_stays(place):
    """Other changes: test_changed_modules.py."""
    model, x = build('RAVLT').eval(), image(2, 70, 99)
    block = model.stages[0][0]
    doubled(block.get_submodule(place))
    expected = model(x)
    assert_near(model.switch_to_deploy()(x), expected)
    assert (block.gamma1 is None, block.gamma2 is None) == (place == 'ffn.fc2', place == 'attn.proj')


@pytest.mark.parametrize('place', ['0.layers.0', '0.layers.3', '1.layers.conv', '1.layers.norm'])
def test_a_changed_convolution_or_norm_is_not_folded(place):
    """Other changes: test_changed_modules.py."""
    model = build('RAVLT').eval()
    doubled(model.patch_embeds.get_submodule(place))
    with pytest.raises(ValueError, match='^switch_to_deploy: BatchNorm2d cannot be folded into'):
        model.switch_to_deploy()


@pytest.mark.parametrize('part', ['attn', 'ffn', None])
def test_layers_of_several_blocks_and_convolutions_without_bias(part):
    model, x = build('RAVLT').eval(), image(2, 70, 99)
    first, second = model.stages[2]
    if part is None:
        model.stages[2][1] = first
    else:
        setattr(second, part, getattr(first, part))
    model.patch_embeds[0].layers[0].bias = None
    expected = model(x)
    assert_near(model.switch_to_deploy()(x), expected)


class Sharpened(Block):
    def add(self, x, branch, gamma):
        return super().add(x, branch, gamma).tanh()


def gate_output(module, args, out):
    return out.clamp(-0.2, 0.2)


@pytest.mark.parametrize('place', ['attn', 'ffn', 'add'])
def test_layer_scales_before_a_change_stay(place):
    model, x = build('RAVLT').eval(), image(2, 70, 99)
    block = model.stages[0][0]
    if place == 'add':
        block.add = lambda x, branch, gamma: x + (branch * gamma).tanh()
    else:
        block.get_submodule(place).register_forward_hook(gate_output)
    expected = model(x)
    assert_near(model.switch_to_deploy()(x), expected)


def test_a_hook_on_a_stem_is_not_lost():
    model = build('RAVLT').eval()
    model.patch_embeds[0].layers.register_forward_hook(gate_output)
    with pytest.raises(ValueError, match='the layers of a stem have a hook'):
        model.switch_to_deploy()


def test_an_own_stem_and_own_blocks_stay():
    """A block may change its attention's output; a layer scale merged into the projection would skip that."""
    model, x = build('RAVLT').eval(), image(2, 70, 99)
    model.patch_embeds[0] = PatchEmbed(3, model.embed_dims[0], 4, 4)
    model.stages[0][0].__class__ = Sharpened
    model.stages[1][0].attn = nn.Sequential(model.stages[1][0].attn)
    model.stages[1][0].attn.forward = lambda x, stage: model.stages[1][0].attn[0](x, stage)
    expected = model(x)
    assert_near(model.switch_to_deploy()(x), expected)


def test_convolutions_that_share_weights_are_refused():
    model = build('RAVLT')
    convs = [layer for layer in model.patch_embeds[0].layers if isinstance(layer, nn.Conv2d)]
    convs[2].weight = convs[1].weight
    with pytest.raises(ValueError, match='without hooks, shared or computed weights'):
        model.switch_to_deploy()


@pytest.mark.parametrize('change', [('forward', lambda x: x + 1), ('running_var', None)], ids=lambda c: c[0])
@pytest.mark.parametrize('place', ['stem', 'ffn'])
def test_a_batch_norm_that_cannot_be_folded_raises_before_anything_is_changed(place, change):
    model = build('RAVLT', **COMPACT['RAVLT'])
    embed, factor = model.patch_embeds[-1].layers, model.stages[-1][-1].ffn.fc2.up
    setattr(embed.norm if place == 'stem' else factor.norms[-1], *change)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match='switch_to_deploy: .* cannot be (folded into Conv2d|merged); allowed'):
        model.switch_to_deploy()
    found = model.state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)
