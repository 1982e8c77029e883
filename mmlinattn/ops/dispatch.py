# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Choice of an op's implementation. Ops and ``inference`` ask here for device, grad mode, autocast and tracing; mixers,
layers and hosts never do.

Each op has its equation in plain PyTorch. If autograd keeps or copies much of it, the op also has a gradient of its
own, for every device. CPU-specific steps are chosen inside (:func:`on_cpu`).
"""

import contextlib
import os
import threading
from typing import Optional

import torch
from torch import Tensor, nn

from ..utils import private_apis

VARIABLE = 'MMLINATTN_OPS'
CHOICES = ('auto', 'reference')


def _checked(choice: str, argument: str) -> str:
    if choice == 'triton':
        raise ValueError(f"{argument}='triton': the Triton kernels were removed; compile the blocks with --compile")
    if choice not in CHOICES:
        raise ValueError(f'{argument}={choice!r}: expected one of {CHOICES}')
    return choice


class State(threading.local):
    """Answers that hold for a forward pass of a backbone, of one thread.

    Attributes:
        settled (bool): Nothing watches, transforms or records the pass: :func:`needs_reference` is False throughout.
    """

    settled = False


state = State()
_as_on_gpu = False
_choice = _checked(os.environ.get(VARIABLE, '') or 'auto', VARIABLE)


@contextlib.contextmanager
def use(backend: str):
    """A context that chooses the backend of every op.

    Args:
        backend (str): ``'auto'``, PyTorch's operators, some with a gradient of our own; ``'reference'``, the plain
            equations. The environment variable ``MMLINATTN_OPS`` sets the default, ``'auto'`` if unset.

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
    if not state.settled and needs_reference(first, *others):
        return 'reference'
    return 'cpu' if first.is_cpu and not _as_on_gpu else 'eager'


def on_cpu(x: Tensor) -> bool:
    """Return True if the CPU-specific path (cache blocking, oneDNN, channels-last) should run."""
    return x.is_cpu and not _as_on_gpu


@contextlib.contextmanager
def as_on_gpu():
    """Run the path of other devices on a CPU, within a context: for tests and for counting launches."""
    global _as_on_gpu
    _as_on_gpu = True
    try:
        yield
    finally:
        _as_on_gpu = False


def needs_reference(*tensors: Optional[Tensor]) -> bool:
    """Return True if a call needs plain differentiable operations.

    The reasons are a recorded graph, meta and fake tensors, other subclasses of tensors, ``torch.func`` transforms,
    forward-mode derivatives and dispatch modes.
    """
    if state.settled:
        return False
    if _choice == 'reference' or is_traced() or is_transformed():
        return True
    if private_apis.num_modes() > 0 and not _as_on_gpu:
        return True
    for t in tensors:
        if t is not None and (type(t) not in (Tensor, nn.Parameter) or t.is_meta):
            return True
    return False


@contextlib.contextmanager
def settle():
    """Answer :func:`needs_reference` and questions about dynamic sizes with False, within a context."""
    state.settled = True
    try:
        yield
    finally:
        state.settled = False


def is_transformed() -> bool:
    """Return True under a ``torch.func`` transform or forward-mode differentiation. In ``torch.compile`` the tracer
    would answer for itself, so the result is False."""
    if state.settled or torch.compiler.is_dynamo_compiling():
        return False
    return private_apis.innermost_transform() is not None or private_apis.forward_mode._current_level >= 0


def is_traced() -> bool:
    """Return True while a graph is recorded (``torch.compile``, ``torch.export``, ``torch.jit.trace``).

    Graphs hold the reference: compilers fuse it, and it is right at sizes other than the traced one.
    """
    return not state.settled and (torch.compiler.is_compiling() or torch.jit.is_tracing())


def is_exported() -> bool:
    """Return True if ``torch.export`` runs the model's Python code. ``strict=True`` and ``torch.compile`` read it
    instead."""
    return private_apis.is_exporting() and not torch.compiler.is_dynamo_compiling()


def size_oblivious():
    """Record operations that hold for sizes of 1 too, within a context.

    ``torch.export`` guards each dynamic size against 1: the number of windows of a small map would have to stay above
    1, or be 1. ``torch.onnx.export`` disables these guards. ``torch.compile`` makes one more graph instead.
    """
    applies = private_apis.CAN_BE_SIZE_OBLIVIOUS and is_exported()
    return private_apis.size_oblivious() if applies else contextlib.nullcontext()


def autocasts(x: Tensor) -> bool:
    """Return True if autocast is on for the device of ``x``. PyTorch raises for the meta device, which has none."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor):
    """Disable autocast for the device of ``x``, within a context."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()


def onednn_takes(dtype: torch.dtype) -> bool:
    """Return True for float32, and for bfloat16 on a CPU with units for it."""
    if not (private_apis.HAS_ONEDNN and torch.backends.mkldnn.enabled):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and private_apis.has_bfloat16_units())
