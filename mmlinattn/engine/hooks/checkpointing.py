# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import inspect
import math
import os
import os.path as osp
from collections import deque
from contextlib import contextmanager, suppress
from glob import escape as glob_escape
from glob import glob
from typing import Any, Optional

from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, get_file_backend, register_backend
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS
from mmengine.utils import mkdir_or_exist

from ...utils import atomic_write
from ...utils.errors import RunError, meant
from .progress import scalars

ATOMIC_BACKEND = 'mmlinattn.atomic_local'


class AtomicLocalBackend(LocalBackend):
    """Storage backend for local files: a file appears only when completely written."""

    def put(self, obj: bytes, filepath) -> None:
        mkdir_or_exist(osp.dirname(filepath))
        with atomic_write(filepath) as stream:
            stream.write(obj)


register_backend(ATOMIC_BACKEND, AtomicLocalBackend, force=True)


@contextmanager
def _write_errors(target: str, previous: Optional[str]):
    """Convert an OSError while writing ``target``, in this context, to a RunError that names the ``previous`` file."""
    try:
        yield
    except OSError as error:
        kept = f'The previous checkpoint {previous} is intact. ' if previous and osp.exists(previous) else ''
        raise RunError(
            f'{target} could not be written: {error.strerror or error}. {kept}Make room and start again with --resume.'
        ) from error


def write_checkpoint(runner, folder: str, name: str, **options) -> str:
    """Save a checkpoint ``folder/name`` and return its path.

    The file ``last_checkpoint`` and ``last_ckpt`` of the message hub record the path. ``options`` are keyword arguments
    of ``runner.save_checkpoint``.

    Raises:
        RunError: One of the files could not be written. The previous checkpoint and ``last_checkpoint`` are intact.
    """
    path = f'{folder.rstrip("/")}/{name}'
    previous = runner.message_hub.runtime_info.get('last_ckpt')  # also that of a resumed run
    runner.message_hub.update_info('last_ckpt', path)  # stored in the checkpoint
    with _write_errors(path, previous):
        runner.save_checkpoint(folder, name, **options)
        if is_main_process():
            with atomic_write(osp.join(runner.work_dir, 'last_checkpoint')) as file:
                file.write(path.encode())
    return path


def _remove(backend, path: str) -> None:
    if backend.isfile(path):
        backend.remove(path)
    elif backend.isdir(path):  # DeepSpeed writes folders
        backend.rmtree(path)


@HOOKS.register_module(force=True)
class SafeCheckpointHook(CheckpointHook):
    """MMEngine's ``CheckpointHook``, safe on a full disk. :class:`~mmlinattn.engine.SafeRunner` builds it.

    Local checkpoints and ``last_checkpoint`` are written atomically. ``max_keep_ckpts`` and ``save_best`` remove an old
    checkpoint only after the new one is on disk.

    Raises:
        RunError: An argument is unknown, or a checkpoint could not be written. The previous checkpoint and
            ``last_checkpoint`` are intact.
    """

    backend_args: Optional[dict]
    file_backend: Any
    keep_ckpt_ids: deque

    def before_train(self, runner) -> None:
        """Check the arguments, and set the backend that writes atomically, unless the config sets a backend."""
        super().before_train(runner)
        known = inspect.signature(runner.save_checkpoint).parameters
        for key in self.args.keys() - known.keys():
            remedy = meant(key, {*known, *inspect.signature(CheckpointHook).parameters})
            raise RunError(f'default_hooks.checkpoint.{key}={self.args[key]!r}: nothing reads it.{remedy}')
        self._saved_step = -1
        if is_main_process():
            for path in glob(osp.join(glob_escape(self.out_dir), '*.*.part')):  # of a process that was killed
                with suppress(OSError):
                    os.remove(path)
        if self.backend_args is None and type(self.file_backend) is LocalBackend:
            self.backend_args = dict(backend=ATOMIC_BACKEND)
            self.file_backend = get_file_backend(self.out_dir, backend_args=self.backend_args)

    def after_train(self, runner) -> None:
        """Save a run that :class:`~mmengine.hooks.EarlyStoppingHook` ended between two checkpoints."""
        step = runner.epoch if self.by_epoch else runner.iter
        if getattr(runner.train_loop, 'stop_training', False) and self._saved_step != step:
            self._save_checkpoint_with_step(runner, step, dict(epoch=runner.epoch, iter=runner.iter))
        super().after_train(runner)

    def _save_checkpoint_with_step(self, runner, step, meta) -> None:
        outdated = []
        if self.max_keep_ckpts > 0:
            kept = [kept_step for kept_step in self.keep_ckpt_ids if kept_step != step] + [step]
            outdated = kept[: -self.max_keep_ckpts]
            # before saving, as the checkpoint stores the list
            self.keep_ckpt_ids = deque(kept, self.max_keep_ckpts)
            runner.message_hub.update_info('keep_ckpt_ids', list(self.keep_ckpt_ids))

        self._saved_step = step
        keys = 'file_client_args', 'save_optimizer', 'save_param_scheduler', 'by_epoch', 'backend_args'
        options = dict(self.args, meta=meta, **{key: getattr(self, key) for key in keys})
        self.last_ckpt = write_checkpoint(runner, self.out_dir, self.filename_tmpl.format(step), **options)
        if is_main_process():
            for old_step in outdated:
                path = self.file_backend.join_path(self.out_dir, self.filename_tmpl.format(old_step))
                _remove(self.file_backend, path)

    def _save_best_checkpoint(self, runner, metrics) -> None:
        backend = self.file_backend
        outdated: list[str] = []
        backend.remove = backend.rmtree = outdated.append  # until the new checkpoint is on disk
        try:
            with _write_errors('the best checkpoint', getattr(self, 'best_ckpt_path', None)):
                super()._save_best_checkpoint(runner, metrics)
        finally:
            del backend.remove, backend.rmtree
        current = set(getattr(self, 'best_ckpt_path_dict', {}).values())
        current.add(getattr(self, 'best_ckpt_path', None))
        for path in outdated:
            # a resumed run can reach the same best epoch again: the new file then has the name of the old one
            if path not in current:
                _remove(backend, path)
        numbers = scalars(metrics)
        for name in self.key_indicators if self.save_best else ():
            if math.isnan(numbers.get(name, 0.0)):
                runner.logger.warning(f'save_best: the metric {name!r} is NaN; no checkpoint is the best.')
