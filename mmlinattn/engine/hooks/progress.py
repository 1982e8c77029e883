# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import atexit
import datetime
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any, Optional, Union

import numpy as np
import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from mmengine.runner.base_loop import BaseLoop

# beginnings of LoggerHook's lines; a terminal shows bar and table instead
_OF_LOGGER_HOOK = ('Epoch(', 'Iter(')


def is_error(name: str) -> bool:
    """Return True if the lowest value of a metric is the best."""
    return bool({'loss', 'mae', 'mse', 'rmse', 'error', 'rel'} & set(name.lower().replace('/', '_').split('_')))


def scalars(metrics: Optional[dict]) -> dict[str, float]:
    """Return the metrics that are one number, of Python, NumPy or PyTorch."""
    found = (metrics or {}).items()
    return {
        name: float(value)
        for name, value in found
        if isinstance(value, (int, float, np.number)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


@HOOKS.register_module(force=True)
class ProgressHook(Hook):
    """Show the progress of a run on the screen from its first step on.

    A terminal has a bar with loss, learning rate and remaining time in place of the lines of MMEngine's ``LoggerHook``,
    which the log file keeps. Elsewhere a line is printed after the first step, then every ``interval`` seconds. After
    each validation and test the metrics are printed as a table, beside the best of the run. Only the main process
    prints.

    Args:
        interval (float): Seconds between lines where stdout is no terminal.
    """

    priority = 'LOW'  # after IterTimerHook and RuntimeInfoHook, the sources of the numbers

    def __init__(self, interval: float = 30.0):
        self.interval = interval
        self._bar: Any = None  # rich's, on a terminal
        self._tasks: dict[str, int] = {}
        self._last_line = 0.0

    # -- bar or lines ------------------------------------------------------------------------------------------------

    def _open(self, runner, stage: str, text: str, total: int, done: int = 0) -> None:
        # the first line is after the first step of a training, and after some seconds of a validation
        self._last_line = -float('inf') if stage == 'train' else time.monotonic()
        if not is_main_process():
            return
        if sys.stdout.isatty() and self._bar is None:
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
            for handler in runner.logger.handlers:
                if type(handler) is logging.StreamHandler:
                    handler.setStream(sys.stdout)  # rich's: it prints above the bar
                    handler.addFilter(self._is_no_progress)
        if self._bar is not None:
            self._tasks[stage] = self._bar.add_task(text, total=total, completed=done, values='')

    def _is_no_progress(self, record: logging.LogRecord) -> bool:
        return self._bar is None or not record.getMessage().startswith(_OF_LOGGER_HOOK)

    def _advance(self, stage: str, text: str, done: int, total: int, values: str, eta: float) -> None:
        if self._bar is not None:
            if stage in self._tasks:
                self._bar.update(self._tasks[stage], description=text, completed=done, values=values)
            return
        now = time.monotonic()
        if is_main_process() and now - self._last_line >= self.interval:
            self._last_line = now
            left = datetime.timedelta(seconds=int(eta))
            print(f'{text}  step {done}/{total}  {values}{"  " * bool(values)}eta {left}', flush=True)

    def _close(self, runner, stage: str, is_last: bool = False) -> None:
        if self._bar is not None and stage in self._tasks:
            self._bar.refresh()  # the last state, also of short runs
            self._bar.remove_task(self._tasks.pop(stage))
        if self._bar is not None and is_last and not self._tasks:
            bar, self._bar = self._bar, None
            bar.stop()
            for handler in runner.logger.handlers:
                if type(handler) is logging.StreamHandler:
                    handler.setStream(sys.stdout)
                    handler.removeFilter(self._is_no_progress)

    # -- MMEngine's points -------------------------------------------------------------------------------------------

    def before_train(self, runner) -> None:
        self._open(runner, 'train', _running(runner), runner.max_iters, runner.iter)

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        known = runner.message_hub.log_scalars
        values = '  '.join(
            f'{name} {known[f"train/{name}"].current():.4g}' for name in ('loss', 'lr') if f'train/{name}' in known
        )
        eta = runner.message_hub.get_info('eta', 0.0)
        self._advance('train', _running(runner), runner.iter + 1, runner.max_iters, values, eta)

    def after_train(self, runner) -> None:
        self._close(runner, 'train', is_last=True)

    def before_val_epoch(self, runner) -> None:
        self._open(runner, 'val', 'validation', len(runner.val_dataloader))

    def before_test_epoch(self, runner) -> None:
        self._open(runner, 'test', 'test', len(runner.test_dataloader))

    def _after_iter(
        self,
        runner,
        batch_idx: int,
        data_batch=None,
        outputs: Optional[Union[Sequence, dict]] = None,
        mode: str = 'train',
    ) -> None:
        loader = runner.val_dataloader if mode == 'val' else runner.test_dataloader
        text = 'validation' if mode == 'val' else mode
        self._advance(mode, text, batch_idx + 1, len(loader), '', runner.message_hub.get_info('eta', 0.0))

    def after_val_epoch(self, runner, metrics: Optional[dict[str, float]] = None) -> None:
        self._close(runner, 'val', is_last='train' not in self._tasks)
        self._show(metrics, runner, ' '.join(['validation', position(runner)]))

    def after_test_epoch(self, runner, metrics: Optional[dict[str, float]] = None) -> None:
        self._close(runner, 'test', is_last=True)
        self._show(metrics, runner, 'test')

    def _show(self, metrics: Optional[dict], runner, title: str) -> None:
        from rich.console import Console
        from rich.table import Table

        numbers = scalars(metrics)
        if not numbers or not is_main_process():
            return
        past = runner.message_hub.log_scalars  # of the run before, too, where this one resumed
        earlier = {name: past[f'val/{name}'].data[0] for name in numbers if f'val/{name}' in past}
        table = Table(title=title, title_justify='left')
        table.add_column('metric')
        table.add_column('value', justify='right')
        if earlier:
            table.add_column('best', justify='right')
        for name, value in numbers.items():
            row = [value]
            if name in earlier:
                row.append(min(earlier[name]) if is_error(name) else max(earlier[name]))
            # COCO's -1: there is no object of that size
            table.add_row(name, *('-' if number == -1 else f'{number:.4f}' for number in row))
        Console(file=sys.stdout).print(table)


def _running(runner) -> str:
    loop = runner.train_loop
    return 'training' if isinstance(loop, IterBasedTrainLoop) else f'epoch {loop.epoch + 1}/{loop.max_epochs}'


def position(runner) -> str:
    """The point that a training has reached: ``epoch 3`` or ``iteration 8000``."""
    loop = runner._train_loop  # the property would build one, and its data, in a test
    if not isinstance(loop, BaseLoop):
        return ''
    return f'iteration {loop.iter}' if isinstance(loop, IterBasedTrainLoop) else f'epoch {loop.epoch}'
