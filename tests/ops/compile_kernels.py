# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Compiles the attention kernels for a GPU that need not be there, and prints what they take of it.

    python tests/ops/compile_kernels.py --capability 90 --dtype bfloat16 --head-dim 64

One line a kernel: name, bytes of shared memory, registers a thread, bytes of stack (spilled registers).
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import torch
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mmlinattn.ops.triton import attention_launch as launch
from mmlinattn.ops.triton import compat


class NoGPU:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self):
        return GPUTarget('cuda', self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_kernel(kernel, grid, device, *args, **settings) -> None:
    compiled = kernel.warmup(*args, grid=grid, **settings)
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        tool = Path(nvidia.__file__).parent / 'bin' / 'cuobjdump'
        usage = subprocess.run([tool, '-res-usage', file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (re.search(rf'{field}:(\d+)', usage)[1] for field in ('REG', 'STACK'))
    print(kernel.__name__, compiled.metadata.shared, registers, stack, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--capability', type=int, default=90)
    parser.add_argument('--dtype', default='bfloat16')
    parser.add_argument('--head-dim', type=int, default=64)
    parser.add_argument('--only', nargs='+', default=['rala', 'inline', 'focused'])
    args = parser.parse_args()
    assert not compat.INTERPRETED
    driver.set_active(NoGPU(args.capability))
    heads, tokens, d = 2, 512, args.head_dim
    x = torch.empty(2, tokens, 3 * heads * d, dtype=getattr(torch, args.dtype))
    q, k, v = x.chunk(3, dim=-1)
    table = torch.empty(1, tokens, heads * d, dtype=x.dtype).expand(2, -1, -1)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    cases = dict(
        rala=(launch.Attention(heads, 'elu', weighted=True), dict(rotary=torch.empty(tokens, d // 2, 2), mask=mask)),
        inline=(launch.Attention(heads, 'identity', centred=True), {}),
        focused=(launch.Attention(heads, 'focused', power=3.0), dict(offset=table, scale=torch.empty(heads * d))),
    )
    with mock.patch.object(launch, 'launch', compile_kernel):
        for name in args.only:
            spec, tensors = cases[name]
            out, saved = launch.forward(spec, q, k, v, **tensors)
            launch.backward(spec, out, q, k, v, saved, x.chunk(3, dim=-1), **tensors)


if __name__ == '__main__':
    main()
