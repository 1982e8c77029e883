# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Where MMEngine trusts what a checkpoint says, made to check first.

Importing this package calls :func:`guard`, so that upstream's own tools and ``runner.resume()`` are covered too. The
list of all places is in ``docs/checkpoints.md``.
"""

import functools
import os
import os.path as osp
from collections.abc import Callable
from typing import Any, Optional

from mmengine.hooks import CheckpointHook
from mmengine.infer import BaseInferencer
from mmengine.runner import Runner
from mmengine.runner.checkpoint import CheckpointLoader

from ..checkpoints.config_text import read_config_text

__all__ = ['guard', 'keep_own_files']


def _out_dirs(runner) -> list[str]:
    """The folders this run writes checkpoints to."""
    folders = [runner.work_dir]
    for hook in runner.hooks:
        if isinstance(hook, CheckpointHook) and hook.out_dir is not None:
            # Before training the hook has the folder of all runs, from then on the one of this run.
            folders += [str(hook.out_dir), osp.join(str(hook.out_dir), osp.basename(runner.work_dir.rstrip(os.sep)))]
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


def _load_checkpoint(original: Callable, runner, *args: Any, **kwargs: Any) -> dict:
    checkpoint = original(runner, *args, **kwargs)
    hub = checkpoint.get('message_hub') if isinstance(checkpoint, dict) else None
    info = hub.get('runtime_info') if isinstance(hub, dict) else None
    if isinstance(info, dict):
        names = set(info)
        # Those of the run that resumes are newer; the text would be handed on from file to file.
        for key in ('cfg', 'experiment_name'):
            info.pop(key, None)
        keep_own_files(runner, info)
        if isinstance(hub.get('resumed_keys'), dict):
            for key in names - set(info):
                hub['resumed_keys'].pop(key, None)
    return checkpoint


def _before_train(original: Callable, hook: CheckpointHook, runner) -> None:
    # Runners of other kinds load the hub in ways of their own, but all come through here before they remove anything.
    keep_own_files(runner, runner.message_hub.runtime_info)
    original(hook, runner)


def _init_model(original: Callable, inferencer, cfg, weights: Optional[str], *args: Any, **kwargs: Any):
    if not cfg and weights is not None:
        checkpoint = CheckpointLoader.load_checkpoint(weights, 'cpu')
        cfg.update(read_config_text(_config_text(checkpoint), str(weights)))
    return original(inferencer, cfg, weights, *args, **kwargs)


def _config_text(checkpoint: Any) -> Any:
    """The run's config, from the first of the two places where MMEngine leaves it."""
    for path in (('message_hub', 'runtime_info', 'cfg'), ('meta', 'cfg')):
        node = checkpoint
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        if node is not None:
            return node
    return None


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
    _wrap(CheckpointHook, 'before_train', _before_train)
    _wrap(BaseInferencer, '_init_model', _init_model)


guard()
