# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Compute attention maps and states of mixers by differentiating the output with respect to the values."""

import copy
from collections.abc import Sequence
from typing import Callable, Optional, Union

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ... import ops
from ...attention import AngularMixer, Grid, LocalMixer, TokenMixer
from ...ops.dispatch import accumulation_dtype, without_autocast
from ...ops.tokens import split_heads

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
    """Return the attention map that is equivalent to a mixer, with normalisation and signs, in O(N M) memory.

    ``weights @ v`` of each head is the output of the mixer without its convolution of the values (``convolve`` of a
    ``LocalMixer``).

    Args:
        mixer (TokenMixer): The attention.
        q, k, grid, key_grid, mask, rotary, bias: See :meth:`mmlinattn.attention.TokenMixer.forward`.
        rows (Sequence[int] | Tensor, optional): Indices of queries; all queries by default.

    Returns:
        Tensor: (B, heads, N or len(rows), M), in float32 or better; zero at masked keys.

    Raises:
        NotImplementedError: The output of a head is not a matrix times the values.
        ValueError: ``rows`` are not indices of queries.
    """
    refusal = f'{type(mixer).__name__} has no weights: its output is not one matrix per head times the values'
    if mixer.context and not isinstance(mixer, LocalMixer):
        raise NotImplementedError(refusal)
    mixed = _of_values(mixer, q, k, grid, key_grid, mask, rotary, bias)
    wide = accumulation_dtype(q)
    v = torch.rand(*k.shape[:2], mixer.widths[2], generator=torch.Generator().manual_seed(0)).to(k.device, wide)
    weights, error = matrix_of(mixed, v, mixer.num_heads, rows)
    if not error <= 1e-3:  # nor NaN
        raise NotImplementedError(f'{refusal} (off by {error:.2g})')
    return weights


def mixer_state(mixer: TokenMixer, q: Tensor, k: Tensor, v: Tensor, *args, **terms) -> Optional[Tensor]:
    """Return the state of a linear attention: the d x e matrix ``keys^T @ values``, the right factor of its queries.

    It is the first matmul of matrices (d, M) and (M, e) in the reference implementation of the op. The arguments are
    those of :meth:`mmlinattn.attention.TokenMixer.forward`, without ``context``. The result (B, heads, d, e) is known
    up to one factor for each head; None for an attention without state (softmax).
    """
    if mixer.quadratic:
        return None
    key_dim, number, value_dim = k.shape[-1] // mixer.num_heads, k.shape[1], v.shape[-1] // mixer.num_heads
    matmul = _MatmulResult((key_dim, number), (number, value_dim))
    with torch.no_grad(), matmul:
        out = _of_values(mixer, q, k, *args, **terms)(v.to(accumulation_dtype(v)))
    if matmul.found is None and key_dim == value_dim == 1:  # Hydra attention multiplies its queries by a number
        matmul.found = out[:, :1]
    return None if matmul.found is None else matmul.found.reshape(len(q), mixer.num_heads, key_dim, value_dim)


class _MatmulResult(TorchFunctionMode):
    """Function mode that keeps the result of the first matmul of matrices with the two ``shapes``, as ``found``."""

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
    """Return a function from values to the output of the mixer without its convolution and output norm, in float32 or
    better."""
    wide = accumulation_dtype(q)
    if any(p.dtype != wide for p in mixer.parameters()):
        mixer = copy.deepcopy(mixer).to(wide)
    rotary, bias = (None if t is None else t.to(wide) for t in (rotary, bias))

    def mixed(v: Tensor) -> Tensor:
        v = v if mask is None else v * mask.unsqueeze(-1).to(wide)
        # forward, not __call__, bypasses the hooks; copies, as a mixer may overwrite its queries and keys
        inputs = q.detach().to(wide, copy=True), k.detach().to(wide, copy=True), v
        with without_autocast(q), ops.use('reference'):
            if has_unit_output(mixer):
                return ops.angular_attention(*inputs, mixer.num_heads, mask, released=True, unit_output=False)
            if isinstance(mixer, LocalMixer):
                return mixer.attend(*inputs, key_grid, mask)
            return mixer.forward(*inputs, grid, key_grid, mask=mask, rotary=rotary, bias=bias)

    return mixed


