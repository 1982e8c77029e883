# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Arithmetic of sizes. Graphs of dynamic shape: tests/tooling/export/test_graphs_at_other_sizes.py."""

from functools import partial

import pytest
import torch
from helpers.attentions import ATTENTIONS, FORMS, form
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mmlinattn import ops
from mmlinattn.ops import tokens
from mmlinattn.ops.tokens import Grid
from mmlinattn.utils import private_apis


@pytest.mark.parametrize('old', [False, True])
def test_numbers_are_known_and_tensors_are_not(old, monkeypatch):
    """Include PyTorch before 2.5, for which each type is checked."""
    if old:
        monkeypatch.delattr(private_apis.symbolic_shapes, 'has_static_value', raising=False)
    assert tokens.is_known() and tokens.is_known(3) and tokens.is_known(3, 4)
    for unknown in ((torch.tensor(3),), (3, torch.tensor(4)), (torch.tensor(4), 3)):
        assert not tokens.is_known(*unknown)


@pytest.mark.parametrize(('least', 'copied'), [(1, True), (2, False)])
def test_dynamic_shapes_that_may_be_one_are_copied(least, copied):
    """Expect a contiguous copy, or the strides of the tensor."""
    environment = ShapeEnv()
    height = environment.create_unbacked_symint()
    torch._check(height >= least)
    with FakeTensorMode(shape_env=environment):
        x = torch.empty(height, 4, 3).transpose(1, 2)
        found = tokens.clone_if_dynamic(x)
    assert (found is not x) is copied and found.stride() == ((12, 4, 1) if copied else (12, 1, 3))


def hallucinated(q, k, v, num_heads, mask=None, grid=None):
    half = q.shape[-1] // 2
    kernels = torch.ones(num_heads // 2, 3, 3, dtype=q.dtype), torch.ones(2 * (num_heads // 2,), dtype=q.dtype)
    grid = grid or Grid(1, k.shape[1])
    return ops.hallucinated_attention(q[..., :half], k[..., :half], v, num_heads, grid, *kernels, mask=mask)


EVERY = dict(ATTENTIONS, hallucinated=hallucinated, **{'hallucinated, no row': partial(hallucinated, grid=Grid(0, 5))})


@pytest.mark.parametrize('which', FORMS)
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('name', EVERY)
def test_no_tokens_give_an_empty_result(name, dtype, which):
    x = torch.zeros(2, 0, 8, dtype=dtype, requires_grad=True)
    for mask in (None, torch.ones(2, 0, dtype=torch.bool)):
        with form(which):
            out = EVERY[name](x, x, x, 2, mask=mask)
            out.sum().backward()
            with torch.no_grad():
                assert EVERY[name](x, x, x, 2, mask=mask).shape == out.shape == x.grad.shape == (2, 0, 8)


@pytest.mark.parametrize('name', [name for name in EVERY if 'no row' not in name])
def test_traced_graphs_have_no_number_of_the_default_type(name):
    q, k, v = torch.randn(3, 2, 12, 8, dtype=torch.float64)
    expected = EVERY[name](q, k, v, 2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        graph = torch.jit.trace(lambda *tokens: EVERY[name](*tokens, 2), (q, k, v), check_trace=False)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(graph(q, k, v), expected)
