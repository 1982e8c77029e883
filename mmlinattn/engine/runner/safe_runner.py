# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import os
import os.path as osp
from contextlib import contextmanager
from typing import Any, Optional, Union

import torch
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from ...utils.errors import CheckpointError, RunError, printable
from ...utils.registering import bare_name
from ..hooks.checkpointing import SafeCheckpointHook
from ..optimizers.saved_groups import all_schedulers
from .start import agree_on_start, check_same_start, fit_iterations


def _keep_own_files(runner, info: dict) -> list[str]:
    """Remove file names outside this run from ``info``, in place, and return their keys. A resumed run warns.

    ``info`` is the ``runtime_info`` of a checkpoint's message hub. Values of ``best_ckpt`` keys are kept if they are
    ``best_*`` files in the work dir or in the run's folder in a hook's ``out_dir``. ``keep_ckpt_ids`` are kept if they
    are non-negative integers.
    """
    # before training, `out_dir` of the hook is the parent of the folders of all runs
    outs = [str(hook.out_dir) for hook in runner.hooks if isinstance(hook, CheckpointHook) and hook.out_dir]
    name = osp.basename(runner.work_dir.rstrip(os.sep))
    folders, dropped = {*map(osp.realpath, (runner.work_dir, *(osp.join(out, name) for out in outs)))}, []
    for key, value in list(info.items()):
        is_fine = True
        if key == 'keep_ckpt_ids':
            is_fine = isinstance(value, (list, tuple)) and all(type(step) is int and step >= 0 for step in value)
        elif str(key).startswith('best_ckpt'):  # a file best_... in the folder of the run
            is_fine = isinstance(value, str) and osp.basename(value).startswith('best_')
            # only links in the folder part are followed: removing a linked file removes the link and not its target
            is_fine = is_fine and osp.realpath(osp.dirname(value)) in folders
        if not is_fine and value is not None:
            dropped.append(key)
            del info[key]
    if dropped and runner._resume:  # otherwise nothing reads them
        runner.logger.warning(
            f'the checkpoint names files that are not checkpoints of this run in {runner.work_dir} '
            f'({printable(", ".join(dropped))}). They are dropped, and the files stay.'
        )
    return dropped


@contextmanager
def _load_errors(filename: str):
    """Convert errors that MMEngine raises for unexpected contents of ``filename`` to a CheckpointError of one line."""
    try:
        yield
    except (CheckpointError, OSError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except RunError as error:  # raised by a hook
        message = str(error)
        raise CheckpointError(message if str(filename) in message else f'{filename}: {message}') from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = printable(error)[:300]
        raise CheckpointError(f'{filename} cannot be used ({type(error).__name__}: {reason})') from error


@RUNNERS.register_module(force=True)
class SafeRunner(Runner):
    """MMEngine's Runner, with atomic checkpoints and checks of loaded files.

    - It builds ``CheckpointHook`` as :class:`SafeCheckpointHook`.
    - From a loaded checkpoint it removes names of files outside this run. Otherwise MMEngine's CheckpointHook would
      delete the files named by ``best_ckpt`` and ``keep_ckpt_ids``.
    - All processes start from the checkpoint of the first one.
    - A run resumed with another batch size continues at the same epoch.

    The tools use this class for all configs without ``runner_type``.

    Raises:
        CheckpointError: A file cannot be loaded or resumed from. The message is one line with the name of the file.
        RunError: Processes differ in checkpoint, weights, epoch or iteration.
    """

    _load_from: Optional[str]
    _resume: bool
    _loaded_meta: dict

    def register_hook(self, hook: Union[Hook, dict], priority: Any = None) -> None:
        if isinstance(hook, dict) and bare_name(hook.get('type')) == CheckpointHook.__name__:
            hook = dict(hook, type=SafeCheckpointHook)
        super().register_hook(hook, priority)

    def register_default_hooks(self, hooks: Optional[dict] = None) -> None:
        # None switches any hook off; MMEngine takes it for its own hooks only
        super().register_default_hooks({key: Hook() if hook is None else hook for key, hook in (hooks or {}).items()})

    def load_checkpoint(self, filename: str, *args, **kwargs) -> dict:
        """Load weights as MMEngine does, and return the checkpoint without the data of another run.

        Its message hub loses ``cfg``, ``experiment_name`` and the names of files outside this run. A file that cannot
        be loaded raises a CheckpointError.
        """
        with _load_errors(filename):
            checkpoint = super().load_checkpoint(filename, *args, **kwargs)
            self._loaded_meta = dict(checkpoint.get('meta') or {})
            hub = checkpoint.get('message_hub')
            if isinstance(hub, dict) and isinstance(hub.get('runtime_info'), dict):
                # the resumed run has its own config and name; without this, the old text would be copied to each new
                # checkpoint
                others = [key for key in ('cfg', 'experiment_name') if hub['runtime_info'].pop(key, None) is not None]
                for key in others + _keep_own_files(self, hub['runtime_info']):
                    (hub.get('resumed_keys') or {}).pop(key, None)
        return checkpoint

    def load_or_resume(self) -> None:
        """Load the checkpoint that the main process chose. Check that weights, epoch and iteration are the same in all
        processes."""
        if self._has_loaded:
            return
        self._load_from, self._resume = agree_on_start(self.work_dir, self._load_from, self._resume)
        super().load_or_resume()
        check_same_start(self)

    def resume(self, filename: str, *args, **kwargs) -> None:
        fresh = [dict(vars(scheduler)) for scheduler in all_schedulers(self.param_schedulers)]
        with _load_errors(filename):
            super().resume(filename, *args, **kwargs)
            fit_iterations(self, self._loaded_meta, fresh)
