# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Which backend runs an op. Ops and ``inference`` ask here for device, grad mode, autocast and
tracing; mixers, layers and hosts never do.

Every op is one file with its equation in plain PyTorch and, where that keeps or copies much, a form with a gradient
written by hand for every device. What only CPUs gain from is chosen inside (:func:`on_cpu`). The public function of the
file asks once and calls one of them, or the kernels in :mod:`.triton` where they are asked for.
"""

import contextlib
import functools
import importlib.util
import os
import warnings
from typing import Optional

import torch
from torch import Tensor, nn

from ..utils import private_apis

VARIABLE = 'MMLINATTN_OPS'
CHOICES = ('auto', 'triton', 'reference')


def _checked(choice: str, argument: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f'{argument}={choice!r} has to be one of {CHOICES}')
    return choice


_as_on_gpu = False
_choice = _checked(os.environ.get(VARIABLE, '') or 'auto', VARIABLE)


@contextlib.contextmanager
def use(backend: str):
    """A context that chooses the backend of every op.

    Args:
        backend (str): ``'auto'``, PyTorch's operators with gradients written by hand; ``'triton'``, Triton kernels for
            RALA and linear attention (ELU, ReLU) on GPUs of compute capability 8.0 or newer, and a warning where a call
            can't have one; ``'reference'``, the plain equations. Outside of any context the environment variable
            ``MMLINATTN_OPS`` says which, ``'auto'`` by default.

    Raises:
        ValueError: For another name.
    """
    global _choice  # not a context variable: the backward pass of checkpointed blocks runs in threads of its own
    before, _choice = _choice, _checked(backend, 'backend')
    try:
        yield
    finally:
        _choice = before


def backend(first: Tensor, *others: Optional[Tensor]) -> str:
    """The backend for an op on the given tensors: ``'reference'``, or by the device of the first ``'cpu'`` or
    ``'eager'`` (all others)."""
    if needs_reference(first, *others):
        return 'reference'
    return 'cpu' if on_cpu(first) else 'eager'


def on_cpu(x: Tensor) -> bool:
    """Whether what is faster on CPUs alone runs: blocks that fit the cache, oneDNN, other orders of memory."""
    return x.is_cpu and not _as_on_gpu


@contextlib.contextmanager
def as_on_gpu():
    """A context in which a CPU runs what other devices do; for tests, and for counting."""
    global _as_on_gpu
    _as_on_gpu = True
    try:
        yield
    finally:
        _as_on_gpu = False


def has_kernel(op: str, kernel: str, q: Tensor, v: Tensor, num_heads: int) -> bool:
    """Whether Triton kernels are asked for and there is one for this attention; warns once where there is none."""
    if _choice != 'triton' or num_heads < 1:
        return False
    return _has_kernel(op, kernel, q.device, q.dtype, max(q.shape[-1], v.shape[-1]) // num_heads)


@functools.cache
def _has_kernel(op: str, kernel: str, device: torch.device, dtype: torch.dtype, width: int) -> bool:
    lack = _lack(op, kernel, device, dtype, width)
    if lack is not None:
        _say(lack)
    return lack is None


@functools.cache  # once, also where all warnings are shown
def _say(lack: str) -> None:
    warnings.warn(f"mmlinattn: 'triton' is asked for, but PyTorch's operators run: {lack}", stacklevel=5)


def _lack(op: str, kernel: str, device: torch.device, dtype: torch.dtype, width: int) -> Optional[str]:
    """Why there is no kernel; None if there is one."""
    if op not in ('rala', 'linear_attention'):
        return f'there are no kernels for {op}'
    if importlib.util.find_spec('triton') is None:
        return 'Triton is not installed'
    try:
        import triton  # noqa: F401

        from .triton import attention
    except Exception as error:  # Triton's, which may be any
        return f'Triton cannot be imported: {error}'
    if not attention.kernels.INTERPRETED:
        if device.type != 'cuda':
            return f'there are no kernels for the device {device.type!r}'
        if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
            return f'{torch.cuda.get_device_name(device)} is older than compute capability 8.0'
    if kernel not in attention.MAPS:
        return f'there are kernels for the maps {attention.MAPS}, not for {kernel!r}'
    widest = attention.WIDEST_HEAD.get(dtype, 0)
    return None if width <= widest else f'there is no kernel for heads of {width} channels in {dtype}'


def needs_reference(*tensors: Optional[Tensor]) -> bool:
    """Whether the call has to stay with plain differentiable operations on the given tensors.

    So it is where something watches or transforms them: a recorded graph, meta and fake tensors, other subclasses,
    ``torch.func`` transforms, forward-mode derivatives, dispatch modes that count or record.
    """
    if _choice == 'reference' or is_traced() or private_apis.num_modes() > 0 or is_transformed():
        return True
    return any(t is not None and (type(t) not in (Tensor, nn.Parameter) or t.is_meta) for t in tensors)


def is_transformed() -> bool:
    """Whether ``torch.func`` transforms the call or forward-mode derivatives are taken; False in ``torch.compile``,
    whose tracer answers such questions about itself."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return private_apis.innermost_transform() is not None or private_apis.forward_mode._current_level >= 0


def is_traced() -> bool:
    """Whether a graph is being recorded (``torch.compile``, ``torch.export``, ``torch.jit.trace``).

    Graphs hold the reference: compilers fuse it, and it is right at sizes other than the traced one.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_exported() -> bool:
    """Whether ``torch.export`` runs the model's Python code itself. Under ``strict=True`` it does not, nor does
    ``torch.compile``: both read it."""
    return private_apis.is_exporting() and not torch.compiler.is_dynamo_compiling()


def size_oblivious():
    """A context in which ``torch.export`` records what holds for sizes of 1 as for others.

    Export asks of every size that is left open whether it is 1, and writes the answer into the graph: the number of
    windows of a small map, or of its rows, would have to stay above 1 (or be 1) for ever. ``torch.onnx.export``
    switches that off by itself. ``torch.compile`` makes one more graph for such a size instead.
    """
    applies = private_apis.CAN_BE_SIZE_OBLIVIOUS and is_exported()
    return private_apis.size_oblivious() if applies else contextlib.nullcontext()


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of ``x``; the meta device has none and PyTorch raises when asked for it."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor):
    """A context in which operations on the device of ``x`` keep the types they are given."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """The type of sums, angles and interpolation: float32 for half precision, the type of ``x`` otherwise."""
    return torch.promote_types(x.dtype, torch.float32)


def onednn_takes(dtype: torch.dtype) -> bool:
    """float32, and bfloat16 where the CPU has units for it."""
    if not (private_apis.HAS_ONEDNN and torch.backends.mkldnn.enabled):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and private_apis.has_bfloat16_units())
