# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Count denormal numbers in all ops. Many CPUs compute with them a hundred times slower."""

import re
from functools import partial

import pytest
import torch
from helpers.attentions import LINEAR, focused, form
from torch.utils._python_dispatch import TorchDispatchMode

from mmlinattn.ops import dispatch

pytestmark = pytest.mark.usefixtures('fast_forms')
VIEWS = r'aten.(empty|new_empty|as_strided|alias|view|_unsafe_view|transpose|permute|select|slice|expand|detach|unbind)'
DIM, TOKENS = 64, 200


class Denormals(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                small = (tensor != 0) & (tensor.abs() < torch.finfo(torch.float32).tiny)
                # memory that was only reserved, and views of it, hold anything
                if small.any() and not re.search(VIEWS, str(func)):
                    self.found[str(func)] = self.found.get(str(func), 0) + int(small.sum())
        return out


CALLS = {f'focused, {power}': partial(focused, power=power) for power in (1, 1.5, 2, 3, 5.5, 8, 32)}
CALLS.update({name: call for name, call in LINEAR.items() if name.startswith(('rala', 'inline', 'linear'))})


@pytest.mark.parametrize('which', ['auto', 'reference'])  # GPUs compute with denormal numbers at full speed
@pytest.mark.parametrize('name', CALLS)
def test_linear_attentions(name, which, monkeypatch):
    """Train and infer with tokens like those of trained networks, some of them of nearly no weight."""
    if which != 'reference':  # dispatch modes get the reference otherwise
        monkeypatch.setattr(dispatch, 'needs_reference', lambda *tensors: False)
    q, k, v = torch.randn(3, 2, TOKENS, DIM)
    q[..., :5] = k[..., 2:9] = -1
    q[:, 3] = k[:, 4] = -2
    q[:, 5] *= 100
    k[:, 6:56] *= torch.linspace(50, 1, 50).unsqueeze(-1)
    op, leaves = partial(CALLS[name], num_heads=2), [t.contiguous().requires_grad_() for t in (q, k, v)]
    with form(which), Denormals() as denormals:
        out = op(*leaves)
        out.backward(torch.randn_like(out))
        if which != 'reference':
            with torch.no_grad():
                op(*(leaf.clone() for leaf in leaves))
    assert out.isfinite().all()
    # of 150,000 and more: a power of 32 passes through the range now and then
    assert sum(denormals.found.values()) < (200 if 'focused' in name else 1)