def has_unit_output(mixer: TokenMixer) -> bool:
    """Return True if a mixer scales the output of each token and head to unit length."""
    return isinstance(mixer, AngularMixer) and mixer.form == 'released'


def local_weights(convolve: Callable[[Tensor], Tensor], v: Tensor, heads: int, rows: Rows = None) -> Tensor:
    """Return the matrix of a depth-wise convolution of the values, averaged over the channels of each head.

    ``convolve`` is an affine function of values ``v``, (B, M, E) -> (B, N, E); the numbers in ``v`` have no influence.
    The matrix is (B, heads, N or len(rows), M), of the outputs ``rows``, by default of all.
    """
    with torch.inference_mode(False), torch.enable_grad():
        values = v.detach().clone().requires_grad_()
        out = convolve(values)
        index = _index(rows, out.shape[1])
        matrix = v.new_zeros(len(v), heads, len(index), v.shape[1])
        for i, row in enumerate(index.tolist()):
            (gradient,) = torch.autograd.grad(out[:, row].sum(), values, retain_graph=True)
            matrix[:, :, i] = gradient.unflatten(-1, (heads, -1)).mean(dim=-1).transpose(1, 2)
    return matrix


def matrix_of(function: Callable[[Tensor], Tensor], v: Tensor, heads: int, rows: Rows) -> tuple[Tensor, float]:
    """Compute the matrix of a function of the values by differentiation at ``v``.

    The function maps (B, M, E) to (B, N, E), by one matrix (N, M) for all channels of a head. So one backward pass
    gives as many rows as a head has channels.

    Args:
        function (Callable): Function of the values.
        v (Tensor): Values (B, M, E).
        heads (int): Number of heads.
        rows (Sequence[int] | Tensor, optional): Rows to compute; None for all.

    Returns:
        tuple[Tensor, float]: The matrix (B, heads, N or len(rows), M), and the error of ``matrix @ v``: the norm of the
        difference from the function, divided by the norm of ``|matrix| @ |v|``.
    """
    with torch.inference_mode(False), torch.enable_grad():
        v = v.clone().requires_grad_()
        out = function(v).unflatten(-1, (heads, -1))  # (B, N, heads, e)
        index = _index(rows, out.shape[1]).to(v.device)
        parts = []
        channels = torch.arange(out.shape[-1], device=v.device)
        for chunk in index.split(len(channels)):
            one_hot = torch.zeros_like(out)
            one_hot[:, chunk, :, channels[: len(chunk)]] = 1
            (gradient,) = torch.autograd.grad(out, v, one_hot, retain_graph=True)
            parts.append(gradient.unflatten(-1, (heads, -1))[..., : len(chunk)].permute(0, 2, 3, 1))
    with torch.no_grad():
        matrix, values = torch.cat(parts, dim=2), split_heads(v, heads)
        bias = function(torch.zeros_like(v)).unflatten(-1, (heads, -1))  # of a convolution: no weight
        error = matrix @ values - (out - bias)[:, index].transpose(1, 2)
        size = (matrix.abs() @ values.abs()).norm().clamp(min=1e-30)
    return matrix, float(error.norm() / size)


def _index(rows: Rows, num_tokens: int) -> Tensor:
    """Return ``rows``, or the indices of all tokens if it is None, as an int64 tensor.

    Raises:
        ValueError: ``rows`` is no sequence of indices in [0, num_tokens - 1].
    """
    index = torch.arange(num_tokens) if rows is None else torch.as_tensor(rows)
    if index.numel():
        is_integer = index.dim() == 1 and not index.is_floating_point() and index.dtype != torch.bool
        if not is_integer or index.min() < 0 or index.max() >= num_tokens:
            raise ValueError(f'rows={rows!r}: expected a sequence of indices of queries in [0, {num_tokens - 1}]')
    return index.long()
