# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The maps that attentions never build, for whoever looks inside: analysis and tests, not the forward pass.

Plain functions in float32 or better. A linear attention is a product of mapped queries with a small state; here the
order of the products is turned round, which gives the (B, heads, N, M) weights of the same result.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from ..ops.dispatch import accumulation_dtype, without_autocast
from ..ops.masks import padded_eps
from ..ops.rotary import rotate_reference as rotate
from .grid import Grid

Rows = Optional[Union[Sequence[int], Tensor]]


class Factors(NamedTuple):
    """What the weights of a linear attention are made of: ``weights = queries @ keys^T + constant``.

    Its state, the buffer of keys and values, is ``keys^T @ v``.

    Attributes:
        queries: (B, heads, N, d), already divided by the normaliser where the attention has one.
        keys: (B, heads, M, d), zero where masked.
        constant: Broadcastable to (B, heads, N, M): the part of the weights that does not go through the state.
        own: (B or 1, 1, 1, M): what each token's weight of itself has more, where queries and keys are the same tokens.
    """

    queries: Tensor
    keys: Tensor
    constant: Optional[Tensor] = None
    own: Optional[Tensor] = None

    def weights(self, rows: Optional[Tensor] = None) -> Tensor:
        """(B, heads, N or len(rows), M)."""
        rows = torch.arange(self.queries.shape[2], device=self.queries.device) if rows is None else rows
        weights = self.queries[:, :, rows] @ self.keys.transpose(-1, -2)
        if self.own is not None:
            itself = torch.arange(weights.shape[-1], device=rows.device) == rows[:, None]
            weights = weights + self.own * itself.to(weights.dtype)
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


def hydra_factors(q: Tensor, k: Tensor, mask: Optional[Tensor] = None) -> Factors:
    """Of Hydra attention, ``q_ic k_jc`` of tokens of length one: a map for each channel c (Bolya et al. 2022, Eq. 7).

    Args:
        q, k (Tensor): Queries (B, N, C) and keys (B, M, C).
        mask (Tensor, optional): (B, M) bool, True for real keys.
    """
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    k = k if mask is None else k * mask.unsqueeze(-1).to(k.dtype)
    return Factors(*(t.transpose(1, 2).unsqueeze(-1) for t in (q, k)))


def efficient_factors(q: Tensor, k: Tensor, mask: Optional[Tensor] = None) -> Factors:
    """Of Efficient attention, softmax over the channels of queries and over the tokens of keys (Shen et al. 2021,
    Eq. 5); arguments by head as in :func:`linear_factors`."""
    _, real = _real(mask, k)
    if real is None:
        return Factors(q.softmax(dim=-1), k.softmax(dim=2))
    return Factors(q.softmax(dim=-1), k.masked_fill(real == 0, torch.finfo(k.dtype).min / 4).softmax(dim=2) * real)


def angular_factors(q: Tensor, k: Tensor, mask: Optional[Tensor] = None, released: bool = True) -> Factors:
    """Of linear angular attention on tokens of length one (You et al. 2023, Eq. 6).

    The released form is ``q_i . k_j / pi``, and 1/2 more of the token's own value; outputs are divided by their norm
    afterwards, which depends on the values and is no part of the weights. The paper's is ``1/2 + q_i . k_j / pi``,
    divided by its sum; the 1/2 is one more channel of queries and keys.

    Args:
        q, k, mask: By head as in :func:`linear_factors`.
        released (bool): Which form.
    """
    _, real = _real(mask, k)
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    if released:
        if real is None:
            real = k.new_ones(1, 1, k.shape[2], 1)
        return Factors(q / math.pi, k * real, own=real.transpose(-1, -2) / 2)
    q = torch.cat((q / math.pi, torch.full_like(q[..., :1], 0.5)), dim=-1)
    k = torch.cat((k, torch.ones_like(k[..., :1])), dim=-1)
    k = k if real is None else k * real
    total = q @ k.sum(dim=2, keepdim=True).transpose(-1, -2)
    # an item of padding alone has no weights to divide
    return Factors(q / total.where(total != 0, torch.ones_like(total)), k)


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


