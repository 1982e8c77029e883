# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Pairs of registered ops, forward and backward, around :mod:`.attention_launch`.

Registered ops are what checkpointing, DDP, autocast, profilers and ``torch.compile`` know how to handle.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .. import dispatch
from . import attention_launch as launch
from . import canary
from .attention_launch import Attention, NoKernel, Saved

TENSORS = 7  # q, k, v, rotary, mask, offset, scale
FIELDS = [field.name for field in dataclasses.fields(Saved)]
# what the registered ops take and give, in the order of `launch.forward`, `Attention` and `Saved`
INPUTS = 'Tensor q, Tensor k, Tensor v, Tensor? rotary, Tensor? mask, Tensor? offset, Tensor? scale'
OPTIONS = 'SymInt heads, str kernel, bool centred, bool weighted, float factor, float eps, float power'
SAVED = ', '.join(f'Tensor {field}' for field in FIELDS)


class Variant(NamedTuple):
    """What kernels are compiled for, one binary each."""

    op: str
    map: str
    power: float
    dtype: torch.dtype
    d: int
    e: int
    device: torch.device
    weighted: bool
    masked: bool
    rotary: bool
    offset: bool
    aligned: bool  # tokens and images are multiples of 16 elements apart, for which Triton has a binary of its own

    def __str__(self) -> str:
        parts = [name for name in ('masked', 'rotary', 'offset') if getattr(self, name)]
        widths = f'{self.d}' if self.d == self.e else f'{self.d} and {self.e}'
        return ', '.join([f'{self.op} ({self.map}', str(self.dtype), f'heads of {widths} channels', *parts]) + ')'


def variant_of(name: str, spec: Attention, q, k, v, rotary=None, mask=None, offset=None, scale=None) -> Variant:
    d, e = q.shape[-1] // spec.heads, v.shape[-1] // spec.heads
    more = (t is not None for t in (mask, rotary, offset))
    aligned = all(t.stride(0) % 16 == t.stride(1) % 16 == t.storage_offset() % 16 == 0 for t in (q, k, v))
    return Variant(name, spec.kernel, spec.power, q.dtype, d, e, q.device, spec.weighted, *more, aligned)


OPS: dict[str, Any] = {}  # registered ops by name: `by_kernels` and `plain` are attributes


def _neighbours(a: Tensor, b: Tensor) -> bool:
    """Whether ``b`` lies behind ``a`` in each token of one larger tensor."""
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.shape[:2] == b.shape[:2]
        and a.stride() == b.stride()
        and b.storage_offset() == a.storage_offset() + a.shape[-1]
    )


def _slices_of_one(q: Tensor, k: Tensor, v: Tensor) -> int:
    """How many of ``q, k, v`` are neighbours: their gradients are made as slices of one tensor, too."""
    if dispatch.is_traced() or any(type(t) is not Tensor for t in (q, k, v)) or not _neighbours(q, k):
        return 1
    return 3 if _neighbours(k, v) else 2


