# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Capture inputs and outputs of each attention of a model during a forward pass, by hooks."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable, NamedTuple, Optional

import torch
from einops import rearrange
from torch import Tensor, nn

from ...attention import TOKEN_MIXERS, Grid, LocalMixer, StripeAttention, TokenMixer, WindowAttention, Windows
from ...attention.base import LePEMixer
from ...ops.dispatch import accumulation_dtype
from ...ops.tokens import on_grid, split_heads
from .weights import has_unit_output, local_weights, mixer_state, mixer_weights

CLASS_TOKEN, PADDING = -1, -2  # positions of tokens outside the feature map


class Window(NamedTuple):
    """Inputs and output of a mixer in one window of an image; global attention has one window.

    Attributes:
        mixer: The attention.
        inputs: Copies of the mixer's arguments for this window, by name, with a batch size of 1.
        out: Output of the mixer, (N, E).
        local: Depth-wise convolution of the values, added after the mixer.
        queries: Positions of the queries, (N,): row * columns + column of the feature map, PADDING or CLASS_TOKEN.
        keys: Positions of the keys in the feature map of the keys, (M,).
    """

    mixer: TokenMixer
    inputs: dict
    out: Tensor
    local: Optional[nn.Module]
    queries: Tensor
    keys: Tensor

    @property
    def values(self) -> Tensor:
        """Values, (heads, M, e), in float32 or better."""
        v = self.inputs['v']
        return split_heads(v.to(accumulation_dtype(v)), self.mixer.num_heads)[0]

    def weights(self, rows: Tensor, local: bool = False) -> Tensor:
        """Return the attention weights of the queries ``rows`` (indices in the window), (heads, len(rows), M). With
        ``local``, add the weights of the convolutions of the values, averaged over the channels of each head."""
        inputs = {name: value for name, value in self.inputs.items() if name not in ('v', 'context')}
        weights = mixer_weights(self.mixer, **inputs, rows=rows)[0]
        if has_unit_output(self.mixer):
            weights = weights / (weights @ self.values).norm(dim=-1, keepdim=True).clamp(min=1e-12)
        for convolve in self.convolutions() if local else ():
            weights = weights + local_weights(convolve, self.inputs['v'], len(weights), rows)[0].to(weights.dtype)
        return weights

    def convolutions(self, of_mixer: bool = False) -> list[Callable[[Tensor], Tensor]]:
        """Return the existing convolutions of the values as functions of ``v``, (1, M, E) -> (1, M, E): that of the
        mixer, then :attr:`local`. With ``of_mixer``, :attr:`local` is left out."""
        mixer: Any = self.mixer
        grid, context, v = self.inputs['key_grid'], self.inputs['context'], self.inputs['v']
        found: list[Any] = []
        if isinstance(mixer, LocalMixer) and mixer.convolve(v, grid, context) is not None:
            # a tensor of inference mode cannot be saved for a backward pass
            found.append(lambda v: mixer.convolve(v, grid, None if context is None else context.clone()))
        if self.local is not None and not of_mixer:
            found.append(lambda v: on_grid(self.local, v, grid))
        return found

    def state(self) -> Optional[Tensor]:
        """Return ``phi(keys)^T @ values``, (heads, d, e), up to one factor per head; None for an attention without
        state."""
        state = mixer_state(self.mixer, **{name: value for name, value in self.inputs.items() if name != 'context'})
        return None if state is None else state[0]

    def error(self, rows: Tensor, weights: Tensor) -> float:
        """Return the relative difference of the mixer's output from ``weights @ v`` plus the mixer's convolution, for
        the queries ``rows`` with ``weights`` (heads, len(rows), M)."""
        out = self.out[rows].to(weights.dtype)
        rest = out - rearrange(weights @ self.values, 'heads n e -> n (heads e)')
        for convolve in self.convolutions(of_mixer=True):
            rest = rest - convolve(self.inputs['v'])[0, rows].detach().to(weights.dtype)
        return float(rest.norm() / out.norm().clamp(min=1e-30))


