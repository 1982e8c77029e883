# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Compact feed-forward networks: branches, merging, initial gains, errors, and construction by name."""

import copy

import pytest
import torch
from torch import nn

from mmlinattn.layers import MLP, ConvFFN, DWConvFFN, FactorisedLinear, Linear, build_ffn, compact


def unsettled(module):
    for norm in module.modules():
        if isinstance(norm, FactorisedLinear):
            nn.init.normal_(norm.bias)
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(norm.running_mean, -1, 1)
            nn.init.uniform_(norm.running_var, 0.3, 2)
            nn.init.uniform_(norm.weight, 0.5, 2)
            nn.init.normal_(norm.bias)
    return module


def one_by_one(layer, x):
    rows = x.flatten(0, -2)
    for factor in (layer.down, layer.up):
        rows = sum(norm(linear(rows)) for linear, norm in zip(factor.linears, factor.norms))
    return rows.unflatten(0, x.shape[:-1]) + layer.bias


@pytest.mark.parametrize('fixed', ['all', 'first', 'none'])
@pytest.mark.parametrize('branches', [1, 2, 3])
def test_branches_are_parallel_and_merge_into_one_matrix(branches, fixed):
    """Compare also with one branch in eval mode. Merging keeps types and frozen flags; a second call does nothing."""
    layer = unsettled(FactorisedLinear(12, 8, 5, branches)).double().requires_grad_(fixed != 'first')
    layer.train(fixed != 'all')
    for factor in (layer.down, layer.up):
        factor.norms[0].train(fixed == 'none')
    reference, x = copy.deepcopy(layer), torch.randn(2, 3, 4, 12, dtype=torch.float64, requires_grad=True)
    out, expected = layer(x), one_by_one(reference, x)
    torch.testing.assert_close(out, expected)
    leaves = [[x, *(p for p in module.parameters() if p.requires_grad)] for module in (layer, reference)]
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), of) for y, of in zip((out, expected), leaves)))
    torch.testing.assert_close(list(layer.buffers()), list(reference.buffers()))
    expected = one_by_one(reference.eval(), x)
    layer.eval().switch_to_deploy()
    down, up, bias = layer.down, layer.up, layer.bias
    layer.switch_to_deploy()
    assert layer.down is down and layer.up is up and layer.bias is bias
    assert [(type(part), part.weight.shape) for part in (down, up)] == [(nn.Linear, (5, 12)), (nn.Linear, (8, 5))]
    assert all(parameter.requires_grad is (fixed != 'first') for parameter in layer.parameters())
    torch.testing.assert_close(layer(x), expected)
    up.register_forward_hook(lambda *args: None)  # a forward hook must not lose the bias
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(('matrix', 'r', 'gain'), [('M2', 3, 0.0), ('M1', 1, 0.08), ('M1', 4, 0.04)])
def test_gains_to_begin_with(matrix, r, gain):
    """Start M2 at zero, M1 with the variance of a linear layer of deviation 0.02: r gains sum to 0.02 * sqrt(16)."""
    ffn = compact(MLP(16, 48), r=r, matrix=matrix, norm_cfg=dict(type='BN1d', eps=0.25))
    ffn.init_weights()
    layer = ffn.fc1 if matrix == 'M1' else ffn.fc2
    for factor, value in ((layer.down, 1.0), (layer.up, gain)):
        assert len(factor.linears) == len(factor.norms) == r
        for norm in factor.norms:
            torch.testing.assert_close(norm.weight.detach(), torch.full_like(norm.weight, value))
            assert not norm.bias.any() and norm.eps == 0.25
    assert not layer.bias.any() and layer.bias.shape == (layer.out_features,)
    (ffn(torch.randn(2, 12, 16)) * torch.randn(2, 12, 16)).sum().backward()
    assert all(norm.weight.grad.abs().max() > 1e-5 for norm in layer.up.norms)


# 21 = 0.7 * 2 * 45 / 3, rounding errors or not
@pytest.mark.parametrize('t, dim, hidden, rank', [(1, 192, 8 * 192, 170), (0.7, 45, 90, 21), (0.1, 2, 1, 1)])
def test_factors(t, dim, hidden, rank):
    """Compute the rank k = t m C / (m + 1). The default is the second matrix, with two branches."""
    ffn = compact(MLP(dim, hidden), t=t)
    assert type(ffn.fc1) is Linear
    for factor, sizes in ((ffn.fc2.down, (hidden, rank)), (ffn.fc2.up, (rank, dim))):
        assert [(layer.in_features, layer.out_features) for layer in factor.linears] == [sizes] * 2


ERRORS = [
    ('compact', ["ffn='compact'", 'None', "'dwconv'", 'dict']),
    (dict(type='dwconv'), ["'dwconv'", 'None']),
    (dict(type='compact', ffn='swiglu'), ["ffn='swiglu'", 'None']),
    *((dict(type='compact', t=t), [f't={t}', '(0, 1]']) for t in (0, 1.5)),
    *((dict(type='compact', r=r), [f'r={r}', 'int >= 1']) for r in (True, 1.5, 0)),
    (dict(type='compact', matrix='M3'), ["matrix='M3'", "'M1' or 'M2'"]),
    (dict(type='compact', norm_cfg=dict(type='BN')), ["'BN'", "'BN1d' or 'SyncBN'"]),
]


@pytest.mark.parametrize(('spec', 'words'), ERRORS)
def test_errors(spec, words):
    with pytest.raises(ValueError) as error:
        build_ffn(spec, MLP, 8, 32)
    assert not [word for word in words if word not in str(error.value)]


@pytest.mark.parametrize(('spec', 'kind'), [(None, DWConvFFN), ('mlp', MLP), ('conv', ConvFFN), ('dwconv', DWConvFFN)])
def test_feed_forward_networks_by_name(spec, kind):
    ffn = build_ffn(spec, DWConvFFN, 10, 30)
    assert type(ffn) is kind and (ffn.fc1.in_features, ffn.fc1.out_features, ffn.fc2.out_features) == (10, 30, 10)
    inner = {} if spec is None else dict(ffn=spec)
    arch = dict(type='compact', t=0.8, r=3, matrix='M1', norm_cfg=dict(type='SyncBN', eps=0.5), **inner)
    kept = copy.deepcopy(arch)
    for _ in range(2):
        ffn = build_ffn(arch, DWConvFFN, 10, 30)
        assert type(ffn) is kind and type(ffn.fc2) is Linear
        assert (ffn.fc1.down.out_features, len(ffn.fc1.up.linears)) == (6, 3)  # 0.8 * 3 * 10 / 4
        assert all(isinstance(norm, nn.SyncBatchNorm) and norm.eps == 0.5 for norm in ffn.fc1.down.norms)
    assert arch == kept


@pytest.mark.parametrize('place', ['down', 'up.linears.0', 'up.norms.1'])
def test_branches_with_hooks_are_not_merged(place):
    layer = FactorisedLinear(12, 8, 5).eval()
    layer.get_submodule(place).register_forward_hook(lambda module, inputs, out: 2 * out)
    with pytest.raises(ValueError, match=r'^switch_to_deploy: \w+ and \w+ of a compact FFN cannot be merged; allowed'):
        layer.switch_to_deploy()