def _empty(x: Optional[Tensor], like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def register(name: str, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Register ``mmlinattn::NAME`` and ``mmlinattn::NAME_backward``.

    Args:
        name (str): Of the op.
        plain (callable): ``(attention, q, k, v, rotary, mask, offset, scale)`` -> output: the same in operations of
            PyTorch, for second derivatives and where kernels do not compile.

    Returns:
        callable: Takes what ``plain`` takes and gives what it gives, by kernels where there are any.
    """

    results = ', '.join(['Tensor'] * (1 + len(FIELDS)))

    @torch.library.custom_op(f'mmlinattn::{name}', mutates_args=(), schema=f'({INPUTS}, {OPTIONS}) -> ({results})')
    def op(*inputs):
        out, saved = launch.forward(Attention(*inputs[TENSORS:]), *inputs[:TENSORS])
        # ops give tensors only
        return out, *(_empty(getattr(saved, field), out) for field in FIELDS)

    @op.register_fake
    def _(q, k, v, rotary, mask, offset, scale, heads, kernel, centred, weighted, *_):
        batch, tokens, channels = q.shape
        d, e = channels // heads, v.shape[-1] // heads

        def small(there: bool, *shape):
            return q.new_empty(shape, dtype=torch.float32) if there else q.new_empty(0)

        focused = kernel == 'focused'
        return (
            q.new_empty(batch, tokens, v.shape[-1]),
            small(True, batch, heads, d, e),
            small(True, batch, heads, d),
            small(centred, batch, heads, e),
            small(True, batch, heads, 2),
            small(weighted, batch, heads, d),
            small(focused, 3, batch, tokens),
            small(focused, 3, batch, k.shape[1]),
        )

    @torch.library.custom_op(
        f'mmlinattn::{name}_backward',
        mutates_args=(),
        schema=f'(Tensor grad, {INPUTS}, {SAVED}, {OPTIONS}, SymInt together) -> Tensor[]',
    )
    def op_backward(grad, *inputs):
        tensors, others, together = inputs[:TENSORS], inputs[TENSORS:-1], inputs[-1]
        saved, spec = Saved(*others[: len(FIELDS)]), Attention(*others[len(FIELDS) :])
        buffers = _gradient_buffers(*tensors[:3], together)
        grads = _slices(buffers, tensors[:3], together)
        more = launch.backward(spec, launch.rows_first(grad), *tensors[:3], saved, grads, *tensors[3:])
        return buffers if more is None else [*buffers, more.to(tensors[-1].dtype)]

    @op_backward.register_fake
    def _(grad, q, k, v, rotary, mask, offset, scale, *others):
        buffers = _gradient_buffers(q, k, v, others[-1])
        return buffers if scale is None else [*buffers, torch.empty_like(scale)]

    def setup_context(ctx, inputs, output):
        tensors, ctx.options = inputs[:TENSORS], inputs[TENSORS:]
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.together = _slices_of_one(*tensors[:3])

    def compared(ctx, grad, tensors, grads) -> bool:
        if dispatch.is_plain(grad, *tensors[:3]):  # a graph is being recorded
            return True
        spec = Attention(*ctx.options)
        variant = variant_of(name, spec, *tensors)
        if not canary.is_due(variant, 'backward', tensors[0].shape, tensors[1].shape):
            return True
        one, last = _last_head(spec)

        def expected(dtype):
            leaves = [last(t, dtype).requires_grad_() for t in tensors[:3]]
            with torch.enable_grad():
                q, k, v = leaves
                rotary, mask, offset, scale = _of_last(tensors[3:], dtype)
                v = v if mask is None else v * mask.unsqueeze(-1)  # whose hidden values get no gradient
                out = plain(one, q, k, v, rotary, mask, offset, scale)
            return torch.autograd.grad(out, leaves, last(grad, dtype))

        return canary.agrees(variant, 'backward', [last(t) for t in grads], expected)

    def backward(ctx, grad, *_):
        kept = ctx.saved_tensors
        tensors, saved = kept[:TENSORS], kept[TENSORS:]
        none = (None,) * len(ctx.options)
        if grad is None:
            return (None,) * TENSORS + none
        q, k, v, _, _, offset, scale = tensors

        def plain_gradients():
            spec = Attention(*ctx.options)
            return _gradients(lambda *t: plain(spec, *t), grad, tensors, ctx.needs_input_grad[:TENSORS])

        if not torch.is_grad_enabled():  # it is where the gradients are to be differentiated themselves
            try:
                *buffers, last = op_backward(grad, *tensors, *saved, *ctx.options, ctx.together)
            except NoKernel as error:
                canary.fail(variant_of(name, Attention(*ctx.options), *tensors), 'backward', error)
            else:
                grad_scale = None if scale is None else last
                buffers = [*buffers, last] if scale is None else buffers
                grads = _slices(buffers, (q, k, v), ctx.together)
                grad_offset = None
                if not compared(ctx, grad, tensors, grads):
                    return *plain_gradients(), *none
                if offset is not None and ctx.needs_input_grad[5]:
                    grad_offset = grads[1].sum_to_size(offset.shape).to(offset.dtype)
                return *grads, None, None, grad_offset, grad_scale, *none
        return *plain_gradients(), *none

    op.register_autograd(backward, setup_context=setup_context)

    def by_kernels(spec: Attention, q, k, v, rotary=None, mask=None, offset=None, scale=None) -> Tensor:
        rows = [launch.rows_first(t) for t in (q, k, v)]
        rotary, mask = (None if t is None else t.contiguous() for t in (rotary, mask))
        options = (
            spec.heads, spec.kernel, spec.centred, spec.weighted, float(spec.scale), float(spec.eps), float(spec.power),
        )  # fmt: skip
        return op(*rows, rotary, mask, offset, scale, *options)[0]

    def agrees(variant: Variant, spec: Attention, tensors) -> bool:
        # a call of its own, of which checkpointing records nothing
        one, last = _last_head(spec)
        with torch.no_grad():
            return canary.agrees(
                variant,
                'forward',
                [last(by_kernels(spec, *tensors))],
                lambda dtype: [plain(one, *(last(t, dtype) for t in tensors[:3]), *_of_last(tensors[3:], dtype))],
            )

    def run(spec: Attention, q, k, v, rotary=None, mask=None, offset=None, scale=None) -> Tensor:
        tensors = (q, k, v, rotary, mask, offset, scale)
        if not launch.serves(spec, *tensors):
            return plain(spec, *tensors)
        if dispatch.is_traced():  # by who asks for it: recorded models hold the plain form
            return by_kernels(spec, *tensors)
        variant = variant_of(name, spec, *tensors)
        learns = dispatch.records() and any(t is not None and t.requires_grad for t in tensors)
        if not canary.allows(variant, learns):
            return plain(spec, *tensors)
        try:
            if canary.is_due(variant, 'forward', q.shape, k.shape) and not agrees(variant, spec, tensors):
                return plain(spec, *tensors)
            return by_kernels(spec, *tensors)
        except NoKernel as error:
            canary.fail(variant, 'forward', error)
            return plain(spec, *tensors)

    run.op, run.op_backward, run.by_kernels, run.plain = op, op_backward, by_kernels, plain
    OPS[name] = run
    return run


def _gradients(plain, grad: Tensor, tensors, wanted) -> list[Optional[Tensor]]:
    """Gradients of the wanted tensors through the plain form, differentiable themselves where grad mode is on."""
    twice = torch.is_grad_enabled()
    if not twice:
        tensors = [t.detach().requires_grad_() if want else t for t, want in zip(tensors, wanted)]
    with torch.enable_grad():
        out = plain(*tensors)
        leaves = [t for t, want in zip(tensors, wanted) if want]
        grads = iter(torch.autograd.grad(out, leaves, grad, create_graph=twice, allow_unused=True))
    return [next(grads) if want else None for want in wanted]


def _last_head(spec: Attention):
    """The attention of one head, and what takes that head's channels of the last image; of all heads where a token is
    mapped as a whole."""
    heads = spec.heads if spec.kernel == 'focused' else 1

    def last(x: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
        return x.detach()[-1:, :, x.shape[-1] - x.shape[-1] * heads // spec.heads :].to(dtype or x.dtype)

    return dataclasses.replace(spec, heads=heads), last


def _of_last(others, dtype: torch.dtype) -> list[Optional[Tensor]]:
    """Rotation, mask, offset and scale for :func:`_last_head`."""
    rotary, mask, offset, scale = others
    rest = [None if t is None else t.detach().to(dtype) for t in (rotary, offset, scale)]
    offset = None if rest[1] is None else rest[1][-1:]
    return [rest[0], None if mask is None else mask[-1:], offset, rest[2]]


def _gradient_buffers(q: Tensor, k: Tensor, v: Tensor, together: int) -> list[Tensor]:
    """Memory for the gradients of ``q, k, v``, the first ``together`` of them in one tensor."""
    widths = [t.shape[-1] for t in (q, k, v)]
    shapes = [(*q.shape[:2], sum(widths[:together])), *(t.shape for t in (q, k, v)[together:])]
    return [launch.empty(*shape, dtype=q.dtype, device=q.device) for shape in shapes]


def _slices(buffers: list[Tensor], like: tuple[Tensor, ...], together: int) -> tuple[Tensor, ...]:
    if together == 1:
        return tuple(buffers)
    return *buffers[0].split([t.shape[-1] for t in like[:together]], dim=-1), *buffers[1:]
