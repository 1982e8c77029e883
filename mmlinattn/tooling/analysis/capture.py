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
from ...attention.base import Mixing
from ...ops.dispatch import accumulation_dtype
from .weights import convolved, local_weights, mixer_weights, state_keys

CLASS_TOKEN, PADDING = -1, -2  # in place of a token's place in a map


class MixerCall(NamedTuple):
    """One call of a mixer, of a block's single image; its batch are windows.

    Attributes:
        mixer (TokenMixer): The mixer.
        given (dict): Its arguments ``q, k, v, grid, key_grid, mask, rotary, bias, context``, untouched by what it does.
        out (Tensor): What it gave, (windows, N, E).
        local (nn.Module, optional): Depth-wise convolution of the values that is added around the mixer.
        queries (Tensor): Where each query lies in the block's map, (windows, N): ``row * width + column``,
            :data:`PADDING` or :data:`CLASS_TOKEN`.
        keys (Tensor): Where each key lies in the map of the keys, (windows, M), likewise.
    """

    mixer: TokenMixer
    given: dict
    out: Tensor
    local: Any
    queries: Tensor
    keys: Tensor

    def of_window(self, window: int) -> dict:
        """The arguments of a window by itself."""
        given = dict(self.given)
        for name in ('q', 'k', 'v', 'mask', 'bias', 'context'):
            if given[name] is not None and len(given[name]) == len(self.out):
                given[name] = given[name][window : window + 1]
        for name in ('grid', 'key_grid'):  # windows of a rolled map hold regions that are no neighbours
            if given[name].regions is not None:
                given[name] = given[name]._replace(regions=given[name].regions[window : window + 1])
        return given

    def values(self, window: int) -> Tensor:
        """Values of a window by head, (heads, M, e), in float32 or better."""
        v = self.given['v'][window]
        return rearrange(v.to(accumulation_dtype(v)), 'm (heads e) -> heads m e', heads=self.mixer.num_heads)

    def weights(self, window: int, rows: Tensor, local: bool = False) -> Tensor:
        """Weights of some queries of a window, (heads, len(rows), M).

        ``local``: with the convolutions of the values, as the mean over the channels of each head.
        """
        given = self.of_window(window)
        asked = {name: given[name] for name in ('q', 'k', 'grid', 'key_grid', 'mask', 'rotary', 'bias')}
        weights = mixer_weights(self.mixer, **asked, rows=rows)[0]
        if self.mixer.unit_output:
            norm = (weights @ self.values(window)).norm(dim=-1, keepdim=True)
            weights = weights / norm.clamp(min=1e-12)
        for kernels in self.local_kernels(window) if local else ():
            weights = weights + local_weights(kernels, given['grid'], len(weights), rows)[0]
        return weights

    def local_kernels(self, window: int = 0) -> list[Tensor]:
        """Kernels (1, E, k, k) of the convolutions of the values of a window: the mixer's own and that around it."""
        around = None if self.local is None else self.local.weight[None, :, 0]
        own = self.mixer.local_kernels(self.of_window(window)['context'])
        return [kernels.detach() for kernels in (own, around) if kernels is not None]

    def state(self, window: int) -> Optional[Tensor]:
        """The buffer of keys and values, (heads, d, e); None for an attention without one."""
        given = self.of_window(window)
        q, k = given['q'].float(), given['k'].float()
        keys = state_keys(self.mixer, q, k, given['key_grid'], given['mask'], given['rotary'])
        return None if keys is None else keys[0].mT @ self.values(window).to(keys.dtype)

    def error(self, window: int, rows: Tensor, weights: Tensor) -> float:
        """How far ``weights @ v``, with the mixer's own convolution, is from what the mixer gave, relative."""
        given = self.of_window(window)
        out = self.out[window, rows].to(weights.dtype)
        rest = out - rearrange(weights @ self.values(window), 'heads n e -> n (heads e)')
        own = self.mixer.local_kernels(given['context'])
        if own is not None:
            rest = rest - convolved(given['v'].to(weights.dtype), own.detach(), given['grid'])[0, rows]
            rest = rest - rest.mean(dim=0)  # the bias of a convolution is no weight
        return float(rest.norm() / out.norm().clamp(min=1e-30))