class BlockCall(NamedTuple):
    """Inputs and outputs of one block's attention in a forward pass on one image.

    Attributes:
        name: Name of the block within the model, e.g. ``backbone.stages.0.1``.
        branches: One list of windows for all heads, or one for each direction of stripes.
        size: Height and width of the feature map of the queries.
        key_size: Height and width of the feature map of the keys.
        projected: Input of the output projection, (1, H, W, E) or (windows, N, E).
        ratio: Spatial reduction of the keys; 0 for keys on no grid (averages over the token sequence).
    """

    name: str
    branches: list[list[Window]]
    size: tuple[int, int]
    key_size: tuple[int, int]
    projected: Tensor
    ratio: int

    @property
    def windows(self) -> list[Window]:
        return [window for branch in self.branches for window in branch]

    @property
    def mixer_name(self) -> str:
        """Name of the attention as in ``stage_attns``."""
        kind = type(self.windows[0].mixer)
        return next((name for name, known in TOKEN_MIXERS.module_dict.items() if known is kind), kind.__name__)

    def features(self) -> list[tuple[Tensor, Tensor]]:
        """Return the output of the mixer and the input of the output projection for each branch. Both are (heads,
        tokens, d) with tokens in the order of the feature map."""
        pairs = []
        for branch, whole in zip(self.branches, self.projected.chunk(len(self.branches), dim=-1)):
            positions = torch.cat([window.queries for window in branch])
            mixed = self._on_map(torch.cat([window.out for window in branch]), positions)
            whole = whole[0].flatten(0, 1) if whole.dim() == 4 else self._on_map(whole.flatten(0, 1), positions)
            heads = branch[0].mixer.num_heads
            pairs.append((split_heads(mixed.float()[None], heads)[0], split_heads(whole.float()[None], heads)[0]))
        return pairs

    def _on_map(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Sort tokens (N, E) by ``positions`` (N,) in the feature map, without padding and class tokens: (H * W, E)."""
        out = tokens.new_zeros(self.size[0] * self.size[1], tokens.shape[-1])
        out[positions[positions >= 0]] = tokens[positions >= 0]
        return out


def arrangements(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost attention modules of a model by name, in module order: global, windowed and striped ones."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f'{outer}.') for outer in found)
        if isinstance(module, (LePEMixer, StripeAttention)) and not is_inner:
            found[name] = module
    return found


@contextmanager
def watched(model: nn.Module, on_block: Callable[[BlockCall], None]) -> Iterator[None]:
    """Call ``on_block`` after each block's attention, in forward passes on one image within this context.

    Gradients are disabled.

    Raises:
        ValueError: The model has no attention of this project, or the batch has several images.
        NotImplementedError: An attention has an unknown order of tokens.
    """
    attentions = arrangements(model)
    if not attentions:
        raise ValueError(f'{type(model).__name__} has no attention of mmlinattn to look into')
    handles = [handle for name, module in attentions.items() for handle in _watch(name, module, on_block)]
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(name: str, attention: Any, on_block: Callable) -> list:
    """Register hooks on an attention module, and return their handles.

    After a forward pass they call ``on_block`` with a :class:`BlockCall`. ``name`` is that of the module in the model.
    """
    calls: list[Any] = []
    projected: list[Tensor] = []
    mixing = [module for module in attention.modules() if isinstance(module, LePEMixer)]
    signature = inspect.signature(TokenMixer.forward)

    def before(mixer, args, kwargs):
        bound = signature.bind(mixer, *args, **kwargs)
        bound.apply_defaults()
        bound.arguments.pop('self')
        # copies: mixers may overwrite queries and keys, later modules the values
        calls.append({name: t.clone() if name in ('q', 'k', 'v') else t for name, t in bound.arguments.items()})

    def after(mixer, args, out):
        calls[-1] = mixer, calls[-1], out.clone()

    def finish(module, args, kwargs, out):
        x = args[0] if args else kwargs['x']
        if x.shape[0] != 1:
            raise ValueError(f'attentions are looked into one image at a time, not {x.shape[0]}')
        size, key_size, layout = _token_layout(attention, x, [inputs for _, inputs, _ in calls])
        branches: dict[Any, list] = {module.mixer: [] for module in mixing}
        convolutions = {module.mixer: module.local for module in mixing}
        for (mixer, inputs, out), positions in zip(calls, layout):
            windows = zip(_by_window(inputs, len(out)), out, *positions)
            branches[mixer] += [Window(mixer, one, o, convolutions[mixer], q, k) for one, o, q, k in windows]
        calls.clear()
        ratio = getattr(attention, 'ratio', None)
        if type(ratio) is not int:
            ratio = 1 if key_size == size else 0
        elif getattr(attention, 'reduction', 'grid') == 'sequence':  # averages lie on no grid
            ratio = 0
        used = [branch for branch in branches.values() if branch]
        on_block(BlockCall(name.removesuffix('.attn'), used, size, key_size, projected.pop(), ratio))

    handles = [
        attention.proj.register_forward_pre_hook(lambda module, args: projected.append(args[0].clone())),
        attention.register_forward_hook(finish, with_kwargs=True),
    ]
    for module in mixing:
        handles.append(module.mixer.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.mixer.register_forward_hook(after))
    return handles


def _by_window(inputs: dict, number: int) -> Iterator[dict]:
    """Split the arguments of a mixer, batched over ``number`` windows, into the arguments of each window."""
    for i in range(number):
        one = dict(inputs)
        for name in ('q', 'k', 'v', 'mask', 'bias', 'context'):
            if inputs[name] is not None and len(inputs[name]) == number:
                one[name] = inputs[name][i : i + 1]
        for name in ('grid', 'key_grid'):  # shifted windows hold regions that are no neighbours
            if inputs[name].regions is not None:
                one[name] = inputs[name]._replace(regions=inputs[name].regions[i : i + 1])
        yield one


def _token_layout(attention: Any, x: Tensor, calls: list[dict]) -> tuple[tuple, tuple, list]:
    """Find the sizes of the feature maps of queries and keys, and the positions of both in each mixer call.

    Args:
        attention (nn.Module): Arrangement of the mixer: global, windowed or striped attention.
        x (Tensor): Input of the arrangement, (1, H, W, C), or (1, N, C) with class tokens.
        calls (list[dict]): Arguments of each call of the mixer, by name.

    Returns:
        tuple[tuple, tuple, list]: Height and width of both feature maps, and for each call the positions of its queries
            and keys. Positions are (windows, tokens), numbered as in :class:`Window`.

    Raises:
        NotImplementedError: The order of the tokens is unknown.
    """
    grid, key_grid = calls[0]['grid'], calls[0]['key_grid']
    size = (x.shape[1], x.shape[2]) if x.dim() == 4 else (grid[0], grid[1])
    index = torch.arange(size[0] * size[1], device=x.device).view(1, *size, 1) - PADDING  # partitions pad with 0

    def positions(grid: Grid) -> Tensor:  # of all tokens, class tokens first
        patches = torch.arange(grid.height * grid.width, device=x.device)
        return torch.cat((patches.new_full((grid.prefix,), CLASS_TOKEN), patches))[None]

    candidates: list[Any] = []  # key size and layout
    windows: list[Any] = []
    if type(attention).forward is StripeAttention.forward:  # others may permute
        windows = [
            Windows.fit(size[0], size[1], window) for window in ((None, attention.stripe), (attention.stripe, None))
        ]
    elif type(attention).forward is WindowAttention.forward:
        windows = [Windows.fit(size[0], size[1], attention.window, attention.shift)]
    if windows:
        candidates.append((size, [(each.partition(index)[..., 0] + PADDING,) * 2 for each in windows]))
    if tuple(grid[:2]) == size:
        candidates.append((tuple(key_grid[:2]), [(positions(grid), positions(key_grid))]))
    for key_size, layout in candidates:
        shapes = [(queries.shape, keys.shape) for queries, keys in layout]
        if shapes == [(call['q'].shape[:2], call['k'].shape[:2]) for call in calls]:
            return size, key_size, layout
    raise NotImplementedError(f'{type(attention).__name__} arranges its tokens in an order unknown to the analysis')
