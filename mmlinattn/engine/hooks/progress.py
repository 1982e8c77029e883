# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import atexit
import datetime
import logging
import sys
import time
from typing import Any, Optional

import numpy as np
import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook, LoggerHook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from mmengine.runner.base_loop import BaseLoop


def is_error(name: str) -> bool:
    """Return True if a lower value of the metric is better."""
    return bool({'loss', 'mae', 'mse', 'rmse', 'error', 'rel'} & set(name.lower().replace('/', '_').split('_')))


def scalars(metrics: Optional[dict]) -> dict[str, float]:
    """Return the metrics with a single number as value (of Python, NumPy or PyTorch), as floats."""
    return {
        name: float(value)
        for name, value in (metrics or {}).items()
        if isinstance(value, (int, float, np.number)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


def position(runner) -> str:
    """Return the position of the training as ``epoch 3`` or ``iteration 8000``, or '' if the run does not train."""
    loop = runner._train_loop  # the property would build one, and its data, in a test
    if not isinstance(loop, BaseLoop):
        return ''
    return f'iteration {loop.iter}' if isinstance(loop, IterBasedTrainLoop) else f'epoch {loop.epoch}'


@HOOKS.register_module(force=True)
class ProgressHook(Hook):
    """Show the progress of a run from its first step on.

    On a terminal, a progress bar with loss, learning rate and remaining time replaces the lines of MMEngine's
    ``LoggerHook``, which are only in the log file. If stdout is no terminal, a line is printed after the first step and
    every ``interval`` seconds. After each validation and test, a table shows the metrics and the best values of the
    run. Only the main process prints.

    Args:
        interval (float): Seconds between lines if stdout is no terminal.
    """

    priority = 'LOW'  # after IterTimerHook and RuntimeInfoHook, the sources of the numbers

    def __init__(self, interval: float = 30.0):
        self.interval = interval
        self._bar: Any = None  # rich's, on a terminal
        self._tasks: dict[str, Any] = {}
        self._last_line = 0.0

    def before_train(self, runner) -> None:
        self._open(runner, 'train', runner.max_iters, runner.iter)

    def after_train(self, runner) -> None:
        self._close(runner, 'train')

    def _before_epoch(self, runner, mode: str = 'train') -> None:
        if mode != 'train':
            self._open(runner, mode, len(getattr(runner, f'{mode}_dataloader')))

    def _after_epoch(self, runner, mode: str = 'train') -> None:
        if mode != 'train':
            self._close(runner, mode)

    def after_val_epoch(self, runner, metrics: Optional[dict[str, float]] = None) -> None:
        super().after_val_epoch(runner, metrics)
        self._print_table(metrics, runner, f'validation {position(runner)}')

    def after_test_epoch(self, runner, metrics: Optional[dict[str, float]] = None) -> None:
        super().after_test_epoch(runner, metrics)
        self._print_table(metrics, runner, 'test')

    def _open(self, runner, mode: str, total: int, done: int = 0) -> None:
        # the first line comes after the first step of a training, and after some seconds of a validation
        self._last_line = -float('inf') if mode == 'train' else time.monotonic()
        if is_main_process() and sys.stdout.isatty() and self._bar is None:
            from rich import console, progress

            self._bar = progress.Progress(
                progress.TextColumn('{task.description}'),
                progress.BarColumn(bar_width=None),
                progress.MofNCompleteColumn(),
                progress.TextColumn('{task.fields[values]}'),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                expand=True,
                console=console.Console(),  # the shared one keeps its first answer to isatty
            )
            self._bar.start()
            atexit.register(self._bar.stop)  # also after an error: the cursor is hidden
            for handler in _screens(runner):
                handler.setStream(sys.stdout)  # rich's: it prints above the bar
                handler.addFilter(self._is_shown)
        if self._bar is not None:
            self._tasks[mode] = self._bar.add_task(_title(runner, mode), total=total, completed=done, values='')

    @staticmethod
    def _is_shown(record: logging.LogRecord) -> bool:
        """Return False for lines of LoggerHook, which the bar and the table replace on a terminal."""
        return record.module != LoggerHook.__module__.rpartition('.')[2]

    def _after_iter(self, runner, batch_idx: int, data_batch=None, outputs=None, mode: str = 'train') -> None:
        if mode == 'train':
            done, total, known = runner.iter + 1, runner.max_iters, runner.message_hub.log_scalars
            names = [name for name in ('loss', 'lr') if f'train/{name}' in known]
            values = '  '.join(f'{name} {known[f"train/{name}"].current():.4g}' for name in names)
        else:
            done, total, values = batch_idx + 1, len(getattr(runner, f'{mode}_dataloader')), ''
        title, now = _title(runner, mode), time.monotonic()
        if mode in self._tasks:
            self._bar.update(self._tasks[mode], description=title, completed=done, values=values)
        elif self._bar is None and is_main_process() and now - self._last_line >= self.interval:
            self._last_line = now
            left = datetime.timedelta(seconds=int(runner.message_hub.get_info('eta', 0.0)))
            parts = [title, f'step {done}/{total}', values, f'eta {left}']
            print('  '.join(filter(None, parts)), flush=True)

    def _close(self, runner, mode: str) -> None:
        if mode not in self._tasks:  # MMPretrain's EMAHook validates inside a validation
            return
        self._bar.refresh()  # the last state, also of short runs
        self._bar.remove_task(self._tasks.pop(mode))
        if not self._tasks:
            self._bar.stop()
            self._bar = None
            for handler in _screens(runner):
                handler.setStream(sys.stdout)
                handler.removeFilter(self._is_shown)

    def _print_table(self, metrics: Optional[dict], runner, title: str) -> None:
        from rich.console import Console
        from rich.table import Table

        numbers = scalars(metrics)
        if not numbers or not is_main_process():
            return
        history = runner.message_hub.log_scalars  # with that of a resumed run
        earlier = {name: history[f'val/{name}'].data[0] for name in numbers if f'val/{name}' in history}
        table = Table(title=title, title_justify='left')
        table.add_column('metric')
        for column in ('value', *(['best'] if earlier else [])):
            table.add_column(column, justify='right')
        for name, value in numbers.items():
            row = [value]
            if name in earlier:
                row.append(min(earlier[name]) if is_error(name) else max(earlier[name]))
            # COCO's -1: there is no object of that size
            table.add_row(name, *('-' if number == -1 else f'{number:.4f}' for number in row))
        Console(file=sys.stdout).print(table)


def _screens(runner) -> list:
    return [handler for handler in runner.logger.handlers if type(handler) is logging.StreamHandler]


def _title(runner, mode: str) -> str:
    if mode != 'train':
        return 'validation' if mode == 'val' else mode
    loop = runner.train_loop
    return 'training' if isinstance(loop, IterBasedTrainLoop) else f'epoch {loop.epoch + 1}/{loop.max_epochs}'
