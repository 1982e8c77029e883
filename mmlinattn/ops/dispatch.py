# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Choice of the implementation of each op, the types in which it computes, and ops with an analytic gradient.

Ops and ``forward_pass`` ask this module about device, grad mode, autocast and tracing; mixers and backbones do not.

Every op has its equation in plain PyTorch, the reference implementation (``'reference'``). It also has an analytic
gradient, for every device, if autograd would keep or copy many intermediate results or launch more kernels.
CPU-specific steps inside an op ask :func:`on_cpu`.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..utils import private_apis

VARIABLE = 'MMLINATTN_OPS'
CHOICES = ('auto', 'reference')


def _checked(choice: str, argument: str) -> str:
    """Return the name of a backend; another name raises a ValueError that names the ``argument``."""
    if choice == 'triton':
        raise ValueError(f"{argument}='triton': the Triton kernels were removed; compile the blocks with --compile")
    if choice not in CHOICES:
        raise ValueError(f'{argument}={choice!r}: expected one of {CHOICES}')
    return choice


_as_on_gpu = False
_choice = _checked(os.environ.get(VARIABLE, '') or 'auto', VARIABLE)


@contextlib.contextmanager
def use(backend: str):
    """Choose the backend of every op within a context.

    Args:
        backend (str): ``'auto'`` runs PyTorch's operators, with an analytic gradient for some ops. ``'reference'`` runs
            the reference implementations under autograd. The environment variable ``MMLINATTN_OPS`` sets the default,
            ``'auto'`` if unset.

    Raises:
        ValueError: For another name.
    """
    global _choice  # not a context variable: autograd runs the backward pass of checkpointed blocks in other threads
    before, _choice = _choice, _checked(backend, 'backend')
    try:
        yield
    finally:
        _choice = before


def on_cpu(x: Tensor) -> bool:
    """Return True if an op takes its CPU-specific path for ``x`` (cache blocking, oneDNN, channels-last)."""
    return x.is_cpu and not _as_on_gpu


def writes_in_place(x: Tensor, *others: Optional[Tensor]) -> bool:
    """Return True if an op may allocate its result and fill it piece by piece: on a CPU, with gradients disabled."""
    return x.is_cpu and not (_as_on_gpu or torch.is_grad_enabled() or needs_reference(x, *others))


@contextlib.contextmanager
def as_on_gpu():
    """Run the code path of GPUs on CPU tensors within a context, for tests and for counts of kernel launches."""
    global _as_on_gpu
    before, _as_on_gpu = _as_on_gpu, True
    try:
        yield
    finally:
        _as_on_gpu = before


def needs_reference(*tensors: Optional[Tensor]) -> bool:
    """Return True if an op has to run its reference implementation.

    This holds under ``use('reference')``, while a graph is recorded, and under ``torch.func`` transforms, forward-mode
    differentiation or dispatch modes. It also holds for meta tensors, fake tensors and other tensor subclasses.
    """
    compiler = private_apis.compiler
    # Dynamo replaces the first function by True, and compares a flag that it reads with the flag of later calls
    if _choice == 'reference' or compiler.is_dynamo_compiling() or compiler._is_compiling_flag:
        return True
    if private_apis.is_jit_tracing():
        return True
    if private_apis.innermost_transform() is not None or private_apis.forward_mode._current_level >= 0:
        return True
    if private_apis.num_modes() > 0 and not _as_on_gpu:
        return True
    for t in tensors:
        if t is not None and (type(t) not in (Tensor, nn.Parameter) or t.is_meta):
            return True
    return False


def is_transformed() -> bool:
    """Return True under a ``torch.func`` transform or forward-mode differentiation. Within ``torch.compile`` the result
    is False, since the query would report the state of the tracer."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return private_apis.innermost_transform() is not None or private_apis.forward_mode._current_level >= 0


def is_traced() -> bool:
    """Return True while a graph is recorded (``torch.compile``, ``torch.export``, ``torch.jit.trace``). Graphs record
    the reference implementation: compilers fuse it, and it stays right at sizes other than the traced one."""
    return torch.compiler.is_compiling() or private_apis.is_jit_tracing()


def is_exported() -> bool:
    """Return True if ``torch.export`` executes the model's Python code. The result is False with ``strict=True`` and in
    ``torch.compile``: both analyse the bytecode instead."""
    return private_apis.is_exporting() and not torch.compiler.is_dynamo_compiling()


def size_oblivious():
    """Record operations that also hold for dynamic sizes of 1, within a context. Outside of ``torch.export`` it does
    nothing.

    ``torch.export`` guards each dynamic size against 1. A map has one window if it is small and several if it is large,
    and the guard would exclude one of the two. ``torch.onnx.export`` disables these guards, and ``torch.compile``
    records a second graph.
    """
    applies = private_apis.CAN_BE_SIZE_OBLIVIOUS and is_exported()
    return private_apis.size_oblivious() if applies else contextlib.nullcontext()


def autocasts(x: Tensor) -> bool:
    """Return True if autocast is on for the device of ``x``. The meta device has none, and PyTorch would raise."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor):
    """Disable autocast for the device of ``x``, within a context."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()


def onednn_takes(dtype: torch.dtype) -> bool:
    """Return True for types of oneDNN's fused operators: float32, and bfloat16 on CPUs with instructions for it."""
    if not (private_apis.HAS_ONEDNN and torch.backends.mkldnn.enabled):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and private_apis.has_bfloat16_units())


