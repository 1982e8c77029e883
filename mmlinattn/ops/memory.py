# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""How fast forms move less memory: slices of one projection, blocks of tokens, products into given memory.

**Slices.** Queries, keys and values are slices of one tensor. Autograd would make the gradient of each, and copy them
into that of the whole: the three largest tensors of an attention twice. Here, a form that computes the gradients asks
:func:`gradients_like` for memory in which they lie as the slices do, and :func:`split` knows it when it sees it.

**Blocks.** A dozen operations lie between a projected query or key and its product with the state. On CPUs they run on
blocks of tokens that stay in the cache from the first of them to the last; in one go, each would fetch and write the
whole tensor.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from . import forms
from .sizes import settled

# Elements that a block has for each thread. The calls of a dozen operations cost more than they do on much smaller
# blocks; much larger ones leave the cache.
BLOCK_NUMEL = 2**18
# On GPUs, copies of fewer elements take less time than Python does in the backward pass (counted, not measured).
GPU_COPY_NUMEL = 2**24


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, heads * d) -> (B, heads, N, d), a view."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, N, d) -> (B, N, heads * d); a view where the heads of a token lie side by side."""
    return settled(x.transpose(1, 2)).flatten(2)


def heads_of(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, heads * d) -> (1, B, heads, N, d), a view: :func:`split_heads` for the plain forms of linear attention,
    which compilers get.

    Of five axes, since Inductor keeps every tensor of four channels-last in models with convolutions: heads come to lie
    innermost. That copies each map, and its C++ code for sums in that order writes past the end of their memory where
    the number of heads is no multiple of the vector's length (PyTorch 2.11, pytorch/pytorch#196681). Not by
    einops, which leaves out axes of one until the others are in order: Inductor would see four.
    """
    batch, tokens, channels = x.shape
    return x.reshape(1, batch, tokens, num_heads, channels // num_heads).transpose(2, 3)


def tokens_of(x: Tensor) -> Tensor:
    """(1, B, heads, N, d) -> (B, N, heads * d), back from :func:`heads_of`."""
    _, batch, heads, tokens, width = x.shape
    return settled(x.transpose(2, 3)).reshape(batch, tokens, heads * width)


# --- who else may see a tensor ----------------------------------------------------------------------------------------


def is_just(kind: type, layer: nn.Module) -> bool:
    """Whether ``layer`` is of this very class, with the ``forward`` of the class."""
    return type(layer) is kind and 'forward' not in layer.__dict__


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether ``layer`` computes ``x @ weight.T + bias`` and nothing else, so that its weight may be used without it.

    False for other classes (adapters in its place, parametrised weights), for layers with hooks (weight norm, pruning,
    sharding, whoever watches) and those whose ``forward`` was replaced.
    """
    return is_just(nn.Linear, layer) and not has_hooks(layer)


def is_plain_conv(layer: nn.Module) -> bool:
    """Whether ``layer`` is a zero-padded convolution and nothing else, as :func:`is_plain_linear` asks of products."""
    plain = is_just(nn.Conv2d, layer) and not has_hooks(layer)
    return plain and layer.padding_mode == 'zeros' and not isinstance(layer.padding, str)


def has_hooks(layer: nn.Module) -> bool:
    own = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(own) or global_hooks._has_any_global_hook()


def call(module: Callable, *args, **kwargs) -> Tensor:
    """``module(...)`` of a module or function, in memory that may be written over.

    Whoever watches the module with a hook keeps what it saw, and views of shared memory (expanded tensors) become
    tensors of their own.
    """
    out = module(*args, **kwargs)
    if forms.records() or forms.is_traced():  # graphs are not to hold an answer for one size
        return out
    shared = any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape))
    watched = isinstance(module, nn.Module) and has_hooks(module)
    return out.clone() if shared or watched else out


# --- blocks -----------------------------------------------------------------------------------------------------------


