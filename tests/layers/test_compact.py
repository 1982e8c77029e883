# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import copy

import pytest
import torch
from torch import nn

from mmlinattn.attention import Grid
from mmlinattn.backbones import LinearPVT, LinearPVTv2
from mmlinattn.layers import MLP, ConvFFN, DWConvFFN, FactorisedLinear, block, build_ffn, compact
from mmlinattn.layers.block import over_tokens

every_ffn = pytest.mark.parametrize('ffn', [MLP, ConvFFN, DWConvFFN])


def unsettled(module):
    """As after some training: statistics and parameters that hide no term."""
    for norm in module.modules():
        if isinstance(norm, FactorisedLinear):
            nn.init.normal_(norm.bias)
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(norm.running_mean, -1, 1)
            nn.init.uniform_(norm.running_var, 0.3, 2)
            nn.init.uniform_(norm.weight, 0.5, 2)
            nn.init.normal_(norm.bias)
    return module


@pytest.mark.parametrize('branches', [1, 2, 3])
def test_branches_are_parallel_convolutions_with_a_batch_norm_each(branches):
    layer = unsettled(FactorisedLinear(12, 8, 5, branches)).double().train()
    x = torch.randn(2, 3, 4, 12, dtype=torch.float64)
    expected = x.permute(0, 3, 1, 2)
    for factor in (layer.down, layer.up):
        total = 0
        for linear, norm in zip(factor.linears, factor.norms):
            out = torch.einsum('oi,bihw->bohw', linear.weight, expected)
            mean, var = out.mean((0, 2, 3), keepdim=True), out.var((0, 2, 3), keepdim=True, unbiased=False)
            out = (out - mean) / (var + norm.eps).sqrt()
            total = total + out * norm.weight[:, None, None] + norm.bias[:, None, None]
        expected = total
    expected = expected + layer.bias[:, None, None]
    torch.testing.assert_close(layer(x), expected.permute(0, 2, 3, 1))


def test_branches_of_which_one_is_fixed_are_not_one_matrix():
    """The statistics of the other go on."""
    layer = unsettled(FactorisedLinear(12, 8, 5)).train()
    for factor in (layer.down, layer.up):
        factor.norms[0].eval()
    twin, x = copy.deepcopy(layer), torch.randn(6, 12)
    expected = x
    for factor in (twin.down, twin.up):
        expected = sum(norm(linear(expected)) for linear, norm in zip(factor.linears, factor.norms))
    torch.testing.assert_close(layer(x), expected + layer.bias)
    for factor in (layer.down, layer.up):
        assert [norm.num_batches_tracked.item() for norm in factor.norms] == [0, 1]


def test_what_is_published_is_the_default():
    """The second matrix, two branches a factor, two thirds of the parameters (rank 2/3 * 4 / 5 * C)."""
    ffn = compact(MLP(30, 120))
    assert type(ffn.fc1) is nn.Linear
    for factor, widths in ((ffn.fc2.down, (120, 16)), (ffn.fc2.up, (16, 30))):
        assert [(layer.in_features, layer.out_features) for layer in factor.linears] == [widths] * 2


@pytest.mark.parametrize('matrix', ['M1', 'M2'])
def test_a_residual_branch_starts_small_and_trains(matrix):
    """M2 ends it, at zero; M1 is in its middle, and starts as a linear layer of weights of deviation 0.02 would."""
    arch = dict(embed_dims=(16,), depths=(1,), num_heads=(2,), mlp_ratios=2, sr_ratios=1, grids=(4,))
    arch = dict(arch, drop_path_rate=0.0, ffn=dict(type='compact', matrix=matrix))
    model = LinearPVT(arch, stage_attns=('hallucinated',), out_indices=(0,)).train()
    model.init_weights()
    (ffn,) = (module for module in model.modules() if isinstance(module, MLP))
    x, target = torch.randn(2, 2, 12, 16)
    out = ffn(x)
    factors = ffn.fc1 if matrix == 'M1' else ffn.fc2
    if matrix == 'M2':
        assert (out == 0).all()
    else:
        assert factors(x).detach().std() == pytest.approx(0.02 * 16**0.5, rel=0.2) and out.std() > 1e-3
    up = factors.up
    assert all((norm.weight == 1).all() for norm in factors.down.norms)
    torch.nn.functional.mse_loss(out, target).backward()
    assert all(norm.weight.grad.abs().max() > 1e-5 for norm in up.norms)


@pytest.mark.parametrize(('matrix', 'r', 'gain'), [('M2', 3, 0.0), ('M1', 1, 0.08), ('M1', 4, 0.04)])
def test_gains_to_begin_with(matrix, r, gain):
    """M1: r branches, each of deviation gain, together 0.02 * sqrt(16); factors before it as batch norms are."""
    ffn = compact(MLP(16, 48), r=r, matrix=matrix, norm_cfg=dict(type='BN1d', eps=0.25))
    ffn.init_weights()
    layer = ffn.fc1 if matrix == 'M1' else ffn.fc2
    for factor, value in ((layer.down, 1.0), (layer.up, gain)):
        assert len(factor.linears) == len(factor.norms) == r
        for norm in factor.norms:
            torch.testing.assert_close(norm.weight.detach(), torch.full_like(norm.weight, value))
            assert not norm.bias.any() and norm.eps == 0.25
    assert not layer.bias.any() and layer.bias.shape == (layer.out_features,)


