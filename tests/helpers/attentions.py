# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every attention of ``mmlinattn.ops`` as a function ``(q, k, v, num_heads, mask=None)``."""

from functools import partial

import torch

from helpers.references import FORMS, form  # noqa: F401  the forms they have
from mmlinattn import ops
from mmlinattn.layers import rotary_table


def with_rotary(q, k, v, num_heads, mask=None, op=ops.rala):
    wide = torch.promote_types(q.dtype, torch.float32)  # angles in float32, also for half precision
    return op(q, k, v, num_heads, rotary=rotary_table(1, q.shape[1], q.shape[2] // num_heads, dtype=wide), mask=mask)


def focused(q, k, v, num_heads, mask=None, power=3, offset=None):
    scale = 0.5 + torch.arange(q.shape[-1]).to(q.dtype) % 3 / 2  # numbers of every type
    offset = offset and scale * offset
    return ops.focused_attention(q, k, v, num_heads, scale, power, offset=offset, mask=mask)


def hydra(q, k, v, num_heads, mask=None):
    return ops.hydra_attention(q, k, v, mask=mask)


LINEAR = {
    **{f'rala, {kernel}': partial(ops.rala, kernel=kernel, weight_scale=0.25) for kernel in ('elu', 'relu', 'softmax')},
    'rala without weights': partial(ops.rala, weight_scale=None),
    'rala, rotary': with_rotary,
    **{f'inline, {k}': partial(ops.inline_attention, scale=0.25, kernel=k) for k in ('identity', 'relu', 'exp')},
    **{f'linear, {kernel}': partial(ops.linear_attention, kernel=kernel) for kernel in ('elu', 'relu')},
    **{f'focused, {power}': partial(focused, power=power) for power in (1, 3, 4.5)},
    'focused, positions': partial(focused, offset=0.1),
    'angular': ops.angular_attention,
    'angular, released=False': partial(ops.angular_attention, released=False),
    'angular, unit_output=False': partial(ops.angular_attention, unit_output=False),
    'efficient': ops.efficient_attention,
    'hydra': hydra,
}
ATTENTIONS = {
    **LINEAR,
    'softmax': ops.softmax_attention,
    'softmax, rotary': partial(with_rotary, op=ops.softmax_attention),
}
