# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Compiles the kernels for GPUs that need not be there, and prints what they take of them, as CSV.

    python tests/ops/compile_kernels.py 90,bfloat16,64,rala,all    # rows, with all flags or none
    python tests/ops/compile_kernels.py    # every row there is: half an hour of two cores

A row has the most that any launch of an op, forward or backward, takes: registers and bytes of spilled registers a
thread, shared memory a block.
"""

import csv
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mmlinattn.ops.triton import attention_launch as launch
from mmlinattn.ops.triton import compat

KEYS = ('capability', 'dtype', 'width', 'op', 'flags')
FIELDS = (*KEYS, 'registers', 'stack', 'shared', 'triton')
CAPABILITIES = (80, 86, 89, 90, 100, 120)
WIDTHS = (16, 24, 32, 48, 64, 96, 128)
OPS = ('rala', 'inline_attention', 'linear_attention', 'focused_attention')


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


def resources(kernel, grid, device, *args, **settings) -> dict:
    compiled = kernel.warmup(*args, grid=grid, **settings)
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        tool = Path(nvidia.__file__).parent / 'bin' / 'cuobjdump'
        usage = subprocess.run([tool, '-res-usage', file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf'{field}:(\d+)', usage)[1]) for field in ('REG', 'STACK'))
    return dict(registers=registers, stack=stack, shared=compiled.metadata.shared)


def run_attention(op: str, dtype: torch.dtype, d: int, plain: bool) -> None:
    heads, tokens = 2, 512
    x = torch.empty(2, tokens, 3 * heads * d, dtype=dtype)
    q, k, v = x.chunk(3, dim=-1)
    focused = op == 'focused_attention'
    kernel = {'rala': 'elu', 'inline_attention': 'identity', 'linear_attention': 'relu'}.get(op, 'focused')
    spec = launch.Attention(heads, kernel, op == 'inline_attention', op == 'rala', power=3.0 if focused else 1.0)
    tensors = dict(scale=torch.empty(heads * d)) if focused else {}
    if not plain:
        tensors['mask'] = torch.ones(2, tokens, dtype=torch.bool)
        if op == 'rala':
            tensors['rotary'] = torch.empty(tokens, d // 2, 2)
        if focused:
            tensors['offset'] = torch.empty(1, tokens, heads * d, dtype=dtype).expand(2, -1, -1)
    out, saved = launch.forward(spec, q, k, v, **tensors)
    launch.backward(spec, out, q, k, v, saved, x.chunk(3, dim=-1), **tensors)


def compiled(capability: int, dtype: str, width: int, op: str, flags: str) -> dict:
    """The row of an op; ``width`` is that of heads."""
    driver.set_active(NoGPU(capability))
    found = []

    def launched(*args, **settings):
        found.append(resources(*args, **settings))

    with mock.patch.object(launch, 'launch', launched):
        run_attention(op, getattr(torch, dtype), width, flags == 'none')
    most = {key: max(each[key] for each in found) for key in ('registers', 'stack', 'shared')}
    return dict(zip(KEYS, (capability, dtype, width, op, flags)), **most, triton=triton.__version__)


def every_row():
    for capability, dtype, op in itertools.product(CAPABILITIES, ('bfloat16', 'float16', 'float32'), OPS):
        widths, flags = [d for d in WIDTHS if d <= launch.WIDEST_HEAD[getattr(torch, dtype)]], ('all', 'none')
        for width, flag in itertools.product(widths, flags):
            yield capability, dtype, width, op, flag


def main() -> None:
    assert not compat.INTERPRETED
    writer = csv.DictWriter(sys.stdout, FIELDS, lineterminator='\n')
    writer.writeheader()
    for capability, dtype, width, op, flags in [row.split(',') for row in sys.argv[1:]] or every_row():
        writer.writerow(compiled(int(capability), dtype, int(width), op, flags))
        sys.stdout.flush()


if __name__ == '__main__':
    main()
