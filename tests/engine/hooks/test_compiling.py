# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``--compile``: each kind of block a bounded number of times, with the gradients of the eager model."""

import copy

import pytest
import torch
from engine_toys import make_runner
from mmcv.cnn.bricks import DropPath
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental import _config as shape_config

from mmlinattn.backbones import RAVLT, LinearDeiT, LinearSwin
from mmlinattn.engine import RunError
from mmlinattn.engine.hooks.compiling import SharedDropPath, compile_blocks

SIZES = [(64, 64), (64, 96), (72, 100)]
SMALL = dict(embed_dims=(16, 32, 32, 32), depths=(3, 2, 1, 1), num_heads=(1, 2, 2, 2), mlp_ratios=(2,) * 4)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    # what compile_blocks sets for the process, tests of other graphs are not to find
    with shape_config.patch(use_duck_shape=shape_config.use_duck_shape):
        yield


def ravlt(drop_path_rate=0.0, out_indices=(0, 1), **options):
    """Three blocks of one kind, two of another."""
    arch = dict(SMALL, stage_attns=('rala', 'softmax', 'rala', 'rala'), layer_scales=None)
    return RAVLT(arch, out_indices=out_indices, drop_path_rate=drop_path_rate, **options).double()


def gradients(model, size):
    torch.manual_seed(1)
    outs = model(torch.randn(2, 3, *size, dtype=torch.float64))
    model.zero_grad()
    sum((out * torch.randn_like(out)).sum() for out in outs).backward()
    return [p.grad.clone() for p in model.parameters()]


def compiled_like(eager, sizes):
    """Kinds of blocks of a model whose compiled copy has its gradients."""
    compiled = copy.deepcopy(eager)
    kinds = compile_blocks(compiled, backend='aot_eager')
    for size in sizes:
        for ours, theirs in zip(gradients(compiled, size), gradients(eager, size)):
            assert (ours - theirs).norm() <= 1e-6 * theirs.norm() + 1e-9
    return kinds


@pytest.mark.slow
@pytest.mark.parametrize(('with_cp', 'stages'), [(True, 2)])
def test_three_image_sizes_and_at_most_two_compilations_a_kind(with_cp, stages):
    eager = ravlt(with_cp=with_cp, out_indices=tuple(range(stages)))
    assert compiled_like(eager, SIZES) == stages
    assert 2 <= counters['stats']['unique_graphs'] <= 2 * stages
    assert not counters['graph_break']


def test_stochastic_depth_with_a_rate_in_a_tensor():
    """So that blocks of different rates share what is compiled; the first of all has none."""
    model = ravlt(drop_path_rate=0.5)
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    keys = list(model.state_dict())
    assert len(set(rates)) > 3
    for _ in range(2):  # once more changes nothing
        assert compile_blocks(model, backend='eager') == 3
    assert list(model.state_dict()) == keys
    paths = [module for module in model.modules() if isinstance(module, SharedDropPath)]
    assert [path.keep_rate.item() for path in paths] == pytest.approx([1 - rate for rate in rates])
    path = paths[-1].train()
    kept = path(torch.ones(4000, 1, 1, dtype=torch.float64))
    assert kept.unique().tolist() == pytest.approx([0, 1 / path.keep_rate.item()])
    assert kept.mean().item() == pytest.approx(1, abs=0.1)
    assert torch.equal(path.eval()(kept), kept)
    elsewhere = ravlt(drop_path_rate=0.5).to('meta')  # rates lie where the weights do
    compile_blocks(elsewhere, backend='eager')
    assert {m.keep_rate.device.type for m in elsewhere.modules() if isinstance(m, SharedDropPath)} == {'meta'}


def test_the_hook_compiles_blocks_of_the_model_but_not_of_its_copies(tmp_path):
    runner = make_runner(tmp_path, [dict(type='CompileHook')], model={})
    runner.model.backbone = model = ravlt()
    runner.call_hook('before_run')
    assert all(block._compiled_call_impl is not None for stage in model.stages for block in stage)
    assert all(block._compiled_call_impl is None for stage in copy.deepcopy(model).stages for block in stage)
    with pytest.raises(RunError, match='--compile: the model has no backbone of mmlinattn'):
        compile_blocks(nn.Linear(2, 2))


@pytest.fixture
def asked(monkeypatch):
    """What the compiler is asked, in place of asking it."""
    calls = []
    monkeypatch.setattr(torch, 'compile', lambda function, **options: calls.append((options, function)) or function)
    return calls


def test_what_is_asked_of_the_compiler(asked):
    """Dynamic sizes, of which equal ones are not one, and no search for a memory format, which fails on them."""
    shape_config.use_duck_shape = True
    assert compile_blocks(nn.ModuleList([ravlt(), ravlt()])) == 2  # of two backbones alike
    assert [options for options, _ in asked] == 2 * [dict(dynamic=True, options=dict(layout_optimization=False))]
    assert len({id(function.__code__) for _, function in asked}) == 2  # PyTorch counts compilations by it
    assert shape_config.use_duck_shape is False
    compile_blocks(ravlt(), backend='eager', fullgraph=True)
    assert [options for options, _ in asked[2:]] == 2 * [dict(dynamic=True, backend='eager', fullgraph=True)]


DIFFERENCES = dict(
    frozen=lambda blocks: blocks[0].requires_grad_(False),
    number=lambda blocks: setattr(blocks[1].norm1, 'eps', 1e-3),
    tuple=lambda blocks: setattr(blocks[1].position, 'dilation', (1, 2)),
    name=lambda blocks: setattr(blocks[1].attn.mixer, 'kernel', 'relu'),
    shape=lambda blocks: setattr(blocks[1].norm1, 'weight', nn.Parameter(torch.ones(1, 16).double())),
    type=lambda blocks: setattr(blocks[2].norm1, 'bias', nn.Parameter(torch.ones(16))),
)


@pytest.mark.parametrize('what', DIFFERENCES)
def test_what_makes_blocks_of_another_kind(asked, what):
    model = ravlt(out_indices=(0,))
    assert compile_blocks(model) == 1
    DIFFERENCES[what](model.stages[0])
    assert compile_blocks(model) == 2


def test_a_backbone_without_stages(asked):
    arch = dict(embed_dims=(16,), depths=(2,), num_heads=(2,), stage_attns=('softmax',))
    model = LinearDeiT(arch, drop_path_rate=0.0)
    assert compile_blocks(model) == 1 and all(block._compiled_call_impl for block in model.blocks)


@pytest.mark.slow
def test_windows():
    arch = dict(SMALL, depths=(2, 1, 1, 1), window=7, linear_windows=(14, 14, 7, 7), stage_attns=('softmax',) * 4)
    eager = LinearSwin(arch, out_indices=(0,), drop_path_rate=0.0).double()
    assert compiled_like(eager, SIZES[:2]) == 2  # one of two blocks shifts its windows
