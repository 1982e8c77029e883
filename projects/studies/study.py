# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Train the variants of a study on the same images for the same number of steps, and save their results."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Callable, Optional

from filelock import FileLock, Timeout

from mmlinattn import __version__
from mmlinattn.utils import atomic_write
from mmlinattn.utils.errors import RunError

from .task import Settings, draw
from .training import train_variant
from .variants import STUDIES


def load_results(path: Path, name: str, settings: Settings) -> dict:
    """Load the results of earlier runs, or start new ones if the file does not exist.

    Raises:
        RunError: The file is of another study or other settings, or no results file.
    """
    if not path.exists():
        return dict(study=name, version=__version__, settings=settings._asdict(), runs=[])
    try:
        results = json.loads(path.read_text(encoding='utf-8'))
        found = results['study'], results['settings']
        if any({'variant', 'seed'} - run.keys() for run in results['runs']):
            raise KeyError('variant and seed of each run')
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f'{path}: not a results file of a study ({type(error).__name__} {error})') from error
    if found != (name, settings._asdict()):
        raise RunError(
            f'{path}: study {found[0]!r} with {found[1]}, expected {name!r} with {settings._asdict()}. Choose another '
            '--out.'
        )
    return results


def run_study(
    name: str,
    out: Path,
    seeds: int,
    settings: Settings,
    max_minutes: Optional[float] = None,
    variants: Optional[Iterable[str]] = None,
    device: str = 'cpu',
    progress: Callable = lambda message: None,
    on_step: Callable = lambda: None,
) -> dict:
    """Train the missing runs of a study: every variant with seed 0, then with seed 1, and so on.

    Each result is saved before the next run. With ``max_minutes``, a run starts only if the slowest one so far would
    fit in the rest of the time. The first missing run always starts.

    Returns:
        dict: The results, with those of earlier calls.

    Raises:
        RunError: A variant is unknown, ``out`` has results of other settings, or another process runs there.
    """
    study = STUDIES[name]()
    unknown = sorted(set(variants or ()) - set(study.variants))
    if unknown:
        raise RunError(f'--variants={unknown}: expected some of {list(study.variants)}')
    path, lock = out / 'results.json', FileLock(out / 'results.json.lock')
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        raise RunError(f'--out={str(out)!r}: another process runs a study there') from None
    with held:
        results = load_results(path, name, settings)
        done = {(run['variant'], run['seed']) for run in results['runs']}
        wanted = [(variant, seed) for seed in range(seeds) for variant in variants or study.variants]
        todo = [run for run in wanted if run not in done]
        if todo:
            train, val = draw(settings.num_train, settings, 1), draw(settings.num_val, settings, 2)
        started, slowest = time.monotonic(), 0.0
        for i, (variant, seed) in enumerate(todo):
            begun = time.monotonic()
            if max_minutes is not None and slowest and begun - started + slowest > 60 * max_minutes:
                progress(f'{len(todo) - i} of {len(wanted)} runs are left for next time (--max-minutes)')
                break
            result = train_variant(study.variants[variant], seed, settings, train, val, device, on_step)
            results['runs'].append(dict(variant=variant, seed=seed, device=device, **result))
            with atomic_write(path) as file:
                file.write(json.dumps(results, indent=1).encode())
            slowest = max(slowest, time.monotonic() - begun)
            count = f'[{len(wanted) - len(todo) + i + 1}/{len(wanted)}]'
            progress(f'{count} {variant}, seed {seed}: {result["accuracy"]:.1f} %  ({result["seconds"]:.0f} s)')
    return results
