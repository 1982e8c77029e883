# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the attentions of a running model see, block by block, through hooks: no second copy of any model."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Callable, NamedTuple, Optional

import torch
from einops import rearrange
from torch import Tensor, nn

from ..attention import TOKEN_MIXERS, Grid, StripeAttention, TokenMixer, WindowAttention, Windows
from ..attention.base import Mixing
from .weights import convolved, local_weights, state_keys

PADDING, CLASS_TOKEN = -1, -2


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
    local: Optional[nn.Module]
    queries: Tensor
    keys: Tensor

    def weights(self, window: int, rows: Tensor, local: bool = False) -> Tensor:
        """Weights of some queries of a window, (heads, len(rows), M).

        ``local``: with the convolutions of the values, as the mean over the channels of each head.
        """
        given, one = self.given, slice(window, window + 1)
        mask, bias = given['mask'], given['bias']
        if bias is not None and bias.dim() == 4 and bias.shape[0] > 1:
            bias = bias[one]
        grids = [given['grid'], given['key_grid']]
        for i, grid in enumerate(grids):  # windows of a rolled map hold regions that are no neighbours
            if grid.regions is not None:
                grids[i] = grid._replace(regions=grid.regions[[window % len(grid.regions)]])
        weights = self.mixer.weights(
            given['q'][one],
            given['k'][one],
            *grids,
            mask=None if mask is None else mask[one],
            rotary=given['rotary'],
            bias=bias,
            rows=rows,
        )[0]
        if self.mixer.unit_output:
            norm = (weights @ self._values(window, len(weights)).to(weights.dtype)).norm(dim=-1, keepdim=True)
            weights = weights / norm.clamp(min=1e-12)
        for kernels in self.local_kernels() if local else ():
            kernels = kernels[one] if len(kernels) > 1 else kernels
            weights = weights + local_weights(kernels, given['grid'], len(weights), rows)[0]
        return weights

    def _values(self, window: int, heads: int) -> Tensor:
        """Values of a window by head, (heads, M, e)."""
        return rearrange(self.given['v'][window], 'm (heads e) -> heads m e', heads=heads)

    def local_kernels(self) -> list[Tensor]:
        """Kernels (windows or 1, E, k, k) of the convolutions of the values, of the mixer's own and that around it."""
        kernels = [] if self.local is None else [self.local.weight.detach()[None, :, 0]]
        own = self.mixer.local_kernels(self.given['context'])
        return kernels if own is None else [own.detach(), *kernels]

    def state(self, window: int) -> Optional[Tensor]:
        """The buffer of keys and values, (heads, d, e); None for an attention without one."""
        given, one = self.given, slice(window, window + 1)
        q, k = (given[name][one].float() for name in 'qk')
        mask = None if given['mask'] is None else given['mask'][one]
        keys = state_keys(self.mixer, q, k, given['key_grid'], mask, given['rotary'])
        return None if keys is None else keys[0].mT @ self._values(window, keys.shape[1]).to(keys.dtype)

    def error(self, window: int, rows: Tensor, weights: Tensor) -> float:
        """How far ``weights @ v`` is from what the mixer gave, relative; its own convolution taken off, whose bias is
        no weight."""
        mixed = weights @ self._values(window, len(weights)).to(weights.dtype)
        mixed = rearrange(mixed, 'heads n e -> n (heads e)')
        out = self.out[window, rows].to(weights.dtype)
        own = self.mixer.local_kernels(self.given['context'])
        if own is not None:
            v = self.given['v'][window : window + 1].to(weights.dtype)
            rest = out - mixed - convolved(v, own[window if len(own) > 1 else 0][None], self.given['grid'])[0, rows]
            return float((rest - rest.mean(dim=0)).norm() / out.norm().clamp(min=1e-30))
        return float((out - mixed).norm() / out.norm().clamp(min=1e-30))


class BlockCall(NamedTuple):
    """What one block's attention saw of an image.

    Attributes:
        name (str): Of the block within the model, ``backbone.stages.0.1``.
        attention (nn.Module): The arrangement: whole map, reduced keys, windows or stripes.
        calls (list[MixerCall]): One for each group of windows of one size, and each direction of stripes.
        size (tuple[int, int]): Height and width of the map of the queries.
        key_size (tuple[int, int]): Those of the map of the keys.
        projected (Tensor): What entered the output projection, (1, H, W, E) or (windows, N, E).
        ratio (int): Reduction of the keys' map; 0 for keys that lie on no map (averages over the token sequence).
    """

    name: str
    attention: nn.Module
    calls: list[MixerCall]
    size: tuple[int, int]
    key_size: tuple[int, int]
    projected: Tensor
    ratio: int = 1

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
        names = [name for name, known in TOKEN_MIXERS.module_dict.items() if known is kind]
        return names[0] if names else kind.__name__

    def features(self) -> list[tuple[Tensor, Tensor]]:
        """Of each branch the output of the mixer, and that with convolution and gate as it enters the output
        projection: (heads, tokens of the map, d) both."""
        found = []
        for branch, whole in zip(self.branches, self.projected.chunk(len(self.branches), dim=-1)):
            places = torch.cat([call.queries.flatten() for call in branch])
            mixed = self._on_map(torch.cat([call.out.flatten(0, 1) for call in branch]), places)
            whole = whole[0].flatten(0, 1) if whole.dim() == 4 else self._on_map(whole.flatten(0, 1), places)
            heads = branch[0].mixer.num_heads
            found.append(tuple(rearrange(t.float(), 'n (heads e) -> heads n e', heads=heads) for t in (mixed, whole)))
        return found

    def _on_map(self, tokens: Tensor, places: Tensor) -> Tensor:
        out = tokens.new_zeros(self.size[0] * self.size[1], tokens.shape[-1])
        out[places[places >= 0]] = tokens[places >= 0]
        return out


