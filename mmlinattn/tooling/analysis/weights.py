# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The maps that attentions never build, and their states, from what they do with values."""

import copy
from collections.abc import Sequence
from typing import Callable, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ... import ops
from ...attention import Grid, TokenMixer
from ...ops.dispatch import without_autocast
from ...ops.dtypes import accumulation_dtype
from ...ops.grid import to_map, to_tokens
from ...ops.heads import split_heads

Rows = Optional[Union[Sequence[int], Tensor]]


def mixer_weights(
    mixer: TokenMixer,
    q: Tensor,
    k: Tensor,
    grid: Grid,
    key_grid: Grid,
    mask: Optional[Tensor] = None,
    rotary: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    rows: Rows = None,
) -> Tensor:
    """The attention map that a mixer amounts to, O(N M) memory; never used in a forward pass.

    ``weights @ v``, head by head, is what the mixer gives without its ``local_kernels``; normalisers and signs are part
    of it. It is the derivative of the output by the values, one backward pass for as many queries as a head has
    channels.

    Args:
        mixer (TokenMixer): The attention.
        q, k, grid, key_grid, mask, rotary, bias: As in :meth:`mmlinattn.attention.TokenMixer.forward`.
        rows (Sequence[int] | Tensor, optional): Indices of the queries wanted, all by default. Ask for a few at a time
            where N is large.

    Returns:
        Tensor: (B, heads, N or len(rows), M), in float32 or better; zero at masked keys.

    Raises:
        ValueError: For ``rows`` that are no indices of queries.
        NotImplementedError: For a mixer whose output is not one matrix a head times the values.
    """
    refusal = f'{type(mixer).__name__} has no weights: what it gives is not one matrix a head times the values'
    if mixer.context and mixer.local_kernels(q.new_zeros(len(q), mixer.dim)) is None:
        raise NotImplementedError(refusal)
    mixed = _of_values(mixer, q, k, grid, key_grid, mask, rotary, bias)
    wide = accumulation_dtype(q)
    v = torch.rand(*k.shape[:2], mixer.widths[2], generator=torch.Generator().manual_seed(0)).to(k.device, wide)
    weights, error = matrix_of(mixed, v, mixer.num_heads, rows)
    if not error <= 1e-3:  # nor NaN
        raise NotImplementedError(f'{refusal} (off by {error:.2g})')
    return weights


def mixer_state(mixer: TokenMixer, q: Tensor, k: Tensor, v: Tensor, *args, **terms) -> Optional[Tensor]:
    """The state of a linear attention, the d x e matrix ``keys^T @ values`` that its queries multiply.

    It is found as the first product of matrices (d, M) and (M, e) in the attention's plain form.

    Args:
        mixer (TokenMixer): The attention.
        q, k, v, args, terms: As in :meth:`mmlinattn.attention.TokenMixer.forward`, without ``context``.

    Returns:
        Tensor | None: (B, heads, d, e), up to a factor a head; None for an attention without one, as softmax.
    """
    if mixer.quadratic:
        return None
    depth, number, width = k.shape[-1] // mixer.num_heads, k.shape[1], v.shape[-1] // mixer.num_heads
    products = _Products((depth, number), (number, width))
    with torch.no_grad(), products:
        out = _of_values(mixer, q, k, *args, **terms)(v.to(accumulation_dtype(v)))
    found = products.found  # with five axes, as the plain forms have them
    if found is None and depth == width == 1:  # a number, which Hydra attention multiplies its queries by
        found = out[:, :1]
    return None if found is None else found.reshape(len(q), mixer.num_heads, depth, width)


