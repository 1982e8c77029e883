# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``--compile``: each kind of block a bounded number of times, with the gradients of the eager model."""

import copy

import pytest
import torch
from mmcv.cnn.bricks import DropPath
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental import _config as shape_config

from mmlinattn.backbones import RAVLT, LinearDeiT, LinearSwin
from mmlinattn.engine import RunError
from mmlinattn.engine.hooks.compiling import SharedDropPath, _call_with_code_of_its_own, compile_blocks

SIZES = [(64, 64), (64, 96), (80, 112), (96, 64), (72, 100)]
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
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal_gradients(compiled, eager, size):
    for (name, ours), theirs in zip(gradients(compiled, size).items(), gradients(eager, size).values()):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm() + 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize(('with_cp', 'stages'), [(False, 2), (True, 1)])
def test_five_image_sizes_and_at_most_two_compilations_a_kind(with_cp, stages):
    eager = ravlt(with_cp=with_cp, out_indices=tuple(range(stages)))
    compiled = copy.deepcopy(eager)
    kinds = compile_blocks(compiled, backend='aot_eager')
    assert kinds == stages
    for size in SIZES:
        assert_equal_gradients(compiled, eager, size)
    assert 2 <= counters['stats']['unique_graphs'] <= 2 * kinds
    assert not counters['graph_break']


@pytest.mark.slow
def test_rates_of_stochastic_depth_share_what_is_compiled():
    model = ravlt(drop_path_rate=0.3, out_indices=(0,))
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath) and module.drop_prob]
    assert len(set(rates)) > 1
    keys = list(model.state_dict())
    # the first block has no stochastic depth, the two others share what is compiled
    assert len(model.stages[0]) == 3 and compile_blocks(model, backend='aot_eager') == 2
    assert list(model.state_dict()) == keys
    gradients(model, SIZES[0])
    assert counters['stats']['unique_graphs'] <= 3


def test_stochastic_depth_with_a_rate_in_a_tensor():
    model = ravlt(drop_path_rate=0.5)
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    keys = list(model.state_dict())
    compile_blocks(model, backend='eager')
    assert list(model.state_dict()) == keys
    paths = [module for module in model.modules() if isinstance(module, SharedDropPath)]
    assert [path.keep_rate.item() for path in paths] == pytest.approx([1 - rate for rate in rates])
    path = paths[-1].train()
    kept = path(torch.ones(4000, 1, 1, dtype=torch.float64))
    values = kept.unique().tolist()
    keep = path.keep_rate.item()
    assert values == pytest.approx([0, 1 / keep]) and kept.mean().item() == pytest.approx(1, abs=0.1)
    assert torch.equal(path.eval()(kept), kept)
    again = copy.deepcopy(model.train())  # without, with and with stochastic depth in the first stage, the second
    assert compile_blocks(again, backend='eager') == compile_blocks(model, backend='eager') == 3
    for made in (again, model):
        shared = [module for module in made.modules() if isinstance(module, SharedDropPath)]
        assert [path.keep_rate.item() for path in shared] == pytest.approx([1 - rate for rate in rates])
    elsewhere = ravlt(drop_path_rate=0.5).to('meta')  # rates lie where the weights do
    compile_blocks(elsewhere, backend='eager')
    assert {m.keep_rate.device.type for m in elsewhere.modules() if isinstance(m, SharedDropPath)} == {'meta'}


def test_copies_and_files_know_nothing_of_it():
    model = ravlt()
    compile_blocks(model, backend='eager')
    blocks = [block for stage in model.stages for block in stage]
    assert all(block._compiled_call_impl is not None for block in blocks)
    assert all(block._compiled_call_impl is None for stage in copy.deepcopy(model).stages for block in stage)


def test_a_model_of_others_is_refused():
    with pytest.raises(RunError, match='--compile: the model has no backbone of mmlinattn'):
        compile_blocks(nn.Linear(2, 2))


def test_what_is_asked_of_the_compiler(monkeypatch):
    """Dynamic sizes, of which equal ones are not one, and no search for a memory format, which fails on them."""
    calls = []
    monkeypatch.setattr(torch, 'compile', lambda function, **options: calls.append(options) or function)
    shape_config.use_duck_shape = True
    assert compile_blocks(nn.ModuleList([ravlt(), ravlt()])) == 2  # of two backbones alike
    assert calls == 2 * [dict(dynamic=True, options=dict(layout_optimization=False))]
    assert shape_config.use_duck_shape is False
    compile_blocks(ravlt(), backend='eager', fullgraph=True)
    assert calls[2:] == 2 * [dict(dynamic=True, backend='eager', fullgraph=True)]


def test_what_makes_blocks_of_another_kind(monkeypatch):
    monkeypatch.setattr(torch, 'compile', lambda function, **_: function)
    stage = dict(out_indices=(0,))
    assert compile_blocks(ravlt(**stage)) == 1
    frozen = ravlt(**stage)
    frozen.stages[0][0].requires_grad_(False)
    assert compile_blocks(frozen) == 2
    other = ravlt(**stage)
    other.stages[0][1].norm1.eps = 1e-3
    assert compile_blocks(other) == 2
    other = ravlt(**stage)
    other.stages[0][1].position.dilation = (1, 2)
    assert compile_blocks(other) == 2
    other = ravlt(**stage)
    other.stages[0][1].attn.mixer.kernel = 'relu'  # names are settings, too
    assert other.stages[0][0].attn.mixer.kernel != 'relu' and compile_blocks(other) == 2
    other = ravlt(**stage)
    other.stages[0][1].norm1.weight = nn.Parameter(torch.ones(1, 16, dtype=torch.float64))
    other.stages[0][2].norm1.bias = nn.Parameter(torch.ones(16))
    assert compile_blocks(other) == 3
    plain = LinearDeiT(
        dict(embed_dims=(16,), depths=(2,), num_heads=(2,), stage_attns=('softmax',)), drop_path_rate=0.0
    )
    assert compile_blocks(plain) == 1 and all(block._compiled_call_impl for block in plain.blocks)
    one, other = (_call_with_code_of_its_own() for _ in range(2))
    assert one.__code__ is not other.__code__  # PyTorch counts compilations by it
    x = torch.rand(1, 8, 8, 16, dtype=torch.float64)
    block = ravlt(**stage).eval().stages[0][0]
    block._call_impl = lambda *args, **kwargs: (args, kwargs)
    assert one(block, x, a=1) == ((x,), dict(a=1))


@pytest.mark.slow
def test_windows():
    arch = dict(SMALL, depths=(2, 1, 1, 1), window=7, linear_windows=(14, 14, 7, 7), stage_attns=('softmax',) * 4)
    eager = LinearSwin(arch, out_indices=(0,), drop_path_rate=0.0).double()
    compiled = copy.deepcopy(eager)
    kinds = compile_blocks(compiled, backend='aot_eager')
    assert kinds == 2  # one of two blocks shifts its windows
    for size in SIZES[:2]:
        assert_equal_gradients(compiled, eager, size)
