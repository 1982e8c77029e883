# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Compiles the kernels for GPUs that need not be there. A line for each, with the most of any launch of an op, forward
and backward, with a mask and a rotation: registers a thread, spilled bytes, bytes of shared memory a block, and
instructions that hide NaN.

    python tests/ops/compile_kernels.py 90,bfloat16,64,rala
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mmlinattn.ops.triton import attention

BIN = Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin'
REDUCES_LOGITS = ('sum_keys',)  # the weights of a NaN are NaN, whichever logit is the largest


class NoGPU:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self):
        return GPUTarget('cuda', self.capability, 32)

    def get_current_device(self):
        return self.capability  # compiled kernels are cached by device

    def get_current_stream(self, device):
        return 0


def run_attention(op: str, dtype: torch.dtype, d: int) -> None:
    heads, tokens = 2, 512
    x = torch.empty(2, tokens, 3 * heads * d, dtype=dtype)
    q, k, v = x.chunk(3, dim=-1)
    rotary = torch.empty(tokens, d // 2, 2) if op == 'rala' else None
    inputs = q, k, v, rotary, torch.ones(2, tokens, dtype=torch.bool)
    weighted = 1.0 if op == 'rala' else None
    options = dict(num_heads=heads, kernel='elu' if op == 'rala' else 'relu', weight_scale=weighted, eps=1e-6)
    out, kept = attention.forward(*inputs, **options)
    attention.backward((out,), inputs, kept, (True,) * 3, **options)


def registers_and_spills(ptx: str, capability: int) -> tuple[int, int]:
    architecture = f'sm_{capability}' + ('a' if capability >= 90 else '')
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / 'kernel.ptx'
        source.write_text(ptx)
        ptxas = BIN / ('ptxas-blackwell' if capability >= 100 else 'ptxas')
        command = [
            ptxas if ptxas.exists() else BIN / 'ptxas',
            '-v',
            f'--gpu-name={architecture}',
            source,
            '-o',
            Path(folder) / 'kernel.cubin',
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r'Used (\d+) registers', said)[1]), sum(map(int, re.findall(r'(\d+) bytes spill', said)))


def compiled(capability: str, dtype: str, width: str, op: str) -> str:
    """``width`` is that of heads."""
    driver.set_active(NoGPU(int(capability)))
    found = []

    def keep(kernel, grid, device, *args, **settings):
        made = kernel.warmup(*args, grid=grid, **settings)
        hides = (
            0
            if kernel.__name__ in REDUCES_LOGITS
            else len(re.findall(r'\b(?:min|max)\.(?:ftz\.)?f32', made.asm['ptx']))
        )
        found.append((*registers_and_spills(made.asm['ptx'], int(capability)), made.metadata.shared, hides))

    with mock.patch.object(attention, 'launch', keep):
        run_attention(op, getattr(torch, dtype), int(width))
    return ' '.join(str(max(column)) for column in zip(*found))


if __name__ == '__main__':
    for row in sys.argv[1:]:
        print(row, compiled(*row.split(',')), flush=True)
