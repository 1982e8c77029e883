# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Folding batch norms and layer scales for inference."""

import copy
from collections import OrderedDict

import pytest
import torch
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm
from torch import nn

from mmlinattn import ops
from mmlinattn.backbones import RAVLT
from mmlinattn.backbones.ravlt import fold_batch_norms

ARCH = dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 2, 1), num_heads=(1, 2, 3, 4))


def trained(arch=ARCH, **options):
    """A model whose statistics and scales are those of no fresh one."""
    model = RAVLT(arch, **options)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-1, 1)
                module.running_mean.uniform_(-1, 1)
                module.running_var.uniform_(0.2, 3)
        for name, parameter in model.named_parameters():
            if 'gamma' in name:
                parameter.uniform_(-1.5, 1.5)
            elif name.endswith('bias'):
                parameter.uniform_(-0.5, 0.5)
    return model.eval()


def relative_error(out, expected):
    return ((out - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize('options', [dict(), dict(norm_cfg=dict(type='SyncBN')), dict(arch='tiny')], ids=str)
def test_the_folded_model_computes_the_same(options):
    model = trained(**options)
    x = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        with ops.use('reference'):  # the fast backend of stems folds by itself
            expected = model(x)
        folded = copy.deepcopy(model).switch_to_deploy()
        assert all(relative_error(*pair) < 1e-5 for pair in zip(folded(x), expected))
        folded_64 = copy.deepcopy(model).double().switch_to_deploy()
        with ops.use('reference'):
            exact = model.double()(x.double())
        assert all(relative_error(*pair) < 1e-12 for pair in zip(folded_64(x.double()), exact))


def test_nothing_is_left_to_fold():
    folded = trained().switch_to_deploy()
    assert not folded.training
    assert not any(isinstance(module, _BatchNorm) for module in folded.modules())
    assert not [key for key in folded.state_dict() if 'gamma' in key or 'running' in key]
    assert all(module is None for block in folded.stages[0] for module in (block.gamma1, block.gamma2))


def test_the_folded_state_saves_and_loads(tmp_path):
    folded = trained().switch_to_deploy()
    torch.save(folded.state_dict(), tmp_path / 'folded.pth')
    fresh = RAVLT(ARCH, deploy=True)
    fresh.load_state_dict(torch.load(tmp_path / 'folded.pth', weights_only=True), strict=True)
    x = torch.randn(1, 3, 64, 96)
    assert all(torch.equal(*pair) for pair in zip(fresh(x), folded(x)))


def test_the_folded_state_loads_through_init_cfg(tmp_path):
    folded = trained().switch_to_deploy()
    torch.save(dict(state_dict=folded.state_dict()), tmp_path / 'folded.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'folded.pth'))
    fresh = RAVLT(ARCH, deploy=True, init_cfg=init_cfg)
    fresh.init_weights()
    x = torch.randn(1, 3, 64, 96)
    assert all(torch.equal(*pair) for pair in zip(fresh.eval()(x), folded(x)))


def test_folding_twice_changes_nothing():
    folded = trained().switch_to_deploy()
    x = torch.randn(1, 3, 64, 96)
    expected = folded(x)
    assert all(torch.equal(*pair) for pair in zip(folded.switch_to_deploy()(x), expected))


def test_a_norm_without_running_statistics_stays():
    model = trained(norm_cfg=dict(type='GN', num_groups=2))
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        with ops.use('reference'):
            expected = model(x)
        assert all(relative_error(*pair) < 1e-5 for pair in zip(model.switch_to_deploy()(x), expected))


@pytest.mark.parametrize('change', [('forward', lambda x: x + 1), ('running_var', None)], ids=lambda c: c[0])
def test_a_batch_norm_that_cannot_be_folded_is_refused_before_anything_is_changed(change):
    model = trained()
    norm = [layer for layer in model.patch_embeds[-1].layers if isinstance(layer, nn.BatchNorm2d)][-1]
    setattr(norm, *change)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match='switch_to_deploy: BatchNorm2d cannot be folded into a convolution; allowed'):
        model.switch_to_deploy()
    found = model.state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)


@pytest.mark.parametrize('kind', [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_every_kind_of_batch_norm_is_folded(kind):
    norm = kind(5).eval()
    for value in (norm.weight, norm.running_var):
        nn.init.uniform_(value, 0.5, 2)
    for value in (norm.bias, norm.running_mean):
        nn.init.normal_(value)
    layers = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 5, 3), norm=norm, act=nn.GELU()))
    x = torch.randn(2, 3, 6, 7)
    image = layers.conv(x) - norm.running_mean[:, None, None]
    image = image * (norm.weight * (norm.running_var + norm.eps) ** -0.5)[:, None, None] + norm.bias[:, None, None]
    folded = fold_batch_norms(layers)
    assert [name for name, _ in folded.named_children()] == ['conv', 'act']
    torch.testing.assert_close(folded(x), nn.functional.gelu(image), rtol=1e-4, atol=1e-5)
