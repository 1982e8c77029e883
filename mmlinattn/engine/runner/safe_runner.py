# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import os
import os.path as osp
from contextlib import contextmanager
from typing import Any, Optional, Union

import torch
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import RUNNERS
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, Runner

from ...utils.errors import CheckpointError, RunError, printable
from ...utils.registering import bare_name
from ..hooks.checkpointing import SafeCheckpointHook
from ..hooks.exact_resume import ResumedEpochLoop


def _is_own_best(path: Any, folders: list[str]) -> bool:
    """Whether a path names a best checkpoint of this run: right inside a folder of it and called ``best_...``."""
    if not isinstance(path, str) or not osp.basename(path).startswith('best_'):
        return False
    # Links are followed in the folder, never in the name itself: removing a link leaves its target.
    resolve = str if '://' in path else osp.realpath
    return resolve(osp.dirname(path)) in [folder if '://' in folder else osp.realpath(folder) for folder in folders]


def _keep_own_files(runner, info: dict) -> list[str]:
    """Drop what names files of others from the runtime information of a checkpoint, and return the names dropped."""
    # where its checkpoints are, at a time when the hook has no more than the folder of all runs
    outs = [str(hook.out_dir) for hook in runner.hooks if isinstance(hook, CheckpointHook) and hook.out_dir]
    name = osp.basename(runner.work_dir.rstrip(os.sep))
    folders, dropped = [runner.work_dir, *(osp.join(out, name) for out in outs)], []
    for key, value in list(info.items()):
        if key == 'keep_ckpt_ids':
            is_fine = isinstance(value, (list, tuple)) and all(type(step) is int and step >= 0 for step in value)
        else:
            is_fine = not str(key).startswith('best_ckpt') or _is_own_best(value, folders)
        if not is_fine and value is not None:
            dropped.append(key)
            del info[key]
    if dropped:
        runner.logger.warning(
            f'the checkpoint names files that are not checkpoints of this run in {runner.work_dir} '
            f'({printable(", ".join(dropped))}). They are left alone.'
        )
    return dropped


@contextmanager
def _explained(filename: str):
    """One line in place of the errors that MMEngine raises for a file of another form than it expects."""
    try:
        yield
    except (CheckpointError, OSError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except RunError as error:  # a hook that looked into it
        message = str(error)
        raise CheckpointError(message if str(filename) in message else f'{filename}: {message}') from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = printable(error)[:300]
        raise CheckpointError(f'{filename} cannot be used ({type(error).__name__}: {reason})') from error


@RUNNERS.register_module(force=True)
class SafeRunner(Runner):
    """MMEngine's Runner, careful with files.

    - A ``CheckpointHook`` of a config is a :class:`SafeCheckpointHook`, an ``EpochBasedTrainLoop`` a
      :class:`ResumedEpochLoop`.
    - Names of files outside of the run are dropped from a resumed checkpoint. MMEngine's CheckpointHook would remove
      the file or folder that ``best_ckpt`` names, and those numbered in ``keep_ckpt_ids``.

    Our configs name it, as ``runner_type='SafeRunner'``; our tools use it for all configs without ``runner_type``.

    Raises:
        CheckpointError: A file cannot be loaded or resumed from; in one line that names it.
    """

    def register_hook(self, hook: Union[Hook, dict], priority: Any = None) -> None:
        if isinstance(hook, dict) and bare_name(hook.get('type')) == CheckpointHook.__name__:
            hook = dict(hook, type=SafeCheckpointHook)
        super().register_hook(hook, priority)

    def build_train_loop(self, loop: Union[BaseLoop, dict]) -> BaseLoop:
        if isinstance(loop, dict):
            is_by_epoch = loop.get('by_epoch') or bare_name(loop.get('type')) == EpochBasedTrainLoop.__name__
            if is_by_epoch and not ('type' in loop and 'by_epoch' in loop):  # which MMEngine refuses
                loop = {key: value for key, value in loop.items() if key != 'by_epoch'}
                loop['type'] = ResumedEpochLoop
        return super().build_train_loop(loop)

    def load_checkpoint(self, filename: str, *args, **kwargs) -> dict:
        """Load weights, as MMEngine does, and return the checkpoint without names of files of others."""
        with _explained(filename):
            checkpoint = super().load_checkpoint(filename, *args, **kwargs)
            hub = checkpoint.get('message_hub')
            if isinstance(hub, dict) and isinstance(hub.get('runtime_info'), dict):
                # those of the run that resumes are newer; the text would be handed on from file to file
                others = [key for key in ('cfg', 'experiment_name') if hub['runtime_info'].pop(key, None) is not None]
                for key in others + _keep_own_files(self, hub['runtime_info']):
                    (hub.get('resumed_keys') or {}).pop(key, None)
        return checkpoint

    def resume(self, filename: str, *args, **kwargs) -> None:
        with _explained(filename):
            super().resume(filename, *args, **kwargs)


def find_latest_checkpoint(work_dir: str) -> Optional[str]:
    """The checkpoint that ``last_checkpoint`` of a work dir names, if it is of that run.

    It has to be in the work dir, or in a folder of the work dir's name, as CheckpointHook makes them with ``out_dir``.
    What the file holds is relative to where the run was started and wrong once the folder was moved; the file of that
    name in the work dir is as good.

    Returns:
        None where there is no ``last_checkpoint``.

    Raises:
        CheckpointError: What ``last_checkpoint`` names is not there, or elsewhere.
    """
    pointer = osp.join(work_dir, 'last_checkpoint')
    if not osp.lexists(pointer):
        return None
    advice = 'Name a checkpoint to resume from, or delete that file to begin from the start.'
    if not osp.isfile(pointer):
        raise CheckpointError(f'{pointer} is not a file. {advice}')
    with open(pointer, errors='replace') as file:
        latest = file.read().strip()
    folder, name = osp.split(latest if latest.isprintable() else '')
    same_name = osp.basename(folder) == osp.basename(osp.abspath(work_dir))
    is_own = same_name or osp.realpath(folder) == osp.realpath(work_dir)
    for candidate in [osp.join(work_dir, name)] * bool(name) + [latest] * is_own:
        # of other addresses the loader tells whether they are there; nothing is downloaded in the name of a file
        if osp.exists(candidate) or '://' in candidate and not candidate.startswith(('http://', 'https://')):
            return candidate
    raise CheckpointError(f'{pointer} names {latest[:200]!r}, which is not there or not of this run. {advice}')
