# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The maps that attentions never build, for whoever looks inside: analysis and tests, not the forward pass.

Plain functions in float32 or better. A linear attention is a product of mapped queries with a small state; here the
order of the products is turned round, which gives the (B, heads, N, M) weights of the same result.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from ..ops.forms import accumulation_dtype, without_autocast
from ..ops.masks import padded_eps
from ..ops.rotary.reference import rotate
from .grid import Grid

Rows = Optional[Union[Sequence[int], Tensor]]


class Factors(NamedTuple):
    """What the weights of a linear attention are made of: ``weights = queries @ keys^T + constant``.

    Its state, the buffer of keys and values, is ``keys^T @ v``.

    Attributes:
        queries: (B, heads, N, d), already divided by the normaliser where the attention has one.
        keys: (B, heads, M, d), zero where masked.
        constant: Broadcastable to (B, heads, N, M): the part of the weights that does not go through the state.
    """

    queries: Tensor
    keys: Tensor
    constant: Optional[Tensor] = None

    def weights(self, rows: Optional[Tensor] = None) -> Tensor:
        """(B, heads, N or len(rows), M)."""
        queries = self.queries if rows is None else self.queries[:, :, rows]
        weights = queries @ self.keys.transpose(-1, -2)
        return weights if self.constant is None else weights + self.constant


def checked_rows(rows: Rows, num_tokens: int, device: torch.device) -> Optional[Tensor]:
    """Indices of queries as a tensor.

    Raises:
        ValueError: For indices that are no integers in [0, ``num_tokens``), or not in one dimension.
    """
    if rows is None:
        return None
    index = torch.as_tensor(rows, device=device)
    whole = index.numel() == 0 or not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
    if index.dim() != 1 or not whole:
        raise ValueError(f'rows={rows!r} have to be a sequence of indices of queries')
    index = index.long()
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < num_tokens:
        raise ValueError(
            f'rows from {int(index.min())} to {int(index.max())} have to lie in [0, {num_tokens - 1}], '
            f'the queries of this grid'
        )
    return index


def _real(mask: Optional[Tensor], like: Tensor) -> tuple[Tensor, Optional[Tensor]]:
    """Number of real keys and the mask in numbers, (B, 1, M, 1); (B, heads, M, d) ``like``."""
    if mask is None:
        return like.new_tensor(like.shape[2]), None
    real = mask[:, None, :, None].to(like.dtype)
    return real.sum(dim=2, keepdim=True).clamp(min=1), real


def linear_factors(q: Tensor, k: Tensor, mask: Optional[Tensor] = None, eps: float = 1e-6) -> Factors:
    """Of linear attention with division, ``q_i . k_j / N / (q_i . mean(k) + eps)`` (Katharopoulos et al. 2020, Eq. 5).

    Args:
        q, k (Tensor): Mapped queries (B, heads, N, d) and keys (B, heads, M, d).
        mask (Tensor, optional): (B, M) bool, True for real keys.
        eps (float): Added to the normaliser.
    """
    count, real = _real(mask, k)
    k = (k if real is None else k * real) / count
    normaliser = q @ k.sum(dim=2, keepdim=True).transpose(-1, -2) + padded_eps(eps, mask, q.dtype)
    return Factors(q / normaliser, k)


def inline_factors(q: Tensor, k: Tensor, scale: float, mask: Optional[Tensor] = None) -> Factors:
    """Of injective linear attention, ``(scale q_i . (k_j - mean(k)) + 1) / N`` (InLine Eq. 3-5).

    The state is ``scale`` times the covariance of keys and values; the mean value, ``1 / N`` of each, goes past it.

    Args:
        q, k, mask: As in :func:`linear_factors`.
        scale (float): ``d ** -0.5`` in the release.
    """
    count, real = _real(mask, k)
    if real is None:
        real = k.new_ones(1, 1, k.shape[2], 1)
    mean = (k * real).sum(dim=2, keepdim=True) / count
    return Factors(q, (k - mean) * real * (scale / count), (real / count).transpose(-1, -2))


def rala_factors(
    q: Tensor,
    k: Tensor,
    rotary: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    weight_scale: Optional[float] = 1.0,
    eps: float = 1e-6,
) -> Factors:
    """Of rank-augmented linear attention (RALA Eq. 2-4): the keys of the state carry their token weights ``a_j``.

    Args:
        q, k (Tensor): Mapped queries and keys, (B, heads, N, d).
        rotary (Tensor, optional): (N, d / 2, 2), in the numerator only.
        mask (Tensor, optional): (B, N) bool, True for real tokens.
        weight_scale (float, optional): Scale of the token weights' logits; None weighs all tokens alike.
        eps (float): Added to the normaliser.
    """
    count, real = _real(mask, k)
    if weight_scale is None:
        weight = (k.new_ones(1, 1, k.shape[2], 1) if real is None else real) / count
    else:
        query = (q if real is None else q * real).sum(dim=2, keepdim=True) / count
        logits = (k @ query.transpose(-1, -2)) * weight_scale
        if real is not None:
            logits = logits.masked_fill(real == 0, torch.finfo(k.dtype).min)
        weight = logits.softmax(dim=2)
        weight = weight if real is None else weight * real
    k = k * weight
    normaliser = q @ k.sum(dim=2, keepdim=True).transpose(-1, -2) + padded_eps(eps, mask, q.dtype)
    q = q / normaliser
    if rotary is not None:
        rotary = rotary.to(q.dtype)
        q, k = rotate(q, rotary), rotate(k, rotary)
    return Factors(q, k)