# --- types ------------------------------------------------------------------------------------------------------------


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the type of sums, angles and interpolation: float32 for half precision, the type of ``x`` otherwise."""
    return torch.promote_types(x.dtype, torch.float32)


def product_dtype(q: Tensor, v: Tensor) -> torch.dtype:
    """Return the type of an op's matmuls: bfloat16 on GPUs for bfloat16 inputs, float32 for other half precision.
    float16 is not used, since quotients leave its range."""
    if q.dtype == v.dtype == torch.bfloat16 and not on_cpu(q):
        return torch.bfloat16
    return torch.promote_types(accumulation_dtype(q), v.dtype)


# --- analytic gradients -----------------------------------------------------------------------------------------------


def function_of(equation: Callable, forward: Optional[Callable] = None, gradient: Optional[Callable] = None) -> Any:
    """Return an autograd function that computes an equation and keeps less than autograd for the backward pass.

    It is called as ``apply(options, *tensors)``. If its gradient is differentiated again (``create_graph=True``) or
    batched (``is_grads_batched=True``), autograd differentiates ``equation``.

    Args:
        equation: ``(*tensors, **options)`` -> result, in operations that autograd records.
        forward: ``(*tensors, **options)`` -> result and a tuple of tensors to keep. The result is neither an input nor
            a view of one. None computes ``equation`` and keeps nothing.
        gradient: ``(gradients of the results, tensors, kept tensors, flags of tensors that need a gradient,
            **options)`` -> gradients of the tensors. None recomputes ``equation`` and differentiates it.
    """

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, options: dict, *tensors):
            out, kept = forward(*tensors, **options) if forward else (equation(*tensors, **options), ())
            ctx.options = options
            ctx.save_for_backward(*tensors, *kept)
            return out

        @staticmethod
        def backward(ctx: Any, *grads):
            saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
            inputs, kept = saved[: len(wanted)], saved[len(wanted) :]
            with without_autocast(grads[0]):  # the caller may run the backward pass inside an autocast context
                transformed = any(map(private_apis.is_batched, grads)) or needs_reference(*grads, *inputs)
                if gradient is None or torch.is_grad_enabled() or transformed:
                    found = _differentiate(equation, inputs, wanted, grads, ctx.options)
                else:
                    found = gradient(grads, inputs, kept, wanted, **ctx.options)
            return None, *(grad if want else None for grad, want in zip(found, wanted))

    return Op


def with_gradient(equation: Callable, *others: Callable) -> Callable:
    """Return an op with an analytic gradient, a function ``op(*tensors, **options)``.

    It calls ``equation`` if :func:`needs_reference` is True for the tensors, else an autograd function. ``others`` are
    the arguments ``forward`` and ``gradient`` of :func:`function_of`.
    """
    function = function_of(equation, *others)

    def op(*tensors: Optional[Tensor], **options) -> Any:
        if needs_reference(*tensors):
            return equation(*tensors, **options)
        return function.apply(options, *tensors)

    return op


def _differentiate(
    equation: Callable, inputs: Sequence, wanted: Sequence[bool], grads: Sequence[Tensor], options: dict
) -> Sequence[Optional[Tensor]]:
    """Compute ``equation(*inputs, **options)``, and return the gradients of the ``wanted`` inputs by autograd, None for
    others. ``grads`` are the gradients of the results."""
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        # Each input is a view of its own, so that two inputs that are one tensor get separate gradients.
        copy = (lambda t: t.view_as(t)) if twice else (lambda t: t.detach().requires_grad_())
        leaves = [copy(t) if want else t for t, want in zip(inputs, wanted)]
        out = equation(*leaves, **options)
        asked = [t for t, want in zip(leaves, wanted) if want]
        found = iter(torch.autograd.grad(out, asked, grads, create_graph=twice, allow_unused=True))
    return [next(found) if want else None for want in wanted]
