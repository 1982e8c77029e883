# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Small studies: arms that differ in one thing, trained on the same images for the same time, and their results."""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Callable, Optional

from filelock import FileLock, Timeout

from mmlinattn import __version__
from mmlinattn.utils import written_whole
from mmlinattn.utils.errors import RunError

from .arms import STUDIES
from .tasks import FIRST_TASK, TASKS, Settings
from .training import train_arm


def load_results(path: Path, name: Optional[str], settings: Settings, task: str = FIRST_TASK) -> dict:
    """Results so far, or none.

    Args:
        path (Path): The file.
        name (str, optional): The study; None takes any.
        settings (Settings): What they have to have been made with.
        task (str): What they have to be of.

    Raises:
        RunError: The file is not of this study and task, or was made with other settings.
    """
    if not path.exists():
        return dict(study=name, task=task, version=__version__, settings=settings._asdict(), runs=[])
    results = _read(path)
    known = results['study'] in STUDIES if name is None else results['study'] == name
    if not known or results['task'] != task or results['settings'] != settings._asdict():
        wanted = 'a known study' if name is None else f'{name!r}, which needs another --out,'
        raise RunError(
            f'{path} is of study {results["study"]!r}, task {results["task"]!r} with {results["settings"]}, not of '
            f'{wanted} task {task!r} with {settings._asdict()}.'
        )
    return results


def _read(path: Path) -> dict:
    try:
        results = json.loads(path.read_text(encoding='utf-8'))
        results = dict(task=FIRST_TASK, **results) if 'task' not in results else results
        if {'study', 'settings'} - results.keys() or any({'arm', 'seed'} - run.keys() for run in results['runs']):
            raise KeyError('study, settings, and arm and seed of each run')
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f'{path} is no results file of a study: {type(error).__name__} {error}') from error
    return results


def write_atomically(path: Path, text: str) -> None:
    """Whole or not at all, also when the machine stops."""
    with written_whole(path) as file:
        file.write(text.encode('utf-8'))


def reusable_runs(name: str, results: dict) -> list[dict]:
    """The runs of some study that are runs of the study ``name`` as well: of the same backbone, under its arm's name.

    Studies share arms: ``plain`` of `hallucinated`, ``softmax`` of `inline` and of `attentions` are one model. What an
    arm wants measured with masked weights has to have been.
    """
    source, found = STUDIES[results['study']]().arms, []
    for arm_name, arm in STUDIES[name]().arms.items():
        for run in results['runs']:
            same = run['arm'] in source and source[run['arm']].backbone == arm.backbone
            if same and ('masked' in run or not arm.masks):
                wanted = {key: value for key, value in run.items() if key != 'masked' or arm.masks}
                found.append({**wanted, 'arm': arm_name})
    return found


def reuse(name: str, out: Path, settings: Settings, folders: Iterable[Path], task: str = FIRST_TASK) -> list[dict]:
    """Add to the results in ``out`` the runs of other folders, other studies' or other machines', that it lacks.
    Folders of other tasks have none.

    Returns:
        list[dict]: The runs that were added.

    Raises:
        RunError: A folder has no results, or of other settings; nothing is added then.
    """
    runs = []
    for path in (folder / 'results.json' for folder in folders):
        if not path.is_file():
            raise RunError(f'--reuse {str(path.parent)!r} has no results.json.')
        if _read(path)['task'] == task:
            runs += reusable_runs(name, load_results(path, None, settings, task))
    return _add(name, out, settings, runs, task)


def _add(name: str, out: Path, settings: Settings, runs: list[dict], task: str = FIRST_TASK) -> list[dict]:
    """Add runs to ``results.json``, which other processes may be adding to; not those that it has."""
    path, added = out / 'results.json', []
    with FileLock(_lock(out, 'results')):
        results = load_results(path, name, settings, task)
        done = _done(results)
        for run in runs:
            if (run['arm'], run['seed']) not in done:
                done.add((run['arm'], run['seed']))
                added.append(run)
        results['runs'] += added
        if added:
            write_atomically(path, json.dumps(results, indent=1))
    return added


def _done(results: dict) -> set[tuple[str, int]]:
    return {(run['arm'], run['seed']) for run in results['runs']}


@contextlib.contextmanager
def _claimed(out: Path, arm: str, seed: int) -> Iterator[bool]:
    """Whether the run is this process's to do. The system drops the claim of a process that dies."""
    claim = _lock(out, f'{"".join(c if c.isalnum() else "_" for c in arm)}-{seed}')
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(FileLock(claim).acquire(timeout=0))
            ours = True
        except Timeout:
            ours = False
        yield ours


def _lock(out: Path, name: str) -> Path:
    """The file of a lock among the processes that work on ``out``."""
    folder = out / '.locks'
    folder.mkdir(exist_ok=True)
    return folder / name


def run_study(
    name: str,
    out: Path,
    seeds: int,
    settings: Settings,
    max_minutes: Optional[float] = None,
    arms: Optional[Iterable[str]] = None,
    device: str = 'cpu',
    progress: Callable = lambda message: None,
    on_step: Callable = lambda: None,
    task: str = FIRST_TASK,
) -> dict:
    """Run what is missing of a study: every arm with seed 0, then with seed 1, and so on.

    Each result is in ``results.json`` before the next arm begins. Several processes may call this with the same
    ``out``: what one is at, the others leave alone. With ``max_minutes`` no arm is begun that would, by the slowest so
    far, end later; the first one that is missing always runs, so that every call gets further.

    Returns:
        dict: The results, those of earlier runs and of other processes included.

    Raises:
        RunError: For unknown arms, or results of other settings in ``out``.
    """
    study = STUDIES[name]()
    unknown = sorted(set(arms or ()) - set(study.arms))
    if unknown:
        raise RunError(f'--arms {unknown}: study {name!r} has {list(study.arms)}.')
    path = out / 'results.json'
    chosen = list(arms or study.arms)
    wanted = [(arm, seed) for seed in range(seeds) for arm in chosen]

    def missing() -> list[tuple[str, int]]:
        done = _done(load_results(path, name, settings, task))
        return [run for run in wanted if run not in done]

    todo = missing()
    if todo:
        train = TASKS[task].draw(settings.num_train, settings, 1)
        val = TASKS[task].draw(settings.num_val, settings, 2)
    started, slowest = time.monotonic(), 0.0
    for arm, seed in todo:
        begun = time.monotonic()
        if max_minutes is not None and slowest and begun - started + slowest > 60 * max_minutes:
            break
        with _claimed(out, arm, seed) as ours:
            if not ours or (arm, seed) not in missing():
                continue
            result = train_arm(study.arms[arm], seed, settings, train, val, device, on_step, task)
            _add(name, out, settings, [dict(arm=arm, seed=seed, device=device, **result)], task)
        slowest = max(slowest, time.monotonic() - begun)
        count = f'[{len(wanted) - len(missing())}/{len(wanted)}]'
        progress(f'{count} {arm}, seed {seed}: {result[TASKS[task].metric]:.1f} %  ({result["seconds"]:.0f} s)')
    if left := len(missing()):
        progress(f'{left} of {len(wanted)} runs are left: under way elsewhere, or for next time (--max-minutes)')
    return load_results(path, name, settings, task)
