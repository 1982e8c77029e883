# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""How many programs of :mod:`.attention_kernels` run, and the memory between them."""

import dataclasses
import functools
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import attention_kernels as kernels
from . import compat

KERNELS = ('identity', 'elu', 'relu', 'leakyrelu', 'exp', 'softmax')  # and 'focused'
# Float32 products keep two parts of each operand in shared memory. Those of heads of 96 (RAVLT-B and -L) compile to 144
# to 272 KB of it, where consumer GPUs have 99 and an H100 227: in float32, such heads stay with plain PyTorch.
WIDEST_HEAD = {torch.float32: 64, torch.float16: 128, torch.bfloat16: 128}
WIDEST_TOKEN = 4096  # of a focused map: all channels of a token are in one tile
# tokens below which a program is not worth its start; sums over splits are made by one program
FEWEST_TOKENS, MOST_SPLITS = 256, 128
# programs that a multiprocessor runs at a time, by their registers; the time, in tokens, that
# beginning and ending take: a program writes a state, which is read again
PROGRAMS, TOKENS_A_PROGRAM = 2, 128
COMBINED_ROWS = 16


class NoKernel(RuntimeError):
    """A kernel does not compile here."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """One linear attention, but for its tensors.

    Args:
        heads (int): Number of heads.
        kernel (str): phi, one of ``KERNELS`` or ``'focused'``.
        centred (bool): ``phi(q) cov(k, v) scale + mean(v)`` in place of the division (InLine).
        weighted (bool): Keys weigh ``softmax(scale mean(q) . k)`` (RALA).
        scale (float): See ``centred`` and ``weighted``.
        eps (float): Added to the normaliser; of the focused map, too.
        power (float): Of the focused map.
    """

    heads: int
    kernel: str
    centred: bool = False
    weighted: bool = False
    scale: float = 1.0
    eps: float = 1e-6
    power: float = 1.0


@dataclasses.dataclass
class Saved:
    """What a backward pass reads besides queries, keys and values; all but the rows is small."""

    state: Tensor  # (B, heads, d, e)
    key_mean: Tensor  # (B, heads, d)
    value_mean: Optional[Tensor]  # (B, heads, e)
    stats: Tensor  # (B, heads, 2): largest logit, sum of weights
    query_mean: Optional[Tensor]  # (B, heads, d)
    query_rows: Optional[Tensor]  # (3, B, N), see kernels.focus_rows
    key_rows: Optional[Tensor]  # (3, B, M)


def serves(
    spec: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    offset: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
) -> bool:
    """Whether there are kernels for these tensors, which have to be of exactly the shapes of :func:`forward`. Where
    not, the plain form serves: it broadcasts what can be broadcast, and raises on what cannot be."""
    tensors, heads = (q, k, v), spec.heads
    if not (heads > 0 and all(t.dim() == 3 and t.numel() and t.shape[-1] % heads == 0 for t in tensors)):
        return False
    (batch, tokens, channels), keys, d, e = q.shape, k.shape[1], q.shape[-1] // heads, v.shape[-1] // heads
    if k.shape != (batch, keys, channels) or v.shape[:2] != (batch, keys):
        return False
    others = (
        (rotary, (tokens, d // 2, 2)),
        (mask, (batch, keys)),
        (offset, (batch, keys, channels)),
        (scale, (channels,)),
    )
    return (
        (q.is_cuda or compat.INTERPRETED)
        and q.dtype in WIDEST_HEAD
        and max(d, e) <= WIDEST_HEAD[q.dtype]
        and all(t.dtype == q.dtype and t.device == q.device for t in (k, v))
        and all(t is None or (t.shape == shape and t.device == q.device) for t, shape in others)
        and (mask is None or mask.dtype == torch.bool)
        and (rotary is None or d % 2 == 0)
    )


def rows_first(x: Tensor) -> Tensor:
    """``x`` where the channels of a token lie side by side, and tokens are whole 32-bit offsets apart."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up. Triton's own function takes microseconds."""
    return -(-a // b)


@functools.lru_cache(maxsize=4096)
def _width(channels: int) -> int:
    return max(16, 1 << (channels - 1).bit_length())


class Plan(NamedTuple):
    """Settings of the kernels for one tensor of tokens.

    Attributes:
        splits (int): Spans that the tokens are cut into.
        grid (tuple): One program a span, head and image.
        sizes (dict): Of the tensor and the spans.
        widths, both (dict): Of the tiles of keys, and of keys and values.
        rows (dict): Tokens of a tile, warps and stages.
    """

    splits: int
    grid: tuple[int]
    sizes: dict[str, int]
    widths: dict[str, int]
    both: dict[str, int]
    rows: dict[str, int]


@functools.lru_cache(maxsize=4096)
def plan(
    batch: int, tokens: int, heads: int, d: int, e: int, dtype: torch.dtype, at_once: int, fewest: int = FEWEST_TOKENS
) -> Plan:
    """See :class:`Plan`. All but the spans follows from head width and type: another size of images compiles nothing.

    Args:
        at_once (int): Programs that the GPU runs at a time.
        fewest (int): Tokens of a span.
    """
    width, width_v = _width(d), _width(e)
    widest = max(width, width_v)
    # as many rows as leave two or more blocks of the backward kernels their registers (not measured), and everything
    # within 99 KB of shared memory; products of so few rows are no wgmma, either
    rows, stages = (32, 2) if widest <= 64 else (16, 1)
    if dtype == torch.float32:
        rows = 32 if widest <= 32 else 16
    span = cdiv(cdiv(tokens, fewest_waves(batch * heads, tokens, at_once, fewest)), rows) * rows
    splits = cdiv(tokens, span)
    return Plan(
        splits,
        (batch * heads * splits,),
        dict(tokens=tokens, heads=heads, splits=splits, span=span),
        dict(D=d, WIDTH=width),
        dict(D=d, E=e, WIDTH=width, WIDTH_V=width_v),
        dict(ROWS=rows, num_warps=8 if widest > 32 else 4, num_stages=stages),
    )


def fewest_waves(owners: int, tokens: int, at_once: int, fewest: int) -> int:
    """How many spans the tokens of each of ``owners`` are cut into, for the least time: programs run in waves of
    ``at_once``, and a wave takes as long as its tokens and :data:`TOKENS_A_PROGRAM`."""

    def time(splits: int) -> int:
        return cdiv(owners * splits, at_once) * (cdiv(tokens, splits) + TOKENS_A_PROGRAM)

    return min(range(1, min(MOST_SPLITS, cdiv(tokens, fewest)) + 1), key=time)


@functools.cache
def programs_at_once(device: torch.device) -> int:
    """Programs of the larger kernels that a GPU runs at a time; a hundred or so where kernels are interpreted."""
    if device.type != 'cuda':
        return 100
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def launch(kernel, grid: tuple, device: torch.device, *args, **settings) -> None:
    """Run a kernel.

    Raises:
        NoKernel: It does not compile here.
    """
    if compat.INTERPRETED:
        settings.pop('num_warps', None)
        settings.pop('num_stages', None)
        kernel[grid](*args, **settings)
        return
    with torch.cuda.device(device):
        try:
            kernel[grid](*args, **settings)
        except Exception as error:
            if not compat.is_compile_error(error):
                raise
            raise NoKernel(f'{kernel.__name__}: {type(error).__name__}: {error}') from error


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that kernels write to; :mod:`.trial` puts guards around it."""
    return torch.empty(shape, dtype=dtype, device=device)


def _strides(x: Optional[Tensor]) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _counts(mask: Optional[Tensor], k: Tensor) -> Tensor:
    """Number of real tokens of each image, at least 1, float32."""
    if mask is None:
        return torch.full((k.shape[0],), k.shape[1], dtype=torch.float32, device=k.device)
    return mask.sum(dim=1).clamp_(min=1).float()


def _focus_rows(x: Tensor, offset: Optional[Tensor], scale: Tensor, spec: Attention) -> Tensor:
    batch, tokens, channels = x.shape
    width = _width(channels)
    rows = max(1, 4096 // width)
    out = empty(3, batch, tokens, dtype=torch.float32, device=x.device)
    launch(
        kernels.focus_rows, (cdiv(batch * tokens, rows),), x.device,
        x, offset, scale, out, *_strides(x), *_strides(offset), tokens, batch * tokens, spec.eps,
        POWER=spec.power, HAS_OFFSET=offset is not None, C=channels, ROWS=rows, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out


def forward(
    spec: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    offset: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
) -> tuple[Tensor, Saved]:
    """The output (B, N, E), and what the backward pass reads.

    Args:
        spec (Attention): Which attention.
        q, k, v (Tensor): (B, N, C), (B, M, C), (B, M, E), of one type, channels side by side.
        rotary (Tensor, optional): (N, d / 2, 2), contiguous.
        mask (Tensor, optional): (B, M) bool, contiguous.
        offset (Tensor, optional): Added to the keys of a focused map, (B, M, C); any but the last stride may be 0.
        scale (Tensor, optional): Of a focused map, (C,).
    """
    batch, tokens, heads = q.shape[0], q.shape[1], spec.heads
    d, e = q.shape[-1] // heads, v.shape[-1] // heads
    rest = heads, d, e, q.dtype, programs_at_once(q.device), FEWEST_TOKENS
    over_keys, over_queries = plan(batch, k.shape[1], *rest), plan(batch, tokens, *rest)
    splits, device = over_keys.splits, q.device

    def buffer(*shape: int) -> Tensor:
        return empty(batch, heads, *shape, dtype=torch.float32, device=device)

    focused = spec.kernel == 'focused'
    saved = Saved(
        state=buffer(d, e),
        key_mean=buffer(d),
        value_mean=buffer(e) if spec.centred else None,
        stats=buffer(2),
        query_mean=buffer(d) if spec.weighted else None,
        query_rows=_focus_rows(q, None, scale, spec) if focused else None,
        key_rows=_focus_rows(k, offset, scale, spec) if focused else None,
    )
    flags = dict(KERNEL=spec.kernel, HAS_MASK=mask is not None)
    count = query_parts = None
    if spec.weighted:
        count, query_parts = _counts(mask, k), buffer(splits, d)
        launch(
            kernels.sum_queries, over_keys.grid, device, q, mask, query_parts, *_strides(q),
            **over_keys.sizes, **over_keys.widths, **over_keys.rows, **flags,
        )  # fmt: skip
    parts, key_parts, stats = buffer(splits, d, e), buffer(splits, d), buffer(splits, 2)
    more_parts = buffer(splits, e) if spec.centred else None
    flags.update(POWER=spec.power, HAS_ROTARY=rotary is not None, CENTRED=spec.centred)
    launch(
        kernels.sum_keys, over_keys.grid, device,
        k, v, mask, rotary, count, query_parts, saved.query_mean, offset, scale, saved.key_rows,
        parts, key_parts, more_parts, stats, *_strides(k), *_strides(v), *_strides(offset),
        **over_keys.sizes, weight_scale=spec.scale, eps=spec.eps, **flags,
        HAS_OFFSET=offset is not None, WEIGHTED=spec.weighted, **over_keys.both, **over_keys.rows,
    )  # fmt: skip
    launch(
        kernels.combine, (batch * heads, cdiv(d, COMBINED_ROWS)), device,
        parts, key_parts, more_parts, stats, saved.state, saved.key_mean, saved.value_mean, saved.stats, splits,
        spec.scale, CENTRED=spec.centred, D=d, E=e, WIDTH_V=_width(e), ROWS=COMBINED_ROWS, MOST_SPLITS=MOST_SPLITS,
    )  # fmt: skip
    out = empty(batch, tokens, v.shape[-1], dtype=v.dtype, device=device)
    del flags['HAS_MASK']
    launch(
        kernels.mix_values, over_queries.grid, device,
        q, rotary, scale, saved.query_rows, saved.state, saved.key_mean, saved.value_mean, saved.stats, out,
        *_strides(q), *_strides(out), **over_queries.sizes, eps=spec.eps, map_eps=spec.eps, **flags,
        **over_queries.both, **over_queries.rows,
    )  # fmt: skip
    return out, saved


def backward(
    spec: Attention,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Saved,
    grads: tuple[Tensor, Tensor, Tensor],
    rotary: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    offset: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
) -> Optional[Tensor]:
    """Write the gradients of queries, keys and values to ``grads``, which have the shapes of ``q, k, v`` and channels
    side by side; returns that of ``scale``, in float32. Other arguments as in :func:`forward`."""
    batch, tokens, heads = q.shape[0], q.shape[1], spec.heads
    d, e = q.shape[-1] // heads, v.shape[-1] // heads
    rest = heads, d, e, q.dtype, programs_at_once(q.device), FEWEST_TOKENS
    over_keys, over_queries = plan(batch, k.shape[1], *rest), plan(batch, tokens, *rest)
    splits, device = over_queries.splits, q.device
    grad_q, grad_k, grad_v = grads

    def buffer(*shape: int) -> Tensor:
        return empty(batch, heads, *shape, dtype=torch.float32, device=device)

    focused, divides = spec.kernel == 'focused', not spec.centred
    parts = buffer(splits, d, e)
    key_parts, more_parts = buffer(splits, d) if divides else None, None if divides else buffer(splits, e)
    # (B, tokens, heads): those of one token side by side
    dots = [empty(batch, x.shape[1], heads, dtype=torch.float32, device=device) if focused else None for x in (q, k)]
    scale_parts = [buffer(each.splits, d) if focused else None for each in (over_queries, over_keys)]
    query_grad_parts = buffer(over_keys.splits, d) if spec.weighted else None
    count = _counts(mask, k) if spec.weighted else None
    flags = dict(
        KERNEL=spec.kernel, POWER=spec.power, HAS_MASK=mask is not None, HAS_ROTARY=rotary is not None,
        WEIGHTED=spec.weighted, CENTRED=spec.centred,
    )  # fmt: skip
    writes_at_once = not focused and not spec.weighted

    def over_all_queries(sums: bool, writes: bool) -> None:
        launch(
            kernels.queries_backward, over_queries.grid, device,
            q, grad, mask if spec.weighted else None, rotary, count, scale, saved.query_rows,
            saved.state, saved.key_mean, saved.stats, query_grad_parts if writes else None,
            *((parts, key_parts, more_parts) if sums else (None,) * 3), dots[0],
            grad_q if writes else None, scale_parts[0],
            *_strides(q), *_strides(grad), *_strides(grad_q), **over_queries.sizes, eps=spec.eps, map_eps=spec.eps,
            **dict(flags, HAS_MASK=mask is not None and spec.weighted), SUM=sums, WRITE=writes,
            **over_queries.both, **over_queries.rows,
        )  # fmt: skip

    def over_all_keys(values: bool, keys: bool) -> None:
        launch(
            kernels.keys_backward, over_keys.grid, device,
            k, v, mask, rotary, saved.query_mean, offset, scale, saved.key_rows,
            grad_state, grad_mean, grad_more, saved.key_mean, saved.value_mean, saved.stats,
            inner_parts, dots[1], query_grad_parts, scale_parts[1],
            grad_k if keys else None, grad_v if values else None,
            *_strides(k), *_strides(v), *_strides(offset), *_strides(grad_k), *_strides(grad_v), **over_keys.sizes,
            weight_scale=spec.scale, eps=spec.eps, **flags, HAS_OFFSET=offset is not None, VALUES=values, KEYS=keys,
            INNER_PARTS=row_blocks, **over_keys.both, **over_keys.rows,
        )  # fmt: skip

    row_blocks = cdiv(d, COMBINED_ROWS)
    grad_state, grad_mean, grad_more = buffer(d, e), buffer(d), None if divides else buffer(e)
    inner_parts = buffer(row_blocks)
    over_all_queries(True, writes_at_once)
    launch(
        kernels.combine_backward, (batch * heads, row_blocks), device,
        parts, key_parts, more_parts, saved.stats, saved.state, saved.key_mean, grad_state, grad_mean, grad_more,
        inner_parts, splits, spec.scale if spec.centred else 1.0,
        CENTRED=spec.centred, D=d, E=e, WIDTH_V=_width(e), ROWS=COMBINED_ROWS,
    )  # fmt: skip
    over_all_keys(True, not focused)
    if not writes_at_once:
        over_all_queries(False, True)
    if not focused:
        return None
    over_all_keys(False, True)
    return sum(part.sum(dim=(0, 2)).flatten() for part in scale_parts)