def softmax_weights(
    q: Tensor,
    k: Tensor,
    mask: Optional[Tensor] = None,
    rotary: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    rows: Rows = None,
) -> Tensor:
    """``softmax(q k^T / sqrt(d) + bias)`` over the real keys (Vaswani et al. 2017, Eq. 1).

    Args:
        q, k (Tensor): Queries (B, heads, N, d) and keys (B, heads, M, d).
        mask (Tensor, optional): (B, M) bool, True for real keys.
        rotary (Tensor, optional): (N, d / 2, 2).
        bias (Tensor, optional): Additive, broadcastable to (B, heads, N, M).
        rows (Sequence[int] | Tensor, optional): The queries wanted, all by default.

    Returns:
        Tensor: (B, heads, N or len(rows), M), zero at masked keys.
    """
    with without_autocast(q):
        wide = accumulation_dtype(q)
        q, k, rows = q.to(wide), k.to(wide), checked_rows(rows, q.shape[2], q.device)
        if rotary is not None:
            rotary = rotary.to(wide)
            q, k = rotate(q, rotary), rotate(k, rotary)
        if rows is not None:
            if bias is not None and bias.dim() > 1 and bias.shape[-2] > 1:
                bias = bias.index_select(-2, rows)
            q = q[:, :, rows]
        logits = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        if bias is not None:
            logits = logits + bias.to(wide)
        if mask is None:
            return logits.softmax(dim=-1)
        real = mask[:, None, None, :]
        return logits.masked_fill(~real, torch.finfo(wide).min / 4).softmax(dim=-1) * real.to(wide)


def mixer_weights(
    mixer,
    q: Tensor,
    k: Tensor,
    grid: Grid,
    key_grid: Grid,
    mask: Optional[Tensor] = None,
    rotary: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    rows: Rows = None,
) -> Tensor:
    """The weights of any mixer: from its ``factors``, or from its answers to values that are one in a single place.

    Args and returns: See :meth:`mmlinattn.attention.TokenMixer.weights`.

    Raises:
        ValueError: For ``rows`` out of range.
        NotImplementedError: For a mixer without ``factors`` whose output is not one matrix a head times the values.
    """
    with without_autocast(q):
        wide = accumulation_dtype(q)
        rows = checked_rows(rows, q.shape[1], q.device)
        factors = mixer.factors(q.to(wide), k.to(wide), grid, key_grid, mask, rotary)
        if factors is not None:
            return factors.weights(rows)
        return _probed_weights(mixer, q, k, grid, key_grid, mask, rotary, bias, rows)


def _probed_weights(mixer, q, k, grid, key_grid, mask, rotary, bias, rows) -> Tensor:
    name, heads, width = type(mixer).__name__, mixer.num_heads, mixer.widths[2]
    refusal = f'{name} has no weights(): what it gives is not one matrix a head times the values'
    if mixer.context or width % heads:
        raise NotImplementedError(refusal)
    each, (batch, tokens) = width // heads, k.shape[:2]
    real = None if mask is None else mask.unsqueeze(-1).to(k.dtype)

    def mixed(v):
        v = v if real is None else v * real
        # a mixer may overwrite its queries and keys
        out = mixer(q.clone(), k.clone(), v, grid, key_grid, mask=mask, rotary=rotary, bias=bias)
        return (out if rows is None else out[:, rows]).unflatten(-1, (heads, each)).transpose(1, 2)

    columns, channel = [], torch.arange(each, device=k.device)
    for start in range(0, tokens, each):  # a key a channel: one pass answers for as many keys as a head has channels
        keys = channel[: tokens - start]
        v = k.new_zeros(batch, tokens, heads, each)
        v[:, start + keys, :, keys] = 1
        columns.append(mixed(v.flatten(2))[..., : len(keys)])
    weights = torch.cat(columns, dim=-1)
    values = torch.rand(batch, tokens, width, generator=torch.Generator().manual_seed(0)).to(k)
    by_head = (values if real is None else values * real).unflatten(-1, (heads, each)).transpose(1, 2)
    error = (weights @ by_head - mixed(values)).abs().max()
    if not error <= 1e-3 * max(1.0, float(weights.abs().sum(dim=-1).max())):
        raise NotImplementedError(f'{refusal} (off by {float(error):.2g})')
    return weights


def local_weights(kernels: Tensor, grid: Grid, rows: Rows = None) -> Tensor:
    """A depth-wise convolution of the values as the matrix it is; its bias is no weight.

    Args:
        kernels (Tensor): (B or 1, C, k, k), k odd, for each channel.
        grid (Grid): Of the tokens; class tokens have no neighbours.
        rows (Sequence[int] | Tensor, optional): The queries wanted, all by default.

    Returns:
        Tensor: (B or 1, C, N or len(rows), N).
    """
    tokens, reach = grid.num_tokens, kernels.shape[-1] // 2
    rows = checked_rows(rows, tokens, kernels.device)
    rows = torch.arange(tokens, device=kernels.device) if rows is None else rows
    patch, key = rows - grid.prefix, torch.arange(grid.height * grid.width, device=kernels.device)
    dy = key // grid.width - torch.div(patch, grid.width, rounding_mode='floor')[:, None]  # (rows, M)
    dx = key % grid.width - patch[:, None] % grid.width
    inside = (dy.abs() <= reach) & (dx.abs() <= reach) & (patch[:, None] >= 0)
    tap = ((dy + reach) * kernels.shape[-1] + dx + reach).where(inside, dy.new_zeros(()))
    weights = kernels.flatten(2)[..., tap] * inside.to(kernels.dtype)
    return torch.nn.functional.pad(weights, (grid.prefix, 0))