class _Products(TorchFunctionMode):
    """Keeps the first product of matrices of two shapes."""

    def __init__(self, *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.shapes = shapes
        self.found: Optional[Tensor] = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.found is None and getattr(func, '__name__', '') in ('matmul', '__matmul__'):
            if tuple(tuple(matrix.shape[-2:]) for matrix in args) == self.shapes:
                self.found = out
        return out


def _of_values(mixer, q, k, grid, key_grid, mask=None, rotary=None, bias=None) -> Callable[[Tensor], Tensor]:
    """What a mixer makes of values, without its convolution of them and its last norm, in float32 or better."""
    wide = accumulation_dtype(q)
    if any(p.dtype != wide for p in mixer.parameters()):
        mixer = copy.deepcopy(mixer).to(wide)
    if mixer.unit_output:
        mixer = copy.copy(mixer)
        mixer.unit_output = False
    rotary, bias = (None if t is None else t.to(wide) for t in (rotary, bias))

    def mixed(v: Tensor) -> Tensor:
        v = v if mask is None else v * mask.unsqueeze(-1).to(wide)
        context = v.new_zeros(len(v), mixer.dim) if mixer.context else None
        # not as a module, whose hooks watch the model; a mixer may overwrite its queries and keys
        given = q.detach().to(wide, copy=True), k.detach().to(wide, copy=True), v
        with without_autocast(q), ops.use('reference'):
            out = mixer.forward(*given, grid, key_grid, mask=mask, rotary=rotary, bias=bias, context=context)
            own = mixer.local_kernels(context)
            return out if own is None else out - convolved(v, own, key_grid)

    return mixed


def local_weights(kernels: Tensor, grid: Grid, heads: int, rows: Rows = None) -> Tensor:
    """A depth-wise convolution of the values as the matrix it is, mean over the channels of each head.

    ``kernels``: (B or 1, C, k, k), k odd; (B or 1, C, k, 1) goes over the sequence of all tokens instead of their grid.
    Class tokens have no neighbours. Gives (B or 1, heads, N or len(rows), N).
    """
    kernels = kernels.detach().unflatten(1, (heads, -1))
    kernels = kernels.mean(dim=2, keepdim=True).expand_as(kernels).flatten(1, 2)
    v = kernels.new_zeros(len(kernels), grid.num_tokens, kernels.shape[1])
    return matrix_of(lambda v: convolved(v, kernels, grid), v, heads, rows)[0]


def convolved(v: Tensor, kernels: Tensor, grid: Grid) -> Tensor:
    """The depth-wise convolution of values (B, N, C) with ``kernels`` as in :func:`local_weights`; no class tokens."""
    if kernels.shape[-1] < kernels.shape[-2]:
        grid = Grid(grid.num_tokens, 1)
    image, (high, wide) = to_map(v, grid), kernels.shape[-2:]
    weight = kernels.to(v.dtype).expand(len(v), -1, -1, -1).flatten(0, 1).unsqueeze(1)
    local = F.conv2d(image.flatten(0, 1)[None], weight, padding=(high // 2, wide // 2), groups=len(weight))
    return F.pad(to_tokens(local.view(image.shape)), (0, 0, grid.prefix, 0))


def matrix_of(function: Callable[[Tensor], Tensor], v: Tensor, heads: int, rows: Rows) -> tuple[Tensor, float]:
    """The matrix of each head by which a function multiplies values, from its derivative at ``v``.

    The channels of a head share one matrix, and each channel of the output depends on the same channel of the values:
    so each answers for another row, and one backward pass gives as many rows as a head has channels.

    Returns:
        tuple[Tensor, float]: (B, heads, N or len(rows), M), and how far it times ``v`` is from what the function gives,
        relative to the products that are added up.
    """
    with torch.inference_mode(False), torch.enable_grad():
        v = v.clone().requires_grad_()
        out = function(v).unflatten(-1, (heads, -1))  # (B, N, heads, e)
        index = _checked_rows(rows, out.shape[1]).to(v.device)
        parts = []
        channels = torch.arange(out.shape[-1], device=v.device)
        for some in index.split(len(channels)):
            asked = torch.zeros_like(out)
            asked[:, some, :, channels[: len(some)]] = 1
            (answer,) = torch.autograd.grad(out, v, asked, retain_graph=True)
            parts.append(answer.unflatten(-1, (heads, -1))[..., : len(some)].permute(0, 2, 3, 1))
    with torch.no_grad():
        matrix, values = torch.cat(parts, dim=2), split_heads(v, heads)
        bias = function(torch.zeros_like(v)).unflatten(-1, (heads, -1))  # of a convolution: no weight
        error = matrix @ values - (out - bias)[:, index].transpose(1, 2)
        size = (matrix.abs() @ values.abs()).norm().clamp(min=1e-30)
    return matrix, float(error.norm() / size)


def _checked_rows(rows: Rows, num_tokens: int) -> Tensor:
    index = torch.arange(num_tokens) if rows is None else torch.as_tensor(rows)
    if index.numel():
        whole = index.dim() == 1 and not index.is_floating_point() and index.dtype != torch.bool
        if not whole or index.min() < 0 or index.max() >= num_tokens:
            raise ValueError(f'rows={rows!r} have to be a sequence of indices of queries in [0, {num_tokens - 1}]')
    return index.long()