def softmax_of_logits(logits: Tensor, mask: Optional[Tensor], bias: Optional[Tensor], rows: Optional[Tensor]) -> Tensor:
    """Softmax of (B, heads, n, M) over the real keys, zero at the others; ``bias`` of all queries, of which ``rows``
    count."""
    if bias is not None:
        if rows is not None and bias.dim() > 1 and bias.shape[-2] > 1:
            bias = bias.index_select(-2, rows)
        logits = logits + bias.to(logits.dtype)
    if mask is None:
        return logits.softmax(dim=-1)
    real = mask[:, None, None, :]
    return logits.masked_fill(~real, torch.finfo(logits.dtype).min / 4).softmax(dim=-1) * real.to(logits.dtype)


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
        q = q if rows is None else q[:, :, rows]
        return softmax_of_logits((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5, mask, bias, rows)


def hallucinated_weights(
    q: Tensor,
    k: Tensor,
    copies: Tensor,
    cross: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    rows: Rows = None,
) -> Tensor:
    """Real maps and those derived from them, after the softmax (hMHSA Eq. 2).

    Args:
        q, k (Tensor): Queries (B, h/2, N, d) and keys (B, h/2, M, d) of the real heads.
        copies (Tensor): Keys after IHH, (B, 1, h/2, M, d) or (B, h/2, h/2, M, d): those that each hallucinated head
            mixes, where each has its own.
        cross (Tensor, optional): c of CHH, (h/2, h/2); without it the i-th hallucinated head is of the i-th real one.
        mask, bias, rows: As in :func:`softmax_weights`.

    Returns:
        Tensor: (B, h, N or len(rows), M), real heads first.
    """
    with without_autocast(q):
        wide = accumulation_dtype(q)
        q, k, copies, rows = q.to(wide), k.to(wide), copies.to(wide), checked_rows(rows, q.shape[2], q.device)
        q = q if rows is None else q[:, :, rows]
        scale = q.shape[-1] ** -0.5
        real = (q @ k.transpose(-1, -2)) * scale
        if cross is None:
            hallucinated = (q @ copies[:, 0].transpose(-1, -2)) * scale
        else:
            # of each hallucinated head the mixed queries, (B, h/2, h/2, N, d): one product of width C/2
            mixed = q.unsqueeze(1) * (cross.to(wide) * scale)[:, :, None, None]
            mixed, copies = (t.transpose(2, 3).flatten(3) for t in (mixed, copies))
            hallucinated = mixed @ copies.transpose(-1, -2)
        return softmax_of_logits(torch.cat((real, hallucinated), dim=1), mask, bias, rows)


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
    if not error <= 1e-3 * max(1.0, weights.abs().sum(dim=-1).max().item()):
        raise NotImplementedError(f'{refusal} (off by {float(error):.2g})')
    return weights


def local_weights(kernels: Tensor, grid: Grid, rows: Rows = None) -> Tensor:
    """A depth-wise convolution of the values as the matrix it is; its bias is no weight.

    Args:
        kernels (Tensor): (B or 1, C, k, k), k odd, for each channel; (B or 1, C, k, 1) goes over the sequence of all
            tokens instead of their grid.
        grid (Grid): Of the tokens; class tokens have no neighbours.
        rows (Sequence[int] | Tensor, optional): The queries wanted, all by default.

    Returns:
        Tensor: (B or 1, C, N or len(rows), N).
    """
    if kernels.shape[-1] < kernels.shape[-2]:
        grid = Grid(grid.num_tokens, 1)
    tokens, (high, wide) = grid.num_tokens, (size // 2 for size in kernels.shape[-2:])
    rows = checked_rows(rows, tokens, kernels.device)
    rows = torch.arange(tokens, device=kernels.device) if rows is None else rows
    patch, key = rows - grid.prefix, torch.arange(grid.height * grid.width, device=kernels.device)
    dy = key // grid.width - torch.div(patch, grid.width, rounding_mode='floor')[:, None]  # (rows, M)
    dx = key % grid.width - patch[:, None] % grid.width
    inside = (dy.abs() <= high) & (dx.abs() <= wide) & (patch[:, None] >= 0)
    tap = ((dy + high) * kernels.shape[-1] + dx + wide).where(inside, dy.new_zeros(()))
    weights = kernels.flatten(2)[..., tap] * inside.to(kernels.dtype)
    return torch.nn.functional.pad(weights, (grid.prefix, 0))
