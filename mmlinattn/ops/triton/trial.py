# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The trial of one kernel: a small input beside the plain form in float64, forward and backward, twice.

The tokens are an odd number in more spans than are added up at once, slices of a projection, one image of them nothing
but padding where there is a mask. Around the input lies NaN, in and around what kernels write, too.

    python -m mmlinattn.ops.triton.trial NAME DEVICE

tries what :func:`.canary.name_of` names, and prints what it found as JSON.
"""

import json
import math
import sys
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from . import attention_launch, attention_op, canary
from .attention_launch import Attention
from .canary import BOUNDS, deviation

TOKENS = 4201
GUARD = 4096  # elements before and after what kernels write


@torch.inference_mode(False)
@torch.enable_grad()
def trial(variant: NamedTuple) -> dict[str, Any]:
    """What is wrong with a kernel, for each direction, empty where nothing is; the largest of each one's
    ``deviations``.

    Args:
        variant (NamedTuple): :class:`.attention_op.Variant`.
    """
    deviations: dict[str, float] = {}
    answer: dict[str, Any] = dict(forward='', backward='', deviations=deviations)
    direction, bound = 'forward', BOUNDS[variant.dtype]
    bands: list[Tensor] = []

    def guarded(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape)
        memory = torch.full((size + 2 * GUARD,), math.nan, dtype=dtype, device=device)
        bands.extend((memory[:GUARD], memory[GUARD + size :]))
        return memory[GUARD : GUARD + size].view(shape)

    def check(runs, expected):
        if any(not band.isnan().all() for band in bands):
            return 'it writes where it has nothing to write'
        fault, deviations[direction] = _compared(*runs, expected, bound)
        return fault

    guards = mock.patch.object(attention_launch, 'empty', guarded)
    fresh = mock.patch.multiple(canary, trusts=True, _verdicts={})
    try:
        with torch.autocast(variant.device.type, enabled=False), guards, fresh:
            generator = torch.Generator().manual_seed(0)
            kernel, plain, leaves = _attention(variant, generator)
            wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
            outs, expected = [kernel(*leaves) for _ in range(2)], plain(*wide)
            answer['forward'] = answer['backward'] = check([[out] for out in outs], [expected])
            if answer['forward']:
                return answer
            direction = 'backward'
            probe = torch.randn(expected.shape, generator=generator).to(outs[0])
            grads = [torch.autograd.grad(out, leaves, probe) for out in outs]
            answer['backward'] = check(grads, torch.autograd.grad(expected, wide, probe.double()))
            if canary._verdicts:
                answer['backward'] = 'it does not compile'
    except Exception as error:
        answer['backward'] = answer[direction] = f'{type(error).__name__}: {error}'
    return answer


def _compared(first, second, expected, bound: float) -> tuple[str, float]:
    """What is wrong, and the largest deviation."""
    largest = 0.0
    for ours, again, theirs in zip(first, second, expected):
        if not ours.isfinite().all():
            return 'not all of its results are finite', math.inf
        if not torch.equal(ours, again):
            return 'two runs differ', math.inf
        largest = max(largest, deviation([ours], [theirs]))
    return '' if largest < bound else f'it deviates by {largest:.1g}, where {bound:.1g} is allowed', largest


def _surrounded(x: Tensor, aligned: bool) -> Tensor:
    """``x`` (B, N, C) as a slice of larger tokens, with NaN around."""
    guard = 64  # tokens
    width = -(-x.shape[-1] // 16) * 16 + (0 if aligned else 1)
    memory = torch.full((len(x), x.shape[1] + 2 * guard, width), math.nan, dtype=x.dtype, device=x.device)
    inside = memory[:, guard : guard + x.shape[1], : x.shape[-1]]
    inside.copy_(x)
    return inside.requires_grad_()


def _attention(variant, generator):
    """Kernel, plain form, and leaves of an attention."""
    run, (batch, heads, tokens) = attention_op.OPS[variant.op], (3, 2, TOKENS)
    d, e, device = variant.d, variant.e, variant.device
    widths = [heads * d, heads * d, heads * e]
    divides = variant.op != 'inline_attention'
    # of maps with negative results the normaliser may vanish
    eps = d / 2 if variant.map in ('identity', 'leakyrelu') and divides else 1e-6
    spec = Attention(heads, variant.map, not divides, variant.weighted, d**-0.5, eps, variant.power)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    x = random(batch, tokens, sum(widths))
    x[..., : 2 * widths[0]] = x[..., : 2 * widths[0]] * 0.7 + 0.4
    mask = rotary = offset = None
    if variant.masked:
        mask = torch.rand(batch, tokens, generator=generator) > 0.3
        mask[1, tokens // 2 :], mask[2] = False, False
        x[..., -widths[2] :][~mask] = 0
        mask = mask.to(device)
    if variant.rotary:
        angle = random(tokens, d // 2)
        rotary = torch.stack((angle.cos(), angle.sin()), dim=-1).to(device)
    if variant.offset:
        offset = (0.3 * random(1, tokens, widths[0])).to(device).expand(batch, -1, -1)
    leaves = [_surrounded(x.to(device, variant.dtype), variant.aligned)]
    if variant.map == 'focused':
        leaves.append((torch.rand(widths[0], generator=generator) + 0.5).to(device).requires_grad_())

    def kernel(x, scale=None):
        return run.by_kernels(spec, *x.split(widths, dim=-1), rotary, mask, offset, scale)

    def plain(x, scale=None):
        q, k, v = x.split(widths, dim=-1)
        v = v if mask is None else v * mask.unsqueeze(-1)  # whose hidden values get no gradient
        return run.plain(spec, q, k, v, rotary, mask, offset, scale)

    return kernel, plain, leaves


def variant_of(name: str, device: torch.device) -> NamedTuple:
    """Back from :func:`.canary.name_of`."""
    fields = json.loads(name)
    fields['dtype'] = getattr(torch, fields['dtype'])
    return attention_op.Variant(**fields, device=device)


if __name__ == '__main__':
    # not of this module, which was imported under another name
    from mmlinattn.ops.triton import attention, trial

    assert attention  # registers the ops
    name, device = sys.argv[1:]
    print(json.dumps(trial.trial(trial.variant_of(name, torch.device(device)))))
