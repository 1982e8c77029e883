# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The maps that attentions never build: their weights, and the keys that their states are made of."""

import copy
import functools
from collections.abc import Sequence
from typing import Callable, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ...attention import Grid, TokenMixer
from ...attention.angular import AngularMixer
from ...attention.efficient import EfficientMixer
from ...attention.enhanced import EnhancedMixer
from ...attention.focused import FocusedMixer
from ...attention.hydra import HydraMixer
from ...attention.inline import InLineMixer
from ...attention.rala import RALAMixer
from ...ops.dispatch import accumulation_dtype, without_autocast
from ...ops.feature_maps import feature_map, unit
from ...ops.focused import focused_map
from ...ops.grid import to_map, to_tokens
from ...ops.rank_augmented import token_weights
from ...ops.rotary import rotate_reference
from ...ops.tensors import split_heads

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
        rows (Sequence[int] | Tensor, optional): The queries wanted, all by default. Ask for a few at a time where N is
            large.

    Returns:
        Tensor: (B, heads, N or len(rows), M), in float32 or better; zero at masked keys.

    Raises:
        ValueError: For ``rows`` out of range.
        NotImplementedError: For a mixer whose output is not one matrix a head times the values.
    """
    wide = accumulation_dtype(q)
    if any(p.dtype != wide for p in mixer.parameters()):
        mixer = copy.deepcopy(mixer).to(wide)
    if mixer.unit_output:
        mixer = copy.copy(mixer)
        mixer.unit_output = False
    context = q.new_zeros(len(q), mixer.dim, dtype=wide) if mixer.context else None
    rotary, bias = (None if t is None else t.to(wide) for t in (rotary, bias))
    refusal = f'{type(mixer).__name__} has no weights: what it gives is not one matrix a head times the values'
    if mixer.context and mixer.local_kernels(context) is None:
        raise NotImplementedError(refusal)

    def mixed(v: Tensor) -> Tensor:
        v = v if mask is None else v * mask.unsqueeze(-1).to(wide)
        # not as a module, whose hooks watch the model; a mixer may overwrite its queries and keys
        given = q.detach().to(wide, copy=True), k.detach().to(wide, copy=True), v
        out = mixer.forward(*given, grid, key_grid, mask=mask, rotary=rotary, bias=bias, context=context)
        own = mixer.local_kernels(context)
        return out if own is None else out - convolved(v, own, key_grid)

    with without_autocast(q), ops.use('reference'):
        v = torch.rand(*k.shape[:2], mixer.widths[2], generator=torch.Generator().manual_seed(0)).to(k.device, wide)
        weights, error = matrix_of(mixed, v, mixer.num_heads, rows)
    if not error <= 1e-3:  # nor NaN
        raise NotImplementedError(f'{refusal} (off by {error:.2g})')
    return weights


def local_weights(kernels: Tensor, grid: Grid, heads: int, rows: Rows = None) -> Tensor:
    """A depth-wise convolution of the values as the matrix it is, mean over the channels of each head.

    Args:
        kernels (Tensor): (B or 1, C, k, k), k odd, for each channel; (B or 1, C, k, 1) goes over the sequence of all
            tokens instead of their grid.
        grid (Grid): Of the tokens; class tokens have no neighbours.
        heads (int): Heads that the channels are split into.
        rows (Sequence[int] | Tensor, optional): The queries wanted, all by default.

    Returns:
        Tensor: (B or 1, heads, N or len(rows), N).
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

    Args:
        function (Callable): Of values (B, M, C); gives (B, N, C).
        v (Tensor): Any values.
        heads (int): Heads that the channels are split into.
        rows (Sequence[int] | Tensor, optional): The rows wanted, all by default.

    Returns:
        tuple[Tensor, float]: (B, heads, N or len(rows), M), and how far it times ``v`` is from what the function gives,
        relative to the products that are added up.

    Raises:
        ValueError: For ``rows`` that are no indices of queries.
    """
    with torch.inference_mode(False), torch.enable_grad():
        v = v.clone().requires_grad_()
        out = function(v).unflatten(-1, (heads, -1))  # (B, N, heads, e)
        index = _checked_rows(rows, out.shape[1], v.device)
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


def _checked_rows(rows: Rows, num_tokens: int, device: torch.device) -> Tensor:
    index = torch.arange(num_tokens, device=device) if rows is None else torch.as_tensor(rows, device=device)
    if index.numel():
        whole = index.dim() == 1 and not index.is_floating_point() and index.dtype != torch.bool
        if not whole or index.min() < 0 or index.max() >= num_tokens:
            raise ValueError(f'rows={rows!r} have to be a sequence of indices of queries in [0, {num_tokens - 1}]')
    return index.long()


# --- states -----------------------------------------------------------------------------------------------------------


@functools.singledispatch
def state_keys(
    mixer: TokenMixer, q: Tensor, k: Tensor, key_grid: Grid, mask: Optional[Tensor], rotary: Optional[Tensor]
) -> Optional[Tensor]:
    """The keys of which a linear attention's state ``keys^T @ values`` is made, up to a factor a head.

    ``state_keys.register`` takes those of another mixer.

    Args:
        mixer (TokenMixer): The attention.
        q, k, key_grid, mask, rotary: As in :meth:`mmlinattn.attention.TokenMixer.forward`, in float32 or better.

    Returns:
        Tensor | None: (B, heads, M, d); any numbers where masked, as values are zero there. None for an attention
        without a state, as softmax.
    """
    return None


def _mean(t: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Mean of the real tokens of (B, heads, M, d)."""
    if mask is None:
        return t.mean(dim=2, keepdim=True)
    real = mask[:, None, :, None]
    return (t * real).sum(dim=2, keepdim=True) / real.sum(dim=2, keepdim=True).clamp(min=1)


@state_keys.register
def _(mixer: RALAMixer, q, k, key_grid, mask, rotary):
    q, k = (feature_map(split_heads(t, mixer.num_heads), mixer.kernel) for t in (q, k))
    if mixer.weight_scale is not None:  # Eq. 3
        k = k * token_weights(k @ _mean(q, mask).mT * mixer.weight_scale, mask)
    return k if rotary is None else rotate_reference(k, rotary.to(k.dtype))


@state_keys.register
def _(mixer: InLineMixer, q, k, key_grid, mask, rotary):
    k = feature_map(split_heads(k, mixer.num_heads), mixer.kernel)
    return k - _mean(k, mask) if mixer.injective else k  # the state is the covariance of keys and values


@state_keys.register
def _(mixer: FocusedMixer, q, k, key_grid, mask, rotary):
    if mixer.position is not None:
        k = k + mixer.position.on(key_grid).to(k.dtype)
    scale = mixer.scale  # None without focus
    k = k.relu() + 1e-6 if scale is None else focused_map(k, 1 / F.softplus(scale), mixer.power)
    return split_heads(k, mixer.num_heads)


@state_keys.register
def _(mixer: EfficientMixer, q, k, key_grid, mask, rotary):
    return token_weights(split_heads(k, mixer.num_heads), mask)  # softmax over the tokens, channel by channel


@state_keys.register
def _(mixer: EnhancedMixer, q, k, key_grid, mask, rotary):
    return split_heads(k.relu(), mixer.num_heads)


@state_keys.register
def _(mixer: AngularMixer, q, k, key_grid, mask, rotary):
    return unit(split_heads(k, mixer.num_heads))


@state_keys.register
def _(mixer: HydraMixer, q, k, key_grid, mask, rotary):
    return split_heads(unit(k), mixer.num_heads)  # a head a channel; of tokens of length one
