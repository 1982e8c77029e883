# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Where MMEngine trusts what a checkpoint says, made to check first.

Importing this package calls :func:`guard`, so that upstream's own tools and ``runner.resume()`` are covered too. The
list of all places is in ``docs/checkpoints.md``.
"""

import functools
import os
import os.path as osp
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, Optional

import mmengine.runner
import torch
from mmengine.hooks import CheckpointHook
from mmengine.logging import print_log
from mmengine.runner import Runner
from mmengine.runner import _flexible_runner as flexible_runner_module
from mmengine.runner import checkpoint as checkpoint_module
from mmengine.runner import runner as runner_module

from ..utils.errors import CheckpointError, RunError
from .resumable import check_optimizers, check_resumable

__all__ = ['find_latest_checkpoint', 'guard', 'keep_own_files']

_MAX_PATH = 4096  # bytes


def _out_dirs(runner) -> list[str]:
    """The folders this run writes checkpoints to."""
    folders = [runner.work_dir]
    for hook in runner.hooks:
        if isinstance(hook, CheckpointHook) and hook.out_dir is not None:
            # Before training, when it gets its client, the hook has the folder of all runs, from then on this run's.
            is_of_run = hasattr(hook, 'file_client') or str(hook.out_dir) == runner.work_dir
            name = '' if is_of_run else osp.basename(runner.work_dir.rstrip(os.sep))
            folders.append(osp.join(str(hook.out_dir), name).rstrip(os.sep))
    return folders


def _is_own_best(path: Any, folders: list[str]) -> bool:
    """Whether a path names a best checkpoint of this run: right inside a folder of it and called ``best_...``."""
    if not isinstance(path, str) or '\0' in path or not osp.basename(path).startswith('best_'):
        return False
    if '://' in path:
        return any(path.rpartition('/')[0] == folder.rstrip('/') for folder in folders)
    # Links are followed in the folder, never in the name itself: removing a link leaves what it points to.
    parent = osp.realpath(osp.dirname(path))
    return any(parent == osp.realpath(folder) for folder in folders if '://' not in folder)


def _is_step_list(value: Any) -> bool:
    """Whether it can be CheckpointHook's list of kept checkpoints, whose files it removes by number."""
    return isinstance(value, (list, tuple)) and all(type(step) is int and step >= 0 for step in value)


def keep_own_files(runner, runtime_info: dict) -> None:
    """Drop what names files of others from the runtime information of a resumed run, with one notice.

    MMEngine's CheckpointHook removes the file or folder that ``best_ckpt`` names, and those that the numbers of
    ``keep_ckpt_ids`` make, when a newer checkpoint takes its place.

    Args:
        runner: the run that resumes.
        runtime_info: that of a message hub, or of the state of one; changed in place.
    """
    folders = _out_dirs(runner)
    dropped = []
    for key, value in list(runtime_info.items()):
        if not isinstance(key, str) or value is None:
            continue
        if key == 'best_ckpt' or key.startswith('best_ckpt_'):
            is_fine = _is_own_best(value, folders)
        elif key == 'keep_ckpt_ids':
            is_fine = _is_step_list(value)
        else:
            continue
        if not is_fine:
            dropped.append(f'{key} = {str(value)[:200]!r}')
            del runtime_info[key]
    if dropped:
        runner.logger.warning(
            f'the checkpoint names files that are not checkpoints of this run in {runner.work_dir}: '
            f'{", ".join(dropped)}. They are left alone.'
        )


