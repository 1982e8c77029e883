# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What attentions are unless told otherwise: the released forms."""

import pytest
import reference
import torch

from mmlinattn import ops
from mmlinattn.attention import AngularMixer, Attention, FocusedMixer, HydraMixer


def test_released_forms_are_the_defaults():
    angular = AngularMixer(8, 2)
    assert (angular.form, angular.conv, angular.sequential) == ('released', 'grid', False)
    assert angular.dconv.weight.shape == (2, 1, 3, 3) and angular.dconv.bias is None
    assert [AngularMixer(8, 2, conv=conv).sequential for conv in ('sequence', None)] == [True, False]
    focused = FocusedMixer(8, 2, grid=(3, 4))
    assert focused.power == 3 and focused.local.weight.shape == (4, 1, 5, 5)
    assert focused.scale.shape == (8,) and not focused.scale.any()  # softplus(0) to begin with
    assert (HydraMixer(8, 2).num_heads, HydraMixer(8, 2).head_dim) == (8, 1)  # as many heads as channels


def test_a_host_gates_those_that_have_no_opinion():
    """RALA without output augmentation (Tab. 9) stays without where the host gates all others."""
    gates = {
        name: Attention(8, 2, mixer, gate='projection').gate
        for name, mixer in dict(none=dict(type='rala', output_gate=None), rala='rala', softmax='softmax').items()
    }
    assert gates == dict(none=None, rala='projection', softmax='projection')
    assert Attention(8, 2, 'softmax').gate is None and Attention(8, 2, 'rala').gate == 'projection'


def eye_map(q, k):
    """Of the released angular attention, before each output is divided by its norm."""
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    return torch.eye(q.shape[2], dtype=q.dtype) / 2 + reference.similarity(q, k) / torch.pi


OPS = {
    'rala': (ops.rala, lambda q, k: reference.rala_map(*(reference.kernel(t, 'elu') for t in (q, k)), None, 1.0, 1e-6)),
    'linear_attention': (ops.linear_attention, lambda q, k: reference.linear_map(q, k, 1e-6)),
    'inline_attention': (lambda *qkv: ops.inline_attention(*qkv, 0.4), lambda q, k: reference.inline_map(q, k, 0.4)),
    'softmax_attention': (ops.softmax_attention, reference.softmax_map),
    'angular_attention': (ops.angular_attention, eye_map),
}


@pytest.mark.parametrize('form', ['auto', 'reference'])
@pytest.mark.parametrize('name', OPS)
def test_ops_unless_told_otherwise(name, form):
    """Also with queries and keys whose products are as small as the 1e-6 that is added to them."""
    op, weights = OPS[name]
    large_q, large_k, v = torch.rand(3, 2, 2, 6, 4, dtype=torch.float64)
    small = (t - 8 if name == 'rala' else t / 1000 for t in (large_q, large_k))
    for q, k in ((large_q, large_k), small):
        expected = weights(q, k) @ v
        if name == 'angular_attention':
            expected = expected / expected.norm(dim=-1, keepdim=True)
        with ops.use(form):
            torch.testing.assert_close(reference.call_by_head(op, q, k, v), expected)


@pytest.mark.parametrize('form', ['auto', 'reference'])
def test_the_focused_floor_unless_told_otherwise(form):
    q, k, v = torch.rand(3, 2, 6, 8, dtype=torch.float64)
    q, k, scale = q / 1000 - 5e-4, k / 1000 - 5e-4, torch.rand(8, dtype=torch.float64)
    heads = [reference.by_head(reference.focused(t, scale, 3, 1e-6), 2) for t in (q, k)]
    expected = reference.side_by_side(reference.linear_map(*heads, 1e-6) @ reference.by_head(v, 2))
    with ops.use(form):
        out = ops.focused_attention(q, k, v, 2, 1 / torch.nn.functional.softplus(scale), 3)
    torch.testing.assert_close(out, expected)
