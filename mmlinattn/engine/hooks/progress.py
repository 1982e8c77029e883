# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import datetime
import sys
import time
from typing import Optional

import numpy as np
import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
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


@HOOKS.register_module(force=True)
class ProgressHook(Hook):
    """Print the progress of a run from its first step on, and a table of metrics after each validation and test.

    A line with loss, learning rate and remaining time is printed after the first step and every ``interval`` seconds.
    The table has the best values of the run, too. Only the main process prints.

    Args:
        interval (float): Seconds between lines.
    """

    priority = 'LOW'  # after IterTimerHook and RuntimeInfoHook, the sources of the numbers

    def __init__(self, interval: float = 30.0):
        self.interval = interval
        self._last_line = -float('inf')

    def before_train(self, runner) -> None:
        self._last_line = -float('inf')

    def _before_epoch(self, runner, mode: str = 'train') -> None:
        if mode != 'train':
            self._last_line = time.monotonic()

    def after_val_epoch(self, runner, metrics: Optional[dict[str, float]] = None) -> None:
        loop, at = runner._train_loop, ''  # the property would build one, and its data
        if isinstance(loop, BaseLoop):
            at = f'iteration {loop.iter}' if isinstance(loop, IterBasedTrainLoop) else f'epoch {loop.epoch}'
        self._print_table(metrics, runner, f'validation {at}')

    def after_test_epoch(self, runner, metrics: Optional[dict[str, float]] = None) -> None:
        self._print_table(metrics, runner, 'test')

    def _after_iter(self, runner, batch_idx: int, data_batch=None, outputs=None, mode: str = 'train') -> None:
        if not is_main_process() or time.monotonic() - self._last_line < self.interval:
            return
        self._last_line, loop, hub = time.monotonic(), getattr(runner, f'{mode}_loop'), runner.message_hub
        parts = [dict(val='validation', train='training').get(mode, mode)]
        if mode != 'train':
            parts.append(f'step {batch_idx + 1}/{len(loop.dataloader)}')
        else:
            if not isinstance(loop, IterBasedTrainLoop):
                parts = [f'epoch {loop.epoch + 1}/{loop.max_epochs}']
            parts.append(f'step {runner.iter + 1}/{runner.max_iters}')
            names = [name for name in ('loss', 'lr') if f'train/{name}' in hub.log_scalars]
            parts += [f'{name} {hub.get_scalar(f"train/{name}").current():.4g}' for name in names]
        print(*parts, f'eta {datetime.timedelta(seconds=int(hub.get_info("eta", 0.0)))}', sep='  ', flush=True)

    def _print_table(self, metrics: Optional[dict], runner, title: str) -> None:
        """Print a table of metrics in the main process, with the best values of all validations if there are any."""
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
