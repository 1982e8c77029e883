# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Which form of an op runs. Mixers, layers and hosts ask here, and nowhere else, for the device, grad mode, autocast,
tracing and tensor types.

An op is a folder. ``reference.py`` holds its equation in plain PyTorch. Faster forms of the same function lie beside
it, where they exist: ``cpu.py``, ``triton.py`` for GPUs, and ``eager.py`` for any device, which overwrites memory and
brings gradients of its own with PyTorch's operators. :func:`pick` gives the module to call.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import warnings
from types import ModuleType
from typing import Optional

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

VARIABLE = 'MMLINATTN_OPS'
CHOICES = ('auto', 'reference')


def _checked(form: str, argument: str) -> str:
    if form not in CHOICES:
        raise ValueError(f'{argument}={form!r} has to be one of {CHOICES}')
    return form


_choice = _checked(os.environ.get(VARIABLE, '') or 'auto', VARIABLE)


@contextlib.contextmanager
def use(form: str):
    """A context in which every op runs in the named form.

    Args:
        form (str): ``'reference'`` for the plain equations, ``'auto'`` for the fastest form there is. Outside of any
            context the environment variable ``MMLINATTN_OPS`` says which, ``'auto'`` by default.

    Raises:
        ValueError: For another name.
    """
    global _choice  # not a context variable: the backward pass of checkpointed blocks runs in threads of its own
    before, _choice = _choice, _checked(form, 'form')
    try:
        yield
    finally:
        _choice = before


def is_traced() -> bool:
    """Whether a graph is being recorded (``torch.compile``, ``torch.export``, ``torch.jit.trace``).

    It is to hold the plain forms: compilers fuse them, and they are right at sizes other than the traced one.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_exported() -> bool:
    """Whether ``torch.export`` runs the model's Python code itself. Under ``strict=True`` it does not, nor does
    ``torch.compile``: both read it."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def is_transformed() -> bool:
    """Whether ``torch.func`` transforms the call or forward-mode derivatives are taken; False in ``torch.compile``,
    whose tracer answers such questions about itself."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_plain(*tensors: Optional[Tensor]) -> bool:
    """Whether the call has to stay with plain differentiable operations on the given tensors.

    So it is where something watches or transforms them: a recorded graph, meta and fake tensors, other subclasses,
    ``torch.func`` transforms, forward-mode derivatives, dispatch modes that count or record.
    """
    if _choice == 'reference' or is_traced():
        return True
    if torch._C._len_torch_dispatch_stack() or is_transformed():
        return True
    return any(t is not None and (type(t) not in (Tensor, nn.Parameter) or t.is_meta) for t in tensors)


def pick(reference: ModuleType, *tensors: Optional[Tensor]) -> ModuleType:
    """The module that holds the form of an op to run.

    Args:
        reference (module): The op's plain form; the others lie beside it.
        tensors (Tensor | None): What the op works on; the first one's device counts.

    Returns:
        module: ``triton`` on GPUs, ``cpu`` on CPUs, else ``eager``, else the reference: the first that the op has.
    """
    if is_plain(*tensors):
        return reference
    device = tensors[0].device
    if device.type == 'cpu':
        return _first(reference, 'cpu', 'eager')
    if device.type == 'cuda' and _has_triton(device):
        return _first(reference, 'triton', 'eager')
    return _first(reference, 'eager')


@functools.cache
def _first(reference: ModuleType, *forms: str) -> ModuleType:
    """The first of the forms that the op has a file for."""
    for form in forms:
        name = f'{reference.__package__}.{form}'
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    return reference


@functools.cache
def _has_triton(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for this GPU (compute capability 8.0 or newer); warns where not."""
    if importlib.util.find_spec('triton') is None:
        reason = 'Triton is not installed'
    elif torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        reason = f'{torch.cuda.get_device_name(device)} is older than the kernels (compute capability 8.0)'
    else:
        return True
    warnings.warn(f'mmlinattn: no GPU kernels, plain PyTorch in their place: {reason}', stacklevel=2)
    return False


def records() -> bool:
    """Whether gradients are recorded. Where they are not, an op may write over queries and keys."""
    return torch.is_grad_enabled()


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of ``x``; the meta device has none and PyTorch raises when asked for it."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor):
    """A context in which operations on the device of ``x`` keep the types they are given."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """The type of sums, angles and interpolation: float32 for half precision, the type of ``x`` otherwise."""
    return torch.promote_types(x.dtype, torch.float32)
