# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The first call of each shape beside the plain form: one image and one head of it, the last ones.

The trial (:mod:`.trial`) knows one small shape; splits, offsets beyond 32 bits and a user's own numbers are those of
real calls. Costs a reference on one head, once a shape in a process. Nothing is compared while a CUDA graph is
captured, where the plain form gives nothing finite itself, or where memory does not suffice for it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import canary, compat

# Largest deviation of a token's channels, relative to their norm and the root mean square of all tokens' norms. In the
# interpreter, which cuts bfloat16 off, the kernels have up to a fifth of it.
BOUNDS = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 5e-2}
IN_INTERPRETER = False  # whether calls of the interpreter are compared, for tests

_seen: set[tuple] = set()


def is_due(variant: NamedTuple, direction: str, *shapes: torch.Size) -> bool:
    """Whether this call is the first of its shapes, and is to be compared."""
    key = (variant, direction, *shapes)
    if (compat.INTERPRETED and not IN_INTERPRETER) or key in _seen or canary.trusts:
        return False
    if variant.device.type == 'cuda' and torch.cuda.is_current_stream_capturing():  # type: ignore[attr-defined]
        return False
    _seen.add(key)
    return True


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that the plain form is computed in: one that rounds much less."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def agrees(
    variant: NamedTuple,
    direction: str,
    ours: Sequence[Tensor],
    plain: Callable[[torch.dtype], Sequence[Tensor]],
) -> bool:
    """Whether a kernel's results are no further from the plain form than its type explains. If not, it serves no more
    in this process, and one warning says so.

    Args:
        variant (NamedTuple): What the kernel is compiled for.
        direction (str): ``'forward'`` or ``'backward'``.
        ours (Sequence[Tensor]): Its results.
        plain (callable): Gives the same results by the plain form, computed in the type it is asked for.
    """
    try:
        with torch.autocast(ours[0].device.type, enabled=False):
            exact = plain(wide_dtype(variant.dtype))  # type: ignore[attr-defined]
            if not all(t.isfinite().all() for t in exact):
                return True
            found, allowed = deviation(ours, exact), BOUNDS[variant.dtype]  # type: ignore[attr-defined]
            if found < allowed:
                return True
            # numbers that cancel out leave the plain form in the same type no better off
            allowed = max(allowed, 4 * deviation(plain(variant.dtype), exact))  # type: ignore[attr-defined]
    except torch.cuda.OutOfMemoryError:
        return True
    if found <= allowed:
        return True
    canary.fail(variant, direction, f'in a call it deviates by {found:.1g}, where {allowed:.1g} is allowed')
    return False


def deviation(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest one, see :data:`BOUNDS`; infinite where something is not finite."""
    largest = 0.0
    for mine, theirs in zip(ours, exact):
        norms = theirs.norm(dim=-1)
        typical = norms.square().mean().sqrt().clamp(min=1e-30)
        found = ((mine.to(theirs.dtype) - theirs).norm(dim=-1) / (norms + typical)).nan_to_num(nan=torch.inf)
        largest = max(largest, found.max().item())
    return largest
