# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every attention of ``mmlinattn.ops`` as a function ``(q, k, v, num_heads, mask=None)``."""

import inspect
from functools import partial

import torch

from helpers.references import FORMS, form  # noqa: F401  the forms they have
from mmlinattn import ops
from mmlinattn.layers import rotary_table


def with_rotary(q, k, v, num_heads, mask=None, op=ops.rala):
    wide = torch.promote_types(q.dtype, torch.float32)  # angles in float32, also for half precision
    return op(q, k, v, num_heads, rotary=rotary_table(1, q.shape[1], q.shape[2] // num_heads, dtype=wide), mask=mask)


def focused(q, k, v, num_heads, mask=None, power=3):
    scale = 0.5 + torch.arange(q.shape[-1]).to(q.dtype) % 3 / 2  # numbers of every type
    return ops.focused_attention(q, k, v, num_heads, scale, power, mask=mask)


def focused_with_positions(q, k, v, num_heads, mask=None):
    scale = torch.ones(q.shape[-1], dtype=q.dtype)
    return ops.focused_attention(q, k, v, num_heads, scale, 3, offset=scale * 0.1, mask=mask)


def without_heads(q, k, v, num_heads, mask=None, op=None):
    return op(q, k, v, mask=mask)


def public_ops():
    """Return the attention functions by name, with default flags and with each flag inverted."""
    found = {}
    for name, op in vars(ops).items():
        parameters = inspect.signature(op).parameters.values() if name.endswith('_attention') else ()
        required = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
        if required in ({'q', 'k', 'v'}, {'q', 'k', 'v', 'num_heads'}):
            name = name.removesuffix('_attention')
            found[name] = op if 'num_heads' in required else partial(without_heads, op=op)
            for flag in parameters:
                if isinstance(flag.default, bool):
                    found[f'{name}, {flag.name}={not flag.default}'] = partial(op, **{flag.name: not flag.default})
    return found


PUBLIC = public_ops()
LINEAR = {
    **{f'rala, {kernel}': partial(ops.rala, kernel=kernel, weight_scale=0.25) for kernel in ('elu', 'relu', 'softmax')},
    'rala without weights': partial(ops.rala, weight_scale=None),
    'rala, rotary': with_rotary,
    **{f'inline, {k}': partial(ops.inline_attention, scale=0.25, kernel=k) for k in ('identity', 'relu', 'exp')},
    **{f'linear, {kernel}': partial(ops.linear_attention, kernel=kernel) for kernel in ('elu', 'relu')},
    **{f'focused, {power}': partial(focused, power=power) for power in (1, 3, 4.5)},
    'focused, positions': focused_with_positions,
    **{name: call for name, call in PUBLIC.items() if name not in ('linear', 'softmax')},
}
ATTENTIONS = {**LINEAR, 'softmax': PUBLIC['softmax'], 'softmax, rotary': partial(with_rotary, op=ops.softmax_attention)}
