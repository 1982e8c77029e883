# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Records the attentions of a running model, block by block, through hooks: no second copy of any model."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable, NamedTuple, Optional

import torch
from einops import rearrange
from torch import Tensor, nn

from ...attention import TOKEN_MIXERS, Grid, StripeAttention, TokenMixer, WindowAttention, Windows
from ...attention.base import LePEMixer
from ...ops.dtypes import accumulation_dtype
from ...ops.heads import split_heads
from .weights import convolved, local_weights, mixer_state, mixer_weights

CLASS_TOKEN, PADDING = -1, -2  # in place of a token's place in a map


class Window(NamedTuple):
    """What a mixer did in one window, or in the whole map, of an image."""

    mixer: TokenMixer
    given: dict  # its arguments, untouched by what it does, of this window alone: batches of one
    out: Tensor  # what it gave, (N, E)
    local: Optional[nn.Module]  # depth-wise convolution of the values that is added around the mixer
    # where each query lies in the block's map, (N,): row * width + column, PADDING or CLASS_TOKEN
    queries: Tensor
    keys: Tensor  # where each key lies in the map of the keys, (M,), likewise

    @property
    def values(self) -> Tensor:
        """By head, (heads, M, e), in float32 or better."""
        v = self.given['v']
        return split_heads(v.to(accumulation_dtype(v)), self.mixer.num_heads)[0]

    def weights(self, rows: Tensor, local: bool = False) -> Tensor:
        """Weights of some queries, (heads, len(rows), M).

        ``local``: with the convolutions of the values, as the mean over the channels of each head.
        """
        asked = {name: given for name, given in self.given.items() if name not in ('v', 'context')}
        weights = mixer_weights(self.mixer, **asked, rows=rows)[0]
        if self.mixer.unit_output:
            norm = (weights @ self.values).norm(dim=-1, keepdim=True)
            weights = weights / norm.clamp(min=1e-12)
        for kernels in self.local_kernels() if local else ():
            weights = weights + local_weights(kernels, self.given['grid'], len(weights), rows)[0]
        return weights

    def local_kernels(self) -> list[Tensor]:
        """Kernels (1, E, k, k) of the convolutions of the values: the mixer's own and that around it."""
        around = None if self.local is None else self.local.weight[None, :, 0]  # type: ignore[index]
        own = self.mixer.local_kernels(self.given['context'])
        return [kernels.detach() for kernels in (own, around) if kernels is not None]

    def state(self) -> Optional[Tensor]:
        """The product of keys and values, (heads, d, e); None for an attention without one."""
        found = mixer_state(self.mixer, **{name: given for name, given in self.given.items() if name != 'context'})
        return None if found is None else found[0]

    def error(self, rows: Tensor, weights: Tensor) -> float:
        """How far ``weights @ v``, with the mixer's own convolution, is from what the mixer gave, relative."""
        out = self.out[rows].to(weights.dtype)
        rest = out - rearrange(weights @ self.values, 'heads n e -> n (heads e)')
        own = self.mixer.local_kernels(self.given['context'])
        if own is not None:
            rest = rest - convolved(self.given['v'].to(weights.dtype), own.detach(), self.given['grid'])[0, rows]
            rest = rest - rest.mean(dim=0)  # the bias of a convolution is no weight
        return float(rest.norm() / out.norm().clamp(min=1e-30))


class BlockCall(NamedTuple):
    """What one block's attention did with an image."""

    name: str  # of the block within the model, backbone.stages.0.1
    branches: list[list[Window]]  # one list for all heads, or one for each direction of stripes
    size: tuple[int, int]  # height and width of the map of the queries
    key_size: tuple[int, int]  # those of the map of the keys
    projected: Tensor  # what entered the output projection, (1, H, W, E) or (windows, N, E)
    ratio: int  # reduction of the keys' map; 0 for keys that lie on no map (averages over the token sequence)

    @property
    def windows(self) -> list[Window]:
        return [window for branch in self.branches for window in branch]

    @property
    def mixer_name(self) -> str:
        """Name of the attention as in ``stage_attns``."""
        kind = type(self.windows[0].mixer)
        return next((name for name, known in TOKEN_MIXERS.module_dict.items() if known is kind), kind.__name__)

    def features(self) -> list[tuple[Tensor, Tensor]]:
        """For each branch the output of the mixer, and the input of the output projection (with convolution and gate):
        (heads, tokens of the map, d) both."""
        found = []
        for branch, whole in zip(self.branches, self.projected.chunk(len(self.branches), dim=-1)):
            places = torch.cat([window.queries for window in branch])
            mixed = self._on_map(torch.cat([window.out for window in branch]), places)
            whole = whole[0].flatten(0, 1) if whole.dim() == 4 else self._on_map(whole.flatten(0, 1), places)
            heads = branch[0].mixer.num_heads
            found.append((split_heads(mixed.float()[None], heads)[0], split_heads(whole.float()[None], heads)[0]))
        return found

    def _on_map(self, tokens: Tensor, places: Tensor) -> Tensor:
        out = tokens.new_zeros(self.size[0] * self.size[1], tokens.shape[-1])
        out[places[places >= 0]] = tokens[places >= 0]
        return out


