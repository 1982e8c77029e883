# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The trial of one kernel: a small input beside the plain form in float64, forward and backward, twice.

The tokens are an odd number in more spans than are added up at once, slices of a projection, one image of them nothing
but padding where there is a mask. Around the input lies NaN, in and around what kernels write, too.

    python -m mmlinattn.ops.triton.trial

answers the requests of :mod:`.canary`, one a line of standard input.
"""

import json
import math
import os
import select
import sys
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from . import attention_launch, attention_op, canary, depthwise_op
from .attention_launch import Attention
from .spot_check import BOUNDS, deviation

TOKENS = 4201
HEIGHT, WIDTH = 29, 37
GUARD = 4096  # elements before and after what kernels write
SECONDS_IDLE = 60


@torch.inference_mode(False)
@torch.enable_grad()
def trial(variant: NamedTuple) -> dict[str, Any]:
    """What is wrong with a kernel, for each direction, empty where nothing is; the largest of each one's
    ``deviations``.

    Args:
        variant (NamedTuple): :class:`.attention_op.Variant` or :class:`.depthwise_op.Variant`, its device included.
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

    parts = _attention if isinstance(variant, attention_op.Variant) else _convolution
    guards = mock.patch.object(attention_launch, 'empty', guarded)
    fresh = mock.patch.multiple(canary, trusts=True, _verdicts={})
    try:
        with torch.autocast(variant.device.type, enabled=False), guards, fresh:
            generator = torch.Generator().manual_seed(0)
            kernel, plain, leaves = parts(variant, generator)
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


def _surrounded(x: Tensor, guard: int, aligned: bool) -> Tensor:
    """``x`` (B, N, C) as a slice of larger tokens, with NaN around."""
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
    leaves = [_surrounded(x.to(device, variant.dtype), 64, variant.aligned)]
    if variant.map == 'focused':
        leaves.append((torch.rand(widths[0], generator=generator) + 0.5).to(device).requires_grad_())

    def kernel(x, scale=None):
        return run.by_kernels(spec, *x.split(widths, dim=-1), rotary, mask, offset, scale)

    def plain(x, scale=None):
        q, k, v = x.split(widths, dim=-1)
        v = v if mask is None else v * mask.unsqueeze(-1)  # whose hidden values get no gradient
        return run.plain(spec, q, k, v, rotary, mask, offset, scale)

    return kernel, plain, leaves


def _convolution(variant, generator):
    batch, channels, size = 2, 96 if variant.aligned else 70, variant.size
    to = dict(device=variant.device, dtype=variant.dtype)
    each = not (variant.biased or variant.residual)
    x = torch.randn(batch, HEIGHT * WIDTH, channels, generator=generator).to(**to)
    leaves = [_surrounded(x, 4 * WIDTH, variant.aligned)]
    leaves.append(torch.randn(1, channels, size, size, generator=generator).to(**to).requires_grad_())
    if variant.biased:
        leaves.append(torch.randn(channels, generator=generator).to(**to).requires_grad_())
    if each:  # kernels of each image's own are the same binary
        leaves.append(torch.randn(batch, channels, size, size, generator=generator).to(**to).requires_grad_())

    def call(function):
        def called(x, weight, more=None):
            x = x.unflatten(1, (HEIGHT, WIDTH)).permute(0, 3, 1, 2)
            out = function(x, weight, None if each else more, variant.residual, False)
            out = torch.cat([out, function(x, more, None, False, False)]) if each else out
            return out.permute(0, 2, 3, 1)

        return called

    return call(depthwise_op.op), call(depthwise_op._plain), leaves


def variant_of(name: str, device: torch.device) -> NamedTuple:
    """Back from :func:`.canary.name_of`."""
    fields = json.loads(name)
    fields['dtype'] = getattr(torch, fields['dtype'])
    kind = attention_op.Variant if fields['op'] in attention_op.OPS else depthwise_op.Variant
    return kind(**fields, device=device)


def serve() -> None:
    """Answer requests, until there are no more or none comes for a while."""
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # what else is printed is no answer
    while select.select([sys.stdin], [], [], SECONDS_IDLE)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        device = torch.device(request['device'])
        try:
            torch.ones(1, device=device).item()
        except RuntimeError as error:
            answer = dict(unavailable=str(error))
        else:
            answer = trial(variant_of(request['name'], device))
        print(json.dumps(answer), file=answers, flush=True)
        if any(answer.get(key) for key in ('unavailable', *canary.DIRECTIONS)):
            return  # an illegal access leaves a GPU unusable to its process


if __name__ == '__main__':
    from mmlinattn.ops.triton import attention, trial  # the former registers the ops

    assert attention
    trial.serve()
