# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Compiles the kernels for GPUs that need not be there, and prints the shared memory that they take, in bytes a block.

    python tests/ops/compile_kernels.py 90,bfloat16,64,rala

A line has the most that any launch of an op takes, forward or backward, with a mask and all else that it may be given.
"""

import sys
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mmlinattn.ops.triton import attention_launch as launch


class NoGPU:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self):
        return GPUTarget('cuda', self.capability, 32)

    def get_current_device(self):
        return self.capability  # what is compiled is kept by device

    def get_current_stream(self, device):
        return 0


def run_attention(op: str, dtype: torch.dtype, d: int) -> None:
    heads, tokens = 2, 512
    x = torch.empty(2, tokens, 3 * heads * d, dtype=dtype)
    q, k, v = x.chunk(3, dim=-1)
    focused = op == 'focused_attention'
    kernel = {'rala': 'elu', 'inline_attention': 'identity', 'linear_attention': 'relu'}.get(op, 'focused')
    spec = launch.Attention(heads, kernel, op == 'inline_attention', op == 'rala', power=3.0 if focused else 1.0)
    tensors = dict(mask=torch.ones(2, tokens, dtype=torch.bool))
    if op == 'rala':
        tensors['rotary'] = torch.empty(tokens, d // 2, 2)
    if focused:
        tensors['scale'] = torch.empty(heads * d)
        tensors['offset'] = torch.empty(1, tokens, heads * d, dtype=dtype).expand(2, -1, -1)
    out, saved = launch.forward(spec, q, k, v, **tensors)
    launch.backward(spec, out, q, k, v, saved, x.chunk(3, dim=-1), **tensors)


def shared_memory(capability: str, dtype: str, width: str, op: str) -> int:
    """``width`` is that of heads."""
    driver.set_active(NoGPU(int(capability)))
    found = []

    def compiled(kernel, grid, device, *args, **settings):
        found.append(kernel.warmup(*args, grid=grid, **settings).metadata.shared)

    with mock.patch.object(launch, 'launch', compiled):
        run_attention(op, getattr(torch, dtype), int(width))
    return max(found)


if __name__ == '__main__':
    for row in sys.argv[1:]:
        print(row, shared_memory(*row.split(',')))
