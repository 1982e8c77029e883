# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Kernels and memory traffic of linear attentions on a GPU, counted without one.

    python benchmarks/count_traffic.py

The reference: every operation that autograd runs is one kernel, reads its inputs and writes its outputs. The GPU
kernels: what they are started with. Nothing is computed; caches may serve what is read twice. In units of one tensor of
all tokens, (B, N, C).
"""

import argparse
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from mmlinattn.ops.focused import focused_attention_reference  # noqa: E402
from mmlinattn.ops.inline import inline_attention_reference  # noqa: E402
from mmlinattn.ops.plain_linear import linear_attention_reference  # noqa: E402
from mmlinattn.ops.rank_augmented import rala_reference  # noqa: E402
from mmlinattn.ops.triton import attention as triton_attention  # noqa: E402

VIEWS = (
    'view',
    'expand',
    'slice',
    'select',
    'transpose',
    'permute',
    'unsqueeze',
    'squeeze',
    'split',
    'detach',
    't.',
    '_unsafe_view',
    '_reshape',
)
# the fewest tensors of all tokens: q, k, v and the result; those, the gradients of all four
IDEAL = dict(forward=4, backward=7)


def touched(tensors) -> int:
    """Bytes of tensors, each stretch of memory once; what is expanded lies in memory once."""
    seen = {}
    for t in tensors:
        if isinstance(t, Tensor):
            sizes = [n for n, stride in zip(t.shape, t.stride()) if stride]
            seen[id(t)] = torch.Size(sizes).numel() * t.element_size()
    return sum(seen.values())


class Operations(TorchDispatchMode):
    """Counts kernels and bytes of all operations that are not views or allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix('aten::') + '.'
        if not func.is_view and not name.startswith(VIEWS) and not name.startswith(('empty', 'new_empty')):
            self.kernels += 1
            self.bytes += touched(tree_leaves((args, kwargs))) + touched(tree_leaves(out))
        return out


def plain(op, q: Tensor, k: Tensor, v: Tensor, options: dict) -> dict[str, tuple[int, int]]:
    with Operations() as forward:
        out = op(q, k, v, **options)
    with Operations() as backward:
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    return dict(forward=(forward.kernels, forward.bytes), backward=(backward.kernels, backward.bytes))


def kernels(q: Tensor, k: Tensor, v: Tensor, options: dict) -> dict[str, tuple[int, int]]:
    counts = []

    def count(kernel, grid, device, *args, **settings):
        counts.append(touched(args))

    inputs = q, k, v, options.pop('rotary', None), None
    options = dict(dict(kernel='elu', weight_scale=1.0, eps=1e-6), **options)
    with mock.patch.object(triton_attention, 'launch', count):
        out, kept = triton_attention.forward(*inputs, **options)
        forward, counts[:] = list(counts), []
        triton_attention.backward((out,), inputs, kept, (True,) * 3, **options)
    return dict(forward=(len(forward), sum(forward)), backward=(len(counts), sum(counts)))


def cases(batch: int, heads: int, tokens: int, d: int, dtype: torch.dtype):
    """Name, reference with its options, what kernels are given besides or None."""
    rotary = torch.empty(tokens, d // 2, 2, device='meta')
    scale = torch.empty(heads * d, device='meta')
    table = torch.empty(1, tokens, heads * d, dtype=dtype, device='meta')
    yield 'RALA', rala_reference, dict(rotary=rotary), dict(rotary=rotary)
    yield 'InLine', inline_attention_reference, dict(scale=1.0), None
    yield 'focused', focused_attention_reference, dict(inverse_scale=scale, power=3, offset=table), None
    yield 'linear, ELU + 1', linear_attention_reference, dict(kernel='elu'), dict(weight_scale=None)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--heads', type=int, default=16)
    parser.add_argument('--tokens', type=int, default=16384)
    parser.add_argument('--head-dim', type=int, default=64)
    parser.add_argument('--dtype', default='bfloat16', choices=['float32', 'float16', 'bfloat16'])
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    print('| attention | pass | ideal, tensors | reference: kernels | tensors | GPU kernels: kernels | tensors |')
    print('| --- | --- | --- | --- | --- | --- | --- |')
    for name, op, options, given in cases(args.batch, args.heads, args.tokens, args.head_dim, dtype):
        x = torch.empty(args.batch, args.tokens, 3 * args.heads * args.head_dim, dtype=dtype, device='meta')
        q, k, v = x.requires_grad_().chunk(3, dim=-1)
        options = dict(num_heads=args.heads, **options)
        unit = touched([q])
        before = plain(op, q, k, v, options)
        after = given and kernels(*(t.detach() for t in (q, k, v)), dict(num_heads=args.heads, **given))
        for part, ideal in IDEAL.items():
            cells = [f'{c[part][0]} | {c[part][1] / unit:.1f}' if c else '- | -' for c in (before, after)]
            print(f'| {name} | {part} | {ideal} | {" | ".join(cells)} |')


if __name__ == '__main__':
    main()
