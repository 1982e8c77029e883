# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""A kernel serves on a GPU after it was run there beside the plain form, forward and backward, on a small input.

The trial (:mod:`.trial`) is in a process of its own, which an illegal access ends in place of ours; one process tries
all the kernels that a start asks for. Passed trials are kept in the cache folder, for this GPU, its driver, these
releases and these sources. What fails leaves the plain form in its place, with one warning.

There is no trial while a CUDA graph is captured: until a later call made one, the plain form serves. Where several
processes train together, each makes its own, on its own GPU: nobody waits for ranks that do not come this way, and the
plain form computes the same.
"""

import contextlib
import functools
import hashlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import IO, Any, NamedTuple, Optional

import torch
import triton

from ... import version
from . import compat

DIRECTIONS = ('forward', 'backward')
# less than process groups wait for a rank; after one answer that did not come, nothing is asked
SECONDS_TO_ANSWER = 300

_verdicts: dict[NamedTuple, tuple[str, ...]] = {}  # which directions of a kernel serve
_lock = threading.Lock()
_child: Any = None  # the process of trials
_errors: Optional[IO[str]] = None  # its standard error
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
    faults = _ask(variant)
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
        f'its kernel fails ({told}). Results are right, and slower. Please report this line to the authors of '
        'mmlinattn.',
        stacklevel=5,
    )


# --- what is known from other starts ----------------------------------------------------------------------------------


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


# --- the process of trials --------------------------------------------------------------------------------------------


def _ask(variant: NamedTuple) -> dict[str, Any]:
    """What is wrong with each direction, by a trial in the other process, and ``deviations`` where there were any."""
    global _child, _errors
    if _child is not None and _child.returncode == -signal.SIGKILL:
        return dict.fromkeys(DIRECTIONS, 'the process of trials had to be killed')
    request = json.dumps(dict(name=name_of(variant), device=str(variant.device))) + '\n'
    for _ in range(2):
        if _child is None or _child.poll() is not None:
            paths = [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get('PYTHONPATH')])]
            _errors = tempfile.TemporaryFile('w+')
            _child = subprocess.Popen(
                [sys.executable, '-m', f'{__package__}.trial'], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=_errors, text=True, env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths)},
            )  # fmt: skip
        line = ''
        with contextlib.suppress(BrokenPipeError):
            _child.stdin.write(request)
            _child.stdin.flush()
            if select.select([_child.stdout], [], [], SECONDS_TO_ANSWER)[0]:
                line = _child.stdout.readline()
            else:
                _child.kill()
        if line:
            answer = json.loads(line)
            if 'forward' in answer:
                return answer
            # no second process gets this GPU: some are for one alone, or full
            return importlib.import_module(f'{__package__}.trial').trial(variant)
        if _child.wait() != 0:  # 0: it had had nothing to do for a while, or was not sure of its GPU any more
            break
    _errors.seek(0)
    last = (_errors.read().strip().splitlines() or [''])[-1]
    return dict.fromkeys(DIRECTIONS, f'the process of its trial ended with status {_child.returncode}. {last}'.strip())