def test_merged_factors_keep_type_and_bias_and_merge_once():
    layer = unsettled(FactorisedLinear(12, 8, 5)).double().eval()
    x = torch.randn(3, 12, dtype=torch.float64)
    expected = layer(x)
    layer.switch_to_deploy()
    down, up, bias = layer.down, layer.up, layer.bias
    layer.switch_to_deploy()
    assert layer.down is down and layer.up is up and layer.bias is bias
    assert [(type(part), part.weight.shape, part.weight.dtype) for part in (down, up)] == [
        (nn.Linear, shape, torch.float64) for shape in ((5, 12), (8, 5))
    ]
    torch.testing.assert_close(layer(x), expected)
    seen = []
    up.register_forward_hook(lambda *args: seen.append(1))  # nor is the bias lost where somebody watches
    torch.testing.assert_close(layer(x), expected)
    assert seen


class Raised(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) + 1


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def given_a_forward(factor):
    layer = factor.linears[1]
    layer.forward = lambda x: 3 * nn.Linear.forward(layer, x)


OF_THEIR_OWN = {
    'a norm of a class': lambda factor: factor.norms.__setitem__(0, Raised(5)),
    'a norm without statistics': lambda factor: factor.norms.__setitem__(
        0, nn.BatchNorm1d(5, track_running_stats=False)
    ),
    'a norm without weights': lambda factor: factor.norms.__setitem__(1, nn.BatchNorm1d(5, affine=False)),
    'a layer of a class': lambda factor: factor.linears.__setitem__(0, Halved(12, 5, bias=False)),
    'a layer with a forward': given_a_forward,
}


@pytest.mark.parametrize('change', OF_THEIR_OWN.values(), ids=OF_THEIR_OWN)
def test_branches_with_something_of_their_own_are_not_merged(change):
    layer, x = FactorisedLinear(12, 8, 5), torch.randn(3, 12)
    unsettled(layer)
    change(layer.down)
    layer.eval()
    down = sum(norm(linear(x)) for linear, norm in zip(layer.down.linears, layer.down.norms))
    up = sum(norm(linear(down)) for linear, norm in zip(layer.up.linears, layer.up.norms))
    torch.testing.assert_close(layer(x), up + layer.bias)
    kept = layer.down
    with pytest.raises(ValueError, match=r'^switch_to_deploy: \w+ and \w+ of a compact FFN cannot be merged; allowed'):
        layer.switch_to_deploy()
    assert layer.down is kept


@pytest.mark.parametrize('frozen', [False, True])
def test_frozen_factors_stay_frozen_when_merged(frozen):
    layer = FactorisedLinear(12, 8, 5).requires_grad_(not frozen)
    layer.switch_to_deploy()
    assert all(parameter.requires_grad is not frozen for parameter in layer.parameters())


