# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Memory that a training step keeps, and the number of its operations, counted without a GPU.

    python benchmarks/count_traffic.py

``reference``: the equations as autograd runs them (``MMLINATTN_OPS=reference``). ``CPU``: what a CPU runs.
``elsewhere``: what a GPU and every other device runs. ``kernels``: ``MMLINATTN_OPS=triton``.

Kept: what the backward pass reads besides queries, keys, values and tables that are given, in tensors of the queries'
size; of a model, in MB.
Launches: operations that are no views and reserve no memory, each of which is a kernel on a GPU.
"""

import argparse
import contextlib
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from mmengine.registry import MODELS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import mmlinattn  # noqa: E402, F401
from mmlinattn import ops  # noqa: E402
from mmlinattn.utils import private_apis  # noqa: E402

NO_KERNELS = 'view alias as_strided _unsafe_view _reshape detach t. empty new_empty'.split()  # besides views
FORMS = ('reference', 'CPU', 'elsewhere')
MODELS_OF = {
    'RAVLT-T': dict(type='RAVLT', arch='tiny'),
    'fully linear': dict(type='RAVLT', arch='tiny', stage_attns=('rala',) * 4),
    'InLine-Swin-T': dict(type='LinearSwin', arch='inline-tiny'),
    'FLatten-Swin-T': dict(type='LinearSwin', arch='flatten-tiny'),
}


class Launches(TorchDispatchMode):
    """Counts operations; what chooses an op's form does not see that it is watched."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix('aten::') + '.'
        self.count += not func.is_view and not name.startswith(tuple(NO_KERNELS))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def form(name: str):
    with (
        ops.use('reference' if name == 'reference' else 'auto'),
        mock.patch.object(private_apis, 'num_modes', lambda: 0),
    ):
        with ops.dispatch.as_on_gpu() if name == 'elsewhere' else contextlib.nullcontext():
            yield


def kept(function, *leaves: Tensor, own=()):
    """The result, and bytes that its backward pass keeps besides the leaves and what is there anyway."""
    storages, given = {}, {t.untyped_storage().data_ptr() for t in (*leaves, *own)}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = function(*leaves)
    return out, sum(size for place, size in storages.items() if place not in given)


def launches(function, leaves) -> tuple[int, int]:
    """Forward and backward."""
    with Launches() as forward:
        out = function(*leaves)
    with Launches() as backward:
        torch.autograd.backward(out, torch.ones_like(out))
    return forward.count, backward.count