class BlockCall(NamedTuple):
    """The calls of one block's attention for an image.

    Attributes:
        name (str): Of the block within the model, ``backbone.stages.0.1``.
        calls (list[MixerCall]): One for each group of windows of one size, and each direction of stripes.
        size (tuple[int, int]): Height and width of the map of the queries.
        key_size (tuple[int, int]): Those of the map of the keys.
        projected (Tensor): What entered the output projection, (1, H, W, E) or (windows, N, E).
        ratio (int): Reduction of the keys' map; 0 for keys that lie on no map (averages over the token sequence).
    """

    name: str
    calls: list[MixerCall]
    size: tuple[int, int]
    key_size: tuple[int, int]
    projected: Tensor
    ratio: int

    @property
    def branches(self) -> list[list[MixerCall]]:
        """Calls by mixer: one group for all heads, or one for each direction of stripes."""
        groups: dict[int, list[MixerCall]] = {}
        for call in self.calls:
            groups.setdefault(id(call.mixer), []).append(call)
        return list(groups.values())

    @property
    def mixer_name(self) -> str:
        """Name of the attention as in ``stage_attns``."""
        kind = type(self.calls[0].mixer)
        return next((name for name, known in TOKEN_MIXERS.module_dict.items() if known is kind), kind.__name__)

    def features(self) -> list[tuple[Tensor, Tensor]]:
        """For each branch the output of the mixer, and the input of the output projection (with convolution and gate):
        (heads, tokens of the map, d) both."""
        found = []
        for branch, whole in zip(self.branches, self.projected.chunk(len(self.branches), dim=-1)):
            places = torch.cat([call.queries.flatten() for call in branch])
            mixed = self._on_map(torch.cat([call.out.flatten(0, 1) for call in branch]), places)
            whole = whole[0].flatten(0, 1) if whole.dim() == 4 else self._on_map(whole.flatten(0, 1), places)
            heads = branch[0].mixer.num_heads
            by_head = [rearrange(t.float(), 'n (heads e) -> heads n e', heads=heads) for t in (mixed, whole)]
            found.append((by_head[0], by_head[1]))
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
        if isinstance(module, (Mixing, StripeAttention)) and not inner:
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


def reduction_of(attention: nn.Module) -> int:
    """By how much an arrangement reduces the map of its keys; 0 where they are averages over the sequence of tokens,
    which lie on no map."""
    return 0 if getattr(attention, 'reduction', 'grid') == 'sequence' else getattr(attention, 'ratio', 1)


def watch_mixers(module: nn.Module, see: Callable) -> list:
    """Hooks that show each call of a mixer in a module to ``see(mixer, arguments, out)``.

    The arguments are those of :meth:`mmlinattn.attention.TokenMixer.forward` by their names. Tokens are copied: a mixer
    may overwrite its queries and keys, and what follows the values.
    """
    kept, signature, handles = {}, inspect.signature(TokenMixer.forward), []

    def before(mixer, args, kwargs):
        given = signature.bind(mixer, *args, **kwargs)
        given.apply_defaults()
        kept[mixer] = {name: t.clone() if name in ('q', 'k', 'v') else t for name, t in given.arguments.items()}

    def after(mixer, args, out):
        see(mixer, kept.pop(mixer), out)

    for mixer in module.modules():
        if isinstance(mixer, TokenMixer):
            handles.append(mixer.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(mixer.register_forward_hook(after))
    return handles


def _watch(name: str, attention: Any, on_block: Callable) -> list:
    calls: list[tuple] = []
    projected: list[Tensor] = []
    locals_ = {id(m.mixer): m.local for m in attention.modules() if isinstance(m, Mixing)}

    def keep(mixer, given, out):
        calls.append((mixer, given, out.clone()))

    def finish(module, args, kwargs, out):
        x = args[0] if args else kwargs['x']
        if x.shape[0] != 1:
            raise ValueError(f'attentions are looked into one image at a time, not {x.shape[0]}')
        size, key_size, layout = token_layout(attention, x, [given for _, given, _ in calls])
        made = [
            MixerCall(mixer, given, out, locals_.get(id(mixer)), queries, keys)
            for (mixer, given, out), (queries, keys) in zip(calls, layout)
        ]
        calls.clear()
        ratio = reduction_of(attention)
        on_block(BlockCall(name.removesuffix('.attn'), made, size, key_size, projected.pop(), ratio))

    return [
        attention.proj.register_forward_pre_hook(lambda module, args: projected.append(args[0].clone())),
        attention.register_forward_hook(finish, with_kwargs=True),
        *watch_mixers(attention, keep),
    ]


def token_layout(attention: nn.Module, x: Tensor, given: list[dict]) -> tuple[tuple, tuple, list]:
    """Size of the map, size of the map of the keys, and for each call of a mixer where its queries and keys lie.

    Args:
        attention (nn.Module): The arrangement.
        x (Tensor): What it was given: (1, H, W, C) or, with class tokens, (1, N, C).
        given (list[dict]): Arguments of the calls, in their order.

    Raises:
        NotImplementedError: For an arrangement that is none of ours and no whole map.
    """
    grid, key_grid = given[0]['grid'], given[0]['key_grid']
    size = (x.shape[1], x.shape[2]) if x.dim() == 4 else (grid[0], grid[1])
    index = torch.arange(size[0] * size[1], device=x.device).view(1, *size, 1) - PADDING  # partitions pad with 0

    def windowed(windows: Any) -> tuple[Tensor, Tensor]:
        where = windows.partition(index)[..., 0] + PADDING
        return where, where

    candidates = []  # key size and layout
    if isinstance(attention, StripeAttention):
        stripes = ((None, attention.stripe), (attention.stripe, None))
        candidates.append((size, [windowed(Windows.fit(size[0], size[1], window)) for window in stripes]))
    elif isinstance(attention, WindowAttention):
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