def token_blocks(width: int, tokens: int, device: torch.device, least: int = 0) -> Iterator[slice]:
    """Slices of ``tokens`` tokens, ``width`` numbers each, of a size for the cache, but of ``least`` tokens for each
    thread; on GPUs one slice of all."""
    threads = torch.get_num_threads()
    size = max(1, threads * least, threads * BLOCK_NUMEL // width) if device.type == 'cpu' else max(1, tokens)
    for start in range(0, tokens, size):
        yield slice(start, start + size)


def blocks(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of images and of tokens that cut (B, N, C) into blocks for the cache.

    Small images go several to a block. Where one image spans several blocks, a block is part of one image.
    """
    batch, tokens, width = x.shape
    rows = list(token_blocks(width, tokens, x.device))
    for images in token_blocks(tokens * width, batch, x.device):
        for part in rows:
            yield images, part


def assemble(shape: torch.Size, parts: Iterable[tuple[slice, slice, Tensor]]) -> Tensor:
    """A map (B, H, W, C) from its regions: rows, columns and (B, h, w, C) of each, row by row of regions.

    In inference each region is written to its place before the next one is asked for.
    """
    out, bands = None, {}
    for rows, columns, part in parts:
        if forms.records() or forms.is_plain(part):
            bands.setdefault(rows.start, []).append(part)
        else:
            out = part.new_empty(shape) if out is None else out
            out[:, rows, columns] = part
    return torch.cat([torch.cat(band, dim=2) for band in bands.values()], dim=1) if bands else out


def product(x: Tensor, matrix: Tensor, shift: Optional[Tensor] = None, out: Optional[Tensor] = None) -> Tensor:
    """``x @ matrix + shift`` in memory where the heads of a token lie side by side; not recorded by autograd.

    Args:
        x (Tensor): (B, heads, N, d).
        matrix (Tensor): (B, heads, d, e).
        shift (Tensor, optional): (B, heads, 1, e).
        out (Tensor, optional): Memory to write to, (B, heads, N, e).

    Returns:
        Tensor: (B, heads, N, e); merging its heads is free.
    """
    batch, heads, tokens = x.shape[:3]
    if out is None:
        out = x.new_empty(batch, tokens, heads, matrix.shape[-1]).transpose(1, 2)
    if batch > 32:  # many small products are better made at once, and copied
        return out.copy_(x @ matrix if shift is None else (x @ matrix).add_(shift))
    for i in range(batch):
        if shift is None:
            torch.bmm(x[i], matrix[i], out=out[i])
        else:
            torch.baddbmm(shift[i], x[i], matrix[i], out=out[i])
    return out


# --- gradients --------------------------------------------------------------------------------------------------------


def differentiable(backward):
    """The ``backward`` of an autograd Function whose rule holds for first derivatives only.

    Where derivatives of the gradients are asked for (``create_graph=True``), those of the plain form are recorded
    instead. ``forward`` sets ``ctx.plain = n, function``: a plain function of its first ``n`` arguments, which are the
    first ``n`` tensors that it saved.
    """

    @functools.wraps(backward)
    def rule(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        count, plain = ctx.plain
        inputs = ctx.saved_tensors[:count]
        wanted = [tensor for tensor, needed in zip(inputs, ctx.needs_input_grad) if needed]
        made = torch.autograd.grad(plain(*inputs), wanted, grads, create_graph=True, allow_unused=True)
        made = iter(made)
        return tuple(next(made) if needed and i < count else None for i, needed in enumerate(ctx.needs_input_grad))

    return staticmethod(rule)


def split(x: Tensor, widths) -> tuple[Tensor, ...]:
    """``x.split(widths, dim=-1)``; gradients that lie as the slices do become that of ``x`` without a copy."""
    learns = forms.records() and x.requires_grad and x.is_contiguous()
    worth_it = x.device.type == 'cpu' or x.numel() >= GPU_COPY_NUMEL
    if forms.is_plain(x) or not (learns and worth_it):
        return x.split(widths, dim=-1)
    return _Split.apply(x, *widths)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *widths):
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.widths, ctx.dtype, ctx.device = x.shape, widths, x.dtype, x.device
        return x.split(widths, dim=-1)

    @staticmethod
    def backward(ctx, *grads):
        grads = [
            torch.zeros((), dtype=ctx.dtype, device=ctx.device).expand(*ctx.shape[:-1], width) if grad is None else grad
            for grad, width in zip(grads, ctx.widths)
        ]
        whole = None if torch.is_grad_enabled() else _whole(grads, ctx.shape, ctx.widths)
        return torch.cat(grads, dim=-1) if whole is None else whole, *(None for _ in ctx.widths)


def _whole(parts: list[Tensor], shape: torch.Size, widths) -> Optional[Tensor]:
    """The contiguous tensor of ``shape`` whose slices ``parts`` are, None if there is none."""
    first = parts[0]
    left = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    if left < shape.numel():
        return None
    strides = torch.empty(shape, device='meta').stride()
    whole = first.as_strided(shape, strides)
    return whole if all(_same(*pair) for pair in zip(whole.split(widths, dim=-1), parts)) else None


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same memory; axes of one element may have any stride."""
    steps = [[stride for stride, size in zip(t.stride(), t.shape) if size > 1] for t in (a, b)]
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and steps[0] == steps[1]


def gradients_like(*tensors: Tensor) -> list[Tensor]:
    """Uninitialised gradients for tensors of one dtype and device.

    Tensors that together fill a stretch of memory get gradients that do so in the same way.
    """
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    made = {}
    for group in groups.values():
        starts = [t.storage_offset() for t in group]
        ends = [t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1 for t in group]
        first, size = min(starts), max(ends) - min(starts)
        dense = all(s > 0 for t in group for s in t.stride()) and len(set(starts)) == len(group)
        if dense and size == sum(t.numel() for t in group):
            memory = group[0].new_empty(size)
            for tensor in group:
                made[id(tensor)] = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - first)
        else:
            for tensor in group:
                made[id(tensor)] = torch.empty_like(tensor)
    return [made[id(tensor)] for tensor in tensors]
