# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Which backend runs an op. Ops and ``inference`` ask here for device, grad mode, autocast and
tracing; mixers, layers and hosts never do.

Every op is one file with its equation in plain PyTorch and, where that keeps or copies much, a form with a gradient
written by hand for every device. What only CPUs gain from is chosen inside (:func:`on_cpu`). The public function of the
file asks once and calls one of them.
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


def needs_reference(*tensors: Optional[Tensor]) -> bool:
    """Whether the call has to stay with plain differentiable operations on the given tensors.

    So it is where something watches or transforms them: a recorded graph, meta and fake tensors, other subclasses,
    ``torch.func`` transforms, forward-mode derivatives, dispatch modes that count or record.
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
    """A context in which :func:`needs_reference` and the questions about open sizes are answered: no."""
    state.settled = True
    try:
        yield
    finally:
        state.settled = False


def is_transformed() -> bool:
    """Whether ``torch.func`` transforms the call or forward-mode derivatives are taken; False in ``torch.compile``,
    whose tracer answers such questions about itself."""
    if state.settled or torch.compiler.is_dynamo_compiling():
        return False
    return private_apis.innermost_transform() is not None or private_apis.forward_mode._current_level >= 0


def is_traced() -> bool:
    """Whether a graph is being recorded (``torch.compile``, ``torch.export``, ``torch.jit.trace``).

    Graphs hold the reference: compilers fuse it, and it is right at sizes other than the traced one.
    """
    return not state.settled and (torch.compiler.is_compiling() or torch.jit.is_tracing())


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
