# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Merged layers for deployment: branches, batch norms, layer scales."""

import copy

import pytest
import torch
from helpers.small_backbones import ARCHS, build, image, relative_error
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
    assert relative_error(merged, expected) < 1e-4
    assert not any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
    assert sum(p.numel() for p in model.parameters()) <= count
    if backbone == 'RAVLT':
        assert not any(isinstance(module, _BatchNorm) for module in model.modules())
        assert not [key for key in model.state_dict() if 'gamma' in key or 'running' in key]
        assert all(module is None for block in model.stages[0] for module in (block.gamma1, block.gamma2))


def hooked(path, change):
    return lambda model: model.get_submodule(path).register_forward_hook(lambda module, inputs, out: change(out))


def double(out):
    return 2 * out


def gate(out):
    return out.clamp(-0.2, 0.2)


class Scaled(Block):
    def forward(self, x, stage):
        return self.gamma1 * super().forward(x, stage)


def own_parts(model):
    model.patch_embeds[0] = PatchEmbed(3, model.embed_dims[0], 4, 4)
    model.stages[0][0].__class__ = Scaled
    attn = model.stages[1][0].attn = nn.Sequential(model.stages[1][0].attn)
    attn.forward = lambda x, stage: attn[0](x, stage)


def shared(part):
    def share(model):
        first, second = model.stages[2]
        if part is None:
            model.stages[2][1] = first
        else:
            setattr(second, part, getattr(first, part))
        model.patch_embeds[0].layers[0].bias = None

    return share


STAY = {
    **{f'a gate on {part}': hooked(f'stages.0.0.{part}', gate) for part in ('attn', 'ffn')},
    **{f'shared {part}': shared(part) for part in ('attn', 'ffn', None)},
    'own parts': own_parts,
}


@pytest.mark.parametrize('change', STAY.values(), ids=STAY)
def test_layer_scales_beside_a_change_stay(change):
    model, x = build('RAVLT').eval(), image(2, 70, 99)
    change(model)
    expected = model(x)
    assert relative_error(model.switch_to_deploy()(x), expected) < 1e-4


@pytest.mark.parametrize(('place', 'stays'), [('attn.proj', (True, False)), ('ffn.fc2', (False, True))])
def test_the_other_layer_scale_is_merged(place, stays):
    model = build('RAVLT')
    hooked(f'stages.0.0.{place}', double)(model)
    block = model.switch_to_deploy().stages[0][0]
    assert (block.gamma1 is not None, block.gamma2 is not None) == stays


def shared_weights(model):
    convs = [layer for layer in model.patch_embeds[0].layers if isinstance(layer, nn.Conv2d)]
    convs[2].weight = convs[1].weight


def without_statistics(norm):
    return lambda model: setattr(model.get_submodule(norm), 'running_var', None)


# hooks and other changes of single layers: test_changed_modules.py
REFUSED = [
    (hooked('patch_embeds.0.layers', gate), 'the layers of a stem have a hook'),
    (shared_weights, '.*without hooks, shared or computed weights'),
    (without_statistics('patch_embeds.3.layers.norm'), 'BatchNorm2d cannot be folded into .*; allowed'),
    (without_statistics('stages.3.0.ffn.fc2.up.norms.0'), '.*; allowed'),
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