def arrangements(model: nn.Module) -> dict[str, nn.Module]:
    """The attentions of a model, in all arrangements, in the order in which they were built."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inner = any(name.startswith(f'{known}.') for known in found)
        if isinstance(module, (LePEMixer, StripeAttention)) and not inner:
            found[name] = module
    return found


@contextmanager
def watched(model: nn.Module, on_block: Callable[[BlockCall], None]) -> Iterator[None]:
    """A context in which each block's attention is shown to ``on_block`` as soon as it has run on one image.

    Args:
        model (nn.Module): A backbone, or any model that has one.
        on_block (Callable): Called with each :class:`BlockCall`; what it does not keep is freed.

    Raises:
        ValueError: For a model without attentions of this project, or a batch of several images.
        NotImplementedError: For an arrangement that is none of ours and no whole map.
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
    calls: list[Any] = []
    projected: list[Tensor] = []
    mixing = [module for module in attention.modules() if isinstance(module, LePEMixer)]
    signature = inspect.signature(TokenMixer.forward)

    def before(mixer, args, kwargs):
        given = signature.bind(mixer, *args, **kwargs)
        given.apply_defaults()
        given.arguments.pop('self')
        # copies: a mixer may overwrite its queries and keys, and what follows the values
        calls.append({name: t.clone() if name in ('q', 'k', 'v') else t for name, t in given.arguments.items()})

    def after(mixer, args, out):
        calls[-1] = mixer, calls[-1], out.clone()

    def finish(module, args, kwargs, out):
        x = args[0] if args else kwargs['x']
        if x.shape[0] != 1:
            raise ValueError(f'attentions are looked into one image at a time, not {x.shape[0]}')
        size, key_size, layout = _token_layout(attention, x, [given for _, given, _ in calls])
        branches: dict[Any, list] = {module.mixer: [] for module in mixing}
        locals_ = {module.mixer: module.local for module in mixing}
        for (mixer, given, out), places in zip(calls, layout):
            windows = zip(_by_window(given, len(out)), out, *places)
            branches[mixer] += [Window(mixer, one, o, locals_[mixer], q, k) for one, o, q, k in windows]
        calls.clear()
        ratio = getattr(attention, 'ratio', None)
        if type(ratio) is not int:
            ratio = 1 if key_size == size else 0
        elif getattr(attention, 'reduction', 'grid') == 'sequence':  # averages that lie on no map
            ratio = 0
        shown = list(filter(None, branches.values()))
        on_block(BlockCall(name.removesuffix('.attn'), shown, size, key_size, projected.pop(), ratio))

    handles = [
        attention.proj.register_forward_pre_hook(lambda module, args: projected.append(args[0].clone())),
        attention.register_forward_hook(finish, with_kwargs=True),
    ]
    for module in mixing:
        handles.append(module.mixer.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.mixer.register_forward_hook(after))
    return handles


def _by_window(given: dict, number: int) -> Iterator[dict]:
    """A mixer's arguments for each window of its batch by itself."""
    for i in range(number):
        one = dict(given)
        for name in ('q', 'k', 'v', 'mask', 'bias', 'context'):
            if given[name] is not None and len(given[name]) == number:
                one[name] = given[name][i : i + 1]
        for name in ('grid', 'key_grid'):  # windows of a rolled map hold regions that are no neighbours
            if given[name].regions is not None:
                one[name] = given[name]._replace(regions=given[name].regions[i : i + 1])
        yield one


def _token_layout(attention: nn.Module, x: Tensor, given: list[dict]) -> tuple[tuple, tuple, list]:
    """Size of the map, size of the map of the keys, and for each call of a mixer, whose arguments are ``given``, where
    its queries and keys lie. ``x``: (1, H, W, C) or, with class tokens, (1, N, C)."""
    grid, key_grid = given[0]['grid'], given[0]['key_grid']
    size = (x.shape[1], x.shape[2]) if x.dim() == 4 else (grid[0], grid[1])
    index = torch.arange(size[0] * size[1], device=x.device).view(1, *size, 1) - PADDING  # partitions pad with 0

    def windowed(windows: Any) -> tuple[Tensor, Tensor]:
        where = windows.partition(index)[..., 0] + PADDING
        return where, where

    candidates = []  # key size and layout
    keeps_order = type(attention).forward in (WindowAttention.forward, StripeAttention.forward)  # others may permute
    if isinstance(attention, StripeAttention) and keeps_order:
        stripes = ((None, attention.stripe), (attention.stripe, None))
        candidates.append((size, [windowed(Windows.fit(size[0], size[1], window)) for window in stripes]))
    elif isinstance(attention, WindowAttention) and keeps_order:
        windows: Any = Windows.fit(size[0], size[1], attention.window, attention.shift)
        candidates.append((size, [windowed(windows)]))
    if tuple(grid[:2]) == size:
        candidates.append((tuple(key_grid[:2]), [(_whole(grid, x.device), _whole(key_grid, x.device))]))
    for key_size, layout in candidates:
        shapes = [(queries.shape, keys.shape) for queries, keys in layout]
        if shapes == [(call['q'].shape[:2], call['k'].shape[:2]) for call in given]:
            return size, key_size, layout
    raise NotImplementedError(f'{type(attention).__name__} lays its tokens in a way that the analysis does not know')


def _whole(grid: Grid, device) -> Tensor:
    """Positions of the tokens of a whole map, class tokens first: (1, N)."""
    patches = torch.arange(grid.height * grid.width, device=device)
    return torch.cat((patches.new_full((grid.prefix,), CLASS_TOKEN), patches))[None]