def arrangements(model: nn.Module) -> dict[str, nn.Module]:
    """The attentions of a model, whatever lays tokens around its mixers, in the order in which they were built."""
    found = {}
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
    """Hooks that show each call of a mixer in a module to ``see(mixer, arguments, out)``; what that gives, if anything,
    takes the place of ``out``.

    The arguments are those of :meth:`mmlinattn.attention.TokenMixer.forward` by their names. Tokens are copied: a mixer
    may overwrite its queries and keys, and what follows the values.
    """
    kept, signature, handles = {}, inspect.signature(TokenMixer.forward), []

    def before(mixer, args, kwargs):
        given = signature.bind(mixer, *args, **kwargs)
        given.apply_defaults()
        given = {name: t.clone() if name in ('q', 'k', 'v') else t for name, t in given.arguments.items()}
        kept[mixer] = {**given, 'key_grid': given['key_grid'] or given['grid']}

    def after(mixer, args, out):
        return see(mixer, kept.pop(mixer), out)

    for mixer in module.modules():
        if isinstance(mixer, TokenMixer):
            handles.append(mixer.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(mixer.register_forward_hook(after))
    return handles


def _watch(name: str, attention: nn.Module, on_block: Callable) -> list:
    calls: list[tuple] = []
    projected: list[Tensor] = []
    block = name[: -len('.attn')] if name.endswith('.attn') else name
    locals_ = {id(m.mixer): m.local for m in attention.modules() if isinstance(m, Mixing)}

    def begin(module, args):
        calls.clear(), projected.clear()  # of a pass that raised halfway

    def keep(mixer, given, out):
        calls.append((mixer, given, out.clone()))

    def finish(module, args, kwargs, out):
        if not calls:
            return
        x = args[0] if args else kwargs['x']
        if x.shape[0] != 1:
            raise ValueError(f'attentions are looked into one image at a time, not {x.shape[0]}')
        size, key_size, layout = token_layout(attention, x, [given for _, given, _ in calls])
        made = [
            MixerCall(mixer, given, out, locals_.get(id(mixer)), queries, keys)
            for (mixer, given, out), (queries, keys) in zip(calls, layout)
        ]
        calls.clear()
        on_block(BlockCall(block, attention, made, size, key_size, projected[-1], reduction_of(attention)))

    return [
        attention.register_forward_pre_hook(begin),
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
    size = tuple(x.shape[1:3]) if x.dim() == 4 else tuple(grid[:2])
    index = torch.arange(1, size[0] * size[1] + 1, device=x.device).view(1, *size, 1)  # partitions pad with 0

    def windowed(windows: Windows, part: Tensor = index) -> tuple[Tensor, Tensor]:
        where = windows.partition(part)[..., 0] - 1
        return where, where

    candidates = []
    if isinstance(attention, StripeAttention):
        stripes = ((size[0], attention.stripe), (attention.stripe, size[1]))
        candidates.append([windowed(Windows.fit(*size, window)) for window in stripes])
    elif isinstance(attention, WindowAttention):
        windows = Windows.fit(*size, attention.window, attention.shift)
        candidates.append([windowed(windows)])
        candidates.append([windowed(part, index[:, rows, columns]) for rows, columns, part in windows.regions()])
    if (grid.height, grid.width) == size:
        candidates.append([(_whole(grid, x.device), _whole(key_grid, x.device))])
    for layout in candidates:
        shapes = [(queries.shape, keys.shape) for queries, keys in layout]
        if shapes == [(call['q'].shape[:2], call['k'].shape[:2]) for call in given]:
            reduced = layout[0][0].shape != layout[0][1].shape
            return size, tuple(key_grid[:2]) if reduced else size, layout
    raise NotImplementedError(f'{type(attention).__name__} lays its tokens in a way that the analysis does not know')


def _whole(grid: Grid, device) -> Tensor:
    """Positions of the tokens of a whole map, class tokens first: (1, N)."""
    patches = torch.arange(grid.height * grid.width, device=device)
    return torch.cat((patches.new_full((grid.prefix,), CLASS_TOKEN), patches))[None]