def attentions(tokens: int, width: int, heads: int) -> tuple[dict, list[Tensor]]:
    """And the tables that they are given."""
    rotary = ops.rotary_table(1, tokens, width // heads)
    scale, offset = torch.rand(width) + 0.5, torch.randn(1, tokens, width)
    calls = {
        'RALA': partial(ops.rala, num_heads=heads, rotary=rotary),
        'InLine': partial(ops.inline_attention, num_heads=heads, scale=0.125),
        'focused': partial(ops.focused_attention, num_heads=heads, inverse_scale=scale, power=3, offset=offset),
        'linear, ELU': partial(ops.linear_attention, num_heads=heads, kernel='elu'),
        'angular': partial(ops.angular_attention, num_heads=heads),
        'efficient': partial(ops.efficient_attention, num_heads=heads),
        'Hydra': lambda q, k, v: ops.hydra_attention(q, k, v),
    }
    return calls, [rotary, scale, offset]


def count_attentions(batch: int, tokens: int, width: int, heads: int, dtype: torch.dtype) -> None:
    print(f'| {str(dtype)[6:]} | ' + ' | '.join(f'{name}: kept | launches, backward' for name in FORMS) + ' |')
    print('| --- |' + ' --- |' * 2 * len(FORMS))
    calls, tables = attentions(tokens, width, heads)
    for name, function in calls.items():
        cells = []
        for each in FORMS:
            x = torch.randn(batch, tokens, 3 * width).to(dtype).requires_grad_()
            parts = x.chunk(3, dim=-1)
            with form(each):
                size = kept(function, *parts, own=tables)[1] / (batch * tokens * width * dtype.itemsize)
                forward, backward = launches(function, parts)
            cells.append(f'{size:.2f} | {forward}, {backward}')
        print(f'| {name} | {" | ".join(cells)} |', flush=True)


def count_models(side: int, batch: int, autocast: bool) -> None:
    kind = 'bfloat16 autocast' if autocast else 'float32'
    print(f'| {kind}, {side}x{side} | ' + ' | '.join(f'{name}: MB | launches, backward' for name in FORMS) + ' |')
    print('| --- |' + ' --- |' * 2 * len(FORMS))
    for name, config in MODELS_OF.items():
        torch.manual_seed(0)
        model = MODELS.build(dict(config, drop_path_rate=0.0)).train()
        images = torch.randn(batch, 3, side, side)
        parameters = list(model.parameters())

        def step(*_, model=model, images=images):
            with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
                return sum(out.float().square().mean() for out in model(images))

        cells = []
        for each in FORMS:
            model.zero_grad()  # to add up gradients of several forms would count as launches
            # CPUs without units for bfloat16 leave autocast, which GPUs do not
            with form(each), mock.patch.object(private_apis, 'has_bfloat16_units', lambda: True):
                size = kept(step, images, *parameters)[1]
                forward, backward = launches(step, parameters)
            cells.append(f'{size / 1e6:.0f} | {forward}, {backward}')
        print(f'| {name} | {" | ".join(cells)} |', flush=True)


def count_kernels(batch: int, heads: int, tokens: int, d: int) -> None:
    """Launches of the Triton kernels and what they are started with, in tensors of (B, N, C); nothing is computed. The
    sums of spans by PyTorch, of small tensors, come on top."""
    from mmlinattn.ops.triton import attention

    def touched(tensors) -> int:
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))

    x = torch.empty(batch, tokens, 3 * heads * d, dtype=torch.bfloat16, device='meta')
    q, k, v = x.chunk(3, dim=-1)
    rotary, unit = torch.empty(tokens, d // 2, 2, device='meta'), touched([q])
    print('| kernels, bfloat16 | forward: launches | read and written | backward: launches | read and written |')
    print('| --- | --- | --- | --- | --- |')
    for name, table, scale in (('RALA', rotary, 1.0), ('linear', None, None)):
        started: list[int] = []
        with mock.patch.object(attention, 'launch', lambda *args, seen=started, **more: seen.append(touched(args))):
            options = dict(num_heads=heads, kernel='elu', weight_scale=scale, eps=1e-6)
            out, small = attention.forward(q, k, v, table, None, **options)
            forward = list(started)
            attention.backward((out,), (q, k, v, table, None), small, (True,) * 3, **options)
        cells = [f'{len(part)} | {sum(part) / unit:.1f}' for part in (forward, started[len(forward) :])]
        print(f'| {name} | {" | ".join(cells)} |')


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--batch', type=int, default=2)
    parser.add_argument('--heads', type=int, default=4)
    parser.add_argument('--tokens', type=int, default=4096)
    parser.add_argument('--head-dim', type=int, default=64)
    parser.add_argument('--side', type=int, default=224, help='of the images, pixels; 0 leaves models out')
    parser.add_argument('--no-kernels', dest='kernels', action='store_false', help='for environments without Triton')
    args = parser.parse_args(argv)
    for dtype in (torch.float32, torch.bfloat16):
        count_attentions(args.batch, args.tokens, args.heads * args.head_dim, args.heads, dtype)
    if args.kernels:
        count_kernels(8, 16, 16384, 64)
    for autocast in (False, True) if args.side else ():
        count_models(args.side, args.batch, autocast)


if __name__ == '__main__':
    main()