@pytest.mark.parametrize('matrix', ['M1', 'M2'])
@every_ffn
def test_merging_changes_nothing(ffn, matrix):
    """Against the branches one by one, in single precision and for gradients of the input."""
    module = unsettled(compact(ffn(16, 64), matrix=matrix)).eval()
    factors = module.fc1 if matrix == 'M1' else module.fc2
    x = torch.randn(2, 9, 7, 16, requires_grad=True)

    def branch_by_branch(factor, y):
        return sum(norm(linear(y).flatten(0, -2)) for linear, norm in zip(factor.linears, factor.norms)).unflatten(
            0, y.shape[:-1]
        )

    fused = module(x)
    plain = copy.deepcopy(module)
    layer = plain.fc1 if matrix == 'M1' else plain.fc2
    for factor in (layer.down, layer.up):
        factor.forward = lambda y, factor=factor: branch_by_branch(factor, y)
    expected = plain(x)
    torch.testing.assert_close(fused, expected, rtol=1e-5, atol=1e-5)
    factors.switch_to_deploy()
    merged = module(x)
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)
    probe = torch.randn_like(merged)
    grads = [torch.autograd.grad((out * probe).sum(), x)[0] for out in (merged, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(m, nn.BatchNorm1d) for m in module.modules())


@pytest.mark.parametrize(('t', 'ratio', 'rank'), [(2 / 3, 4, 102), (1 / 2, 4, 76), (3 / 4, 4, 115), (1, 8, 170)])
def test_rank(t, ratio, rank):
    """k = t m C / (m + 1), C = 192."""
    module = compact(MLP(192, ratio * 192), t=t)
    assert module.fc2.down.out_features == module.fc2.up.in_features == rank
    assert compact(MLP(45, 90), t=0.7).fc2.down.out_features == 21  # 0.7 * 2 * 45 / 3, rounding errors or not


@pytest.mark.parametrize('matrix', ['M1', 'M2'])
@every_ffn
def test_statistics_are_those_of_the_whole_map(ffn, matrix, monkeypatch):
    """Training mode without gradients, as statistics are estimated anew: no strips."""
    monkeypatch.setattr(block, 'STRIP_NUMEL', 64)
    modules = [compact(ffn(4, 8), matrix=matrix).train()]
    modules.append(copy.deepcopy(modules[0]))
    x = torch.randn(2, 40, 5, 4)
    with torch.no_grad():
        modules[0](x)
    modules[1](x)
    for mine, other in zip(modules[0].buffers(), modules[1].buffers()):
        torch.testing.assert_close(mine, other)


@every_ffn
def test_class_tokens_are_maps_of_one_pixel(ffn):
    module = ffn(4, 8)
    x, grid = torch.randn(2, 1 + 12, 4), Grid(3, 4, prefix=1)
    out = over_tokens(module, x, grid)
    torch.testing.assert_close(out[:, 1:], module(x[:, 1:].unflatten(1, (3, 4))).flatten(1, 2))
    torch.testing.assert_close(out[:, 0], module(x[:, :1, None])[:, 0, 0])
    scale = torch.rand(4) + 0.5  # of the layer, for class tokens as for the others
    torch.testing.assert_close(over_tokens(module, x, grid, out_scale=scale), out * scale)


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        ('compact', "ffn='compact' has to be None, one of .*'dwconv'.*, or dict"),
        (dict(type='dwconv'), 'has to be None, one of'),
        (dict(type='compact', t=0), r't=0 of a compact FFN has to lie in \(0, 1\]'),
        (dict(type='compact', t=1.5), r't=1.5 of a compact FFN has to lie in \(0, 1\]'),
        (dict(type='compact', r=True), 'r=True of a compact FFN has to be an int >= 1'),
        (dict(type='compact', r=1.5), 'r=1.5 of a compact FFN has to be an int >= 1'),
        (dict(type='compact', ffn='swiglu'), "ffn='swiglu' has to be None, one of"),
        (dict(type='compact', r=0), 'r=0 of a compact FFN has to be an int >= 1'),
        (dict(type='compact', matrix='M3'), "matrix='M3' of a compact FFN has to be 'M1' or 'M2'"),
        (dict(type='compact', norm_cfg=dict(type='BN')), "has to be of type 'BN1d' or 'SyncBN'"),
    ],
)
def test_what_it_refuses(spec, message):
    with pytest.raises(ValueError, match=message):
        build_ffn(spec, MLP, 8, 32)


@pytest.mark.parametrize(('spec', 'kind'), [(None, DWConvFFN), ('mlp', MLP), ('conv', ConvFFN), ('dwconv', DWConvFFN)])
def test_feed_forward_networks_by_name(spec, kind):
    """Alone and compact; options are the arch's, which names one for every block."""
    ffn = build_ffn(spec, DWConvFFN, 10, 30)
    assert type(ffn) is kind and (ffn.fc1.in_features, ffn.fc1.out_features, ffn.fc2.out_features) == (10, 30, 10)
    assert ffn.takes_statistics is False and ffn.halo == (0 if kind is MLP else 1)
    inner = {} if spec is None else dict(ffn=spec)
    arch = dict(type='compact', t=0.8, r=3, matrix='M1', norm_cfg=dict(type='SyncBN', eps=0.5), **inner)
    kept = copy.deepcopy(arch)
    for _ in range(2):
        ffn = build_ffn(arch, DWConvFFN, 10, 30)
        assert type(ffn) is kind and ffn.takes_statistics and type(ffn.fc2) is nn.Linear
        assert (ffn.fc1.down.out_features, len(ffn.fc1.up.linears)) == (6, 3)  # 0.8 * 3 * 10 / 4
        assert all(isinstance(norm, nn.SyncBatchNorm) and norm.eps == 0.5 for norm in ffn.fc1.down.norms)
    assert arch == kept
    assert compact(MLP(2, 1), t=0.1).fc2.down.out_features == 1  # not 0


def test_one_ffn_a_stage():
    arch = dict(embed_dims=(8, 16, 24, 32), depths=(1,) * 4, num_heads=(1, 2, 3, 4))
    model = LinearPVTv2(dict(arch, ffn=(None, 'mlp', dict(type='compact', ffn='mlp'), 'conv')))
    ffns = [stage[0].ffn for stage in model.stages]
    assert [type(ffn) for ffn in ffns] == [DWConvFFN, MLP, MLP, ConvFFN]
    assert isinstance(ffns[2].fc2, FactorisedLinear)
    with pytest.raises(ValueError, match='ffn=.* has to have one entry for each of the 4 stages'):
        LinearPVTv2(dict(arch, ffn=('mlp', 'mlp')))


def test_scales_of_the_output_where_statistics_are_taken():
    """As in a pass without gradients in training mode, which renews the statistics of batch norms."""
    ffn, scale = compact(MLP(6, 12), r=2).train(), torch.rand(6) + 0.5
    nn.init.normal_(ffn.fc2.up.linears[0].weight)
    x = torch.randn(2, 5, 6)
    with torch.no_grad():
        expected = ffn(x) * scale
        torch.testing.assert_close(ffn(x, out_scale=scale), expected)
    assert expected.abs().max() > 0.1
