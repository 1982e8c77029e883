# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Whether this machine's float32 matrix products are faster by oneDNN or by PyTorch's own library (MKL, OpenBLAS).

On Intel cores both are alike, and PyTorch's own calls cost less; on AMD cores MKL runs at half of oneDNN's rate. So it
is measured: once a process and number of threads, at the first product that asks, in some 20 ms. The environment
variable ``MMLINATTN_PRODUCTS`` (``auto``, ``torch``, ``onednn``) says it without measuring. Results differ by rounding
only: 1e-5 relative to the largest.
"""

import functools
import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from . import private

VARIABLE = 'MMLINATTN_PRODUCTS'
CHOICES = ('auto', 'torch', 'onednn')
_ROUNDS = 4
_GAIN = 1.25  # oneDNN has to be as much faster: its calls from Python cost more


def prefers_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether ``product`` is the faster way to multiply these two matrices.

    Raises:
        ValueError: For an unknown value of ``MMLINATTN_PRODUCTS``.
    """
    if a.dtype != torch.float32 or not private.onednn_takes(a, b):
        return False
    choice = os.environ.get(VARIABLE, '') or 'auto'
    if choice not in CHOICES:
        raise ValueError(f'{VARIABLE}={choice!r} has to be one of {CHOICES}')
    return choice == 'onednn' or (choice == 'auto' and _onednn_is_faster(torch.get_num_threads()))


@functools.cache
def _onednn_is_faster(threads: int) -> bool:
    with torch.inference_mode(), torch.autocast('cpu', enabled=False):
        # a product of a projection, as large as a thread does in a millisecond
        a = torch.full((512 * threads, 256), 0.5)
        b = torch.full((512, 256), 0.5)
        seconds: dict = {F.linear: [], product: []}
        for _ in range(_ROUNDS):  # in turns, so that a busy machine disturbs both alike
            for function, times in seconds.items():
                start = time.perf_counter()
                function(a, b)
                times.append(time.perf_counter() - start)
    return min(seconds[product][1:]) * _GAIN < min(seconds[F.linear][1:])


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of (..., K) and (N, K) by oneDNN. It copies an ``a`` with gaps; on such a ``b`` it is a
    thousand times slower, so that it is copied here."""
    return private.LINEAR(a, b if b.is_contiguous() or b.T.is_contiguous() else b.contiguous(), None, 'none', [], '')
