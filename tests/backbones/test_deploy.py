# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Merged layers for deployment: branches and batch norms."""

import copy

import pytest
import torch
from helpers.small_backbones import ARCHS, build, image
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from mmlinattn import ops
from mmlinattn.layers import PatchEmbed

COMPACT = {backbone: dict(arch=dict(arch, ffn=dict(type='compact'))) for backbone, arch in ARCHS.items()}
CASES = [
    *COMPACT.items(),
    ('LinearNextViT', dict(COMPACT['LinearNextViT'], norm_cfg=dict(type='SyncBN'))),
    *(('RAVLT', dict(norm_cfg=cfg)) for cfg in (None, dict(type='SyncBN'), dict(type='GN', num_groups=2))),
]


def assert_near(outs, expected):
    for out, other in zip(outs, expected, strict=True):
        assert (out - other).norm() < 1e-4 * other.norm()


@pytest.mark.parametrize(('backbone', 'options'), CASES, ids=lambda case: case if isinstance(case, str) else '')
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


def hooked(path, change):
    return lambda model: model.get_submodule(path).register_forward_hook(lambda module, inputs, out: change(out))


def double(out):
    return 2 * out


def gate(out):
    return out.clamp(-0.2, 0.2)


def own_stem(model):
    model.patch_embeds[0] = PatchEmbed(3, model.embed_dims[0], 4, 4)


def padded_in_a_circle(model):
    for conv in model.patch_embeds.modules():
        if isinstance(conv, nn.Conv2d):
            conv.padding_mode, conv._reversed_padding_repeated_twice = 'circular', [conv.padding[0]] * 4


def without_bias(model):
    model.patch_embeds[0].layers[0].bias = None


def shared_weights(model):
    convs = [layer for layer in model.patch_embeds[0].layers if isinstance(layer, nn.Conv2d)]
    convs[2].weight = convs[1].weight


@pytest.mark.parametrize('change', [own_stem, padded_in_a_circle, without_bias, shared_weights])
def test_changed_stems(change):
    model, x = build('RAVLT').eval(), image(2, 70, 99)
    change(model)
    expected = model(x)
    assert_near(model.switch_to_deploy()(x), expected)


NORMS = 'patch_embeds.3.layers.norm', 'stages.3.0.ffn.fc2.up.norms.0'
FOLDED = 'BatchNorm2d cannot be folded into'
REFUSED = [
    *((hooked(f'patch_embeds.{place}', double), FOLDED) for place in ('0.layers.0', '0.layers.3')),
    *((hooked(f'patch_embeds.{place}', double), FOLDED) for place in ('1.layers.conv', '1.layers.norm')),
    (hooked('patch_embeds.0.layers', gate), 'the layers of a stem have a hook'),
    (lambda model: weight_norm(model.patch_embeds[0].layers[0]), '.*without hooks or computed weights'),
    *(
        (lambda model, norm=norm, change=change: setattr(model.get_submodule(norm), *change), '.*; allowed')
        for norm in NORMS
        for change in (('forward', lambda x: x + 1), ('running_var', None))
    ),
]


@pytest.mark.parametrize(('change', 'message'), REFUSED)
def test_a_batch_norm_that_cannot_be_folded_raises_before_anything_is_changed(change, message):
    model = build('RAVLT', **COMPACT['RAVLT'])
    change(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=f'^switch_to_deploy: {message}'):
        model.switch_to_deploy()
    found = model.state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)
