# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""A kernel serves on a GPU after it was run there beside the plain form, forward and backward, on a small input.

The trial (:mod:`.trial`) is in a process of its own, which an illegal access ends in place of ours. Passed trials are
kept in the cache folder, for this GPU, its driver, these releases and these sources. The first call of each shape is
compared, too. What fails leaves the plain form in its place, with one warning.

While a CUDA graph is captured there is neither. Where several processes train together, each makes its own trials:
nobody waits for ranks that do not come this way, and the plain form computes the same.
"""

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
import triton
from torch import Tensor

from ... import version
from . import compat

DIRECTIONS = ('forward', 'backward')
SECONDS = 300  # for a trial, less than process groups wait for a rank
# Largest deviation of a token's channels, relative to their norm and the root mean square of all tokens' norms. In the
# interpreter, which cuts bfloat16 off, the kernels have up to a fifth of it.
BOUNDS = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 5e-2}
COMPARES_IN_INTERPRETER = False  # for tests

_verdicts: dict[NamedTuple, tuple[str, ...]] = {}  # which directions of a kernel serve
_lock = threading.Lock()
_compared: set[tuple] = set()
trusts = False  # whether every kernel serves, as in a trial


def fail(variant: NamedTuple, direction: str, fault: object) -> None:
    """A kernel does not compile, or went wrong in a call: it serves no more in this process."""
    _verdicts[variant] = _verdicts.get(variant, DIRECTIONS)[:1] if direction == 'backward' else ()
    _warn(variant, {direction: fault})


def allows(variant: NamedTuple, backward: bool) -> bool:
    """Whether a kernel may serve, as far as is known now.

    Args:
        variant (NamedTuple): What it is compiled for.
        backward (bool): Whether its gradients are wanted as well.
    """
    passed = _verdicts.get(variant)
    if passed is None:
        if trusts or compat.INTERPRETED:
            return True
        with _lock:
            passed = _verdict(variant)
        if passed is None:
            return False
        _verdicts[variant] = passed
    return passed == DIRECTIONS or (not backward and 'forward' in passed)


def _verdict(variant: NamedTuple) -> Optional[tuple[str, ...]]:
    """Directions that passed; None where that cannot be found out now."""
    place, name = environment(variant.device), name_of(variant)
    if name in _kept().get(place, ()):
        return DIRECTIONS
    if torch.cuda.is_current_stream_capturing():
        return None
    faults = ask(variant)
    passed = tuple(direction for direction in DIRECTIONS if not faults[direction])
    if passed == DIRECTIONS:
        _keep(place, name)
    else:
        _warn(variant, faults)
    return passed


def _warn(variant: NamedTuple, faults: dict[str, Any]) -> None:
    told = '; '.join(f'{direction}: {faults[direction]}' for direction in DIRECTIONS if faults.get(direction))
    gpu = torch.cuda.get_device_name(variant.device) if variant.device.type == 'cuda' else 'CPU'
    warnings.warn(
        f'mmlinattn: plain PyTorch for {variant} on {gpu}, Triton {triton.__version__}, PyTorch {torch.__version__}: '
        f'its kernel fails ({told}). Results are right, and slower. Please report this line.',
        stacklevel=5,
    )


# --- trials, and what is known of them from other starts --------------------------------------------------------------


def name_of(variant: NamedTuple) -> str:
    """A variant but for its device, as JSON."""
    fields = {**variant._asdict(), 'dtype': str(variant.dtype).partition('.')[2]}
    del fields['device']
    return json.dumps(fields)


@functools.cache
def environment(device: torch.device) -> str:
    """Whatever may change what a kernel does: GPU, driver, releases, sources."""
    sources = b''.join(path.read_bytes() for path in sorted(Path(__file__).parent.glob('*.py')))
    gpu = driver = None
    if device.type == 'cuda':
        gpu = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        with contextlib.suppress(OSError):
            driver = Path('/proc/driver/nvidia/version').read_text().splitlines()[0]
    parts = [gpu, driver, torch.__version__, torch.version.cuda, triton.__version__, version.__version__]
    return json.dumps([*parts, hashlib.sha256(sources).hexdigest()[:16]])


def _file() -> Path:
    return Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser() / 'mmlinattn' / 'kernels.json'


def _kept() -> dict[str, list[str]]:
    try:
        return json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}


def _keep(place: str, name: str) -> None:
    kept = _kept()
    kept[place] = [*kept.get(place, ()), name]
    with contextlib.suppress(OSError):  # the next start makes the trial once more
        _file().parent.mkdir(parents=True, exist_ok=True)
        new = _file().with_suffix(f'.{os.getpid()}')
        new.write_text(json.dumps(kept, indent=1))
        new.replace(_file())


def ask(variant: NamedTuple) -> dict[str, Any]:
    """What is wrong with each direction, by a trial in a process of its own, and its ``deviations``."""
    paths = [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get('PYTHONPATH')])]
    try:
        done = subprocess.run(
            [sys.executable, '-m', f'{__package__}.trial', name_of(variant), str(variant.device)],
            env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths)},
            capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return dict.fromkeys(DIRECTIONS, f'its trial took more than {SECONDS} s')
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or [''])[-1]
    return dict.fromkeys(DIRECTIONS, f'the process of its trial ended with status {done.returncode}. {last}'.strip())


# --- the first call of each shape: its last image and head beside the plain form --------------------------------------


def is_due(variant: NamedTuple, direction: str, *shapes: torch.Size) -> bool:
    """Whether this call is the first of its shapes, and is to be compared: the trial knows one small shape."""
    key = (variant, direction, *shapes)
    if (compat.INTERPRETED and not COMPARES_IN_INTERPRETER) or key in _compared or trusts:
        return False
    if variant.device.type == 'cuda' and torch.cuda.is_current_stream_capturing():
        return False
    _compared.add(key)
    return True


def agrees(
    variant: NamedTuple, direction: str, ours: Sequence[Tensor], plain: Callable[[torch.dtype], Sequence[Tensor]]
) -> bool:
    """Whether a kernel's results are no further from the plain form than its type explains. If not, it serves no more
    in this process. Nothing is compared where the plain form gives nothing finite, or memory does not suffice for it.

    Args:
        variant (NamedTuple): What the kernel is compiled for.
        direction (str): ``'forward'`` or ``'backward'``.
        ours (Sequence[Tensor]): Its results.
        plain (callable): Gives the same results by the plain form, computed in the type it is asked for.
    """
    try:
        with torch.autocast(ours[0].device.type, enabled=False):
            exact = plain(torch.float64 if variant.dtype == torch.float32 else torch.float32)
            if not all(t.isfinite().all() for t in exact):
                return True
            found, allowed = deviation(ours, exact), BOUNDS[variant.dtype]
            if found < allowed:
                return True
            # numbers that cancel out leave the plain form in the same type no better off
            allowed = max(allowed, 4 * deviation(plain(variant.dtype), exact))
    except torch.cuda.OutOfMemoryError:
        return True
    if found <= allowed:
        return True
    fail(variant, direction, f'in a call it deviates by {found:.1g}, where {allowed:.1g} is allowed')
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