@contextmanager
def _explained(filename: Any, verb: str):
    """One line in place of whatever MMEngine stumbles over in a file of another form than it expects."""
    try:
        yield
    except (RunError, OSError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines() or ['']
        raise CheckpointError(f'{filename} cannot be {verb} ({type(error).__name__}: {reason[0]})') from error


def _load_checkpoint(original: Callable, runner, filename: str, *args: Any, **kwargs: Any) -> dict:
    with _explained(filename, 'loaded'):
        checkpoint = original(runner, filename, *args, **kwargs)
    if getattr(runner, 'is_resuming', False):
        check_resumable(runner, checkpoint, filename)
    hub = checkpoint.get('message_hub')
    if isinstance(hub, dict) and isinstance(hub.get('runtime_info'), dict):
        info, names = hub['runtime_info'], set(hub['runtime_info'])
        # Those of the run that resumes are newer; the text would be handed on from file to file.
        for key in ('cfg', 'experiment_name'):
            info.pop(key, None)
        keep_own_files(runner, info)
        for key in names - set(info):
            (hub.get('resumed_keys') or {}).pop(key, None)
    return checkpoint


def _resume(original: Callable, runner, filename: str, *args: Any, **kwargs: Any) -> None:
    runner.is_resuming = True
    try:
        with _explained(filename, 'resumed from'):
            original(runner, filename, *args, **kwargs)
        check_optimizers(runner, filename)
    finally:
        del runner.is_resuming


def _before_train(original: Callable, hook: CheckpointHook, runner) -> None:
    # Runners of other kinds load the hub in ways of their own, but all come through here before they remove anything.
    keep_own_files(runner, runner.message_hub.runtime_info)
    original(hook, runner)


def find_latest_checkpoint(path: str) -> Optional[str]:
    """MMEngine's function of this name, for a ``last_checkpoint`` that may hold anything.

    The file counts if it names a checkpoint in the work dir itself or in a folder of the work dir's name, as
    CheckpointHook makes them with ``out_dir``. What it holds is relative to where the run was started and wrong once
    the folder was moved; the file of that name in the work dir is as good.

    Args:
        path: the work dir.

    Returns:
        The checkpoint to resume from; None where there is no ``last_checkpoint``.

    Raises:
        CheckpointError: ``last_checkpoint`` is no short line of text, or what it names is not there or elsewhere.
    """
    pointer = osp.join(path, 'last_checkpoint')
    if not osp.lexists(pointer):
        print_log('Did not find last_checkpoint to be resumed.')
        return None
    advice = 'Name a checkpoint to resume from, or delete that file to begin from the start.'
    if not osp.isfile(pointer):
        raise CheckpointError(f'{pointer} is not a file. {advice}')
    with open(pointer, 'rb') as file:
        content = file.read(_MAX_PATH + 1)
    try:
        latest = content.decode().strip()
    except UnicodeDecodeError:
        latest = ''
    if not latest or not latest.isprintable() or len(content) > _MAX_PATH:
        raise CheckpointError(f'{pointer} names no checkpoint: it holds {content[:40]!r}. {advice}')
    folder, name = osp.split(latest)
    is_address = '://' in latest
    is_own = osp.basename(folder) == osp.basename(osp.abspath(path))
    if is_address and is_own and not latest.startswith(('http://', 'https://')):
        return latest
    is_own = is_own or osp.realpath(folder) == osp.realpath(path)
    for candidate in (latest, osp.join(path, name)) if name else ():
        # DeepSpeed writes folders.
        if (candidate != latest or is_own and not is_address) and (osp.isfile(candidate) or osp.isdir(candidate)):
            return candidate
    where = 'elsewhere' if osp.exists(latest) or is_address else 'not there'
    raise CheckpointError(f'{pointer} names {latest!r}, which is {where}. {advice}')


def _wrap(owner: type, name: str, wrapper: Callable) -> None:
    original = getattr(owner, name)
    if getattr(original, 'is_guarded', False):
        return

    @functools.wraps(original)
    def guarded(self, *args, **kwargs):
        return wrapper(original, self, *args, **kwargs)

    guarded.is_guarded = True
    setattr(owner, name, guarded)


def guard() -> None:
    """Put the checks in place; calling it again does no harm."""
    _wrap(Runner, 'load_checkpoint', _load_checkpoint)
    _wrap(Runner, 'resume', _resume)
    _wrap(CheckpointHook, 'before_train', _before_train)
    for module in (mmengine.runner, runner_module, flexible_runner_module, checkpoint_module):
        module.find_latest_checkpoint = find_latest_checkpoint


guard()
