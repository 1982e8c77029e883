# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""State of a training beside weights and optimizer: early stopping, and a validation that was cut off."""

from typing import Any

from mmengine.hooks import EarlyStoppingHook
from mmengine.runner import EpochBasedTrainLoop

# in the message hub: iteration of the last complete validation; LoggerHook prints keys that begin with val
VALIDATED = 'last_validation'


def is_validation_due(runner: Any) -> bool:
    """Return True if the training validates at its present position, but the resumed checkpoint was saved before."""
    loop, done = runner.train_loop, runner.message_hub.runtime_info.get(VALIDATED)
    if runner._val_loop is None or runner.iter == 0 or done in (None, runner.iter):
        return False
    step, total = loop.iter, loop.max_iters
    if isinstance(loop, EpochBasedTrainLoop):
        if loop.iter != loop.epoch * len(loop.dataloader):  # in the middle of an epoch
            return False
        step, total = loop.epoch, loop.max_epochs
    if not hasattr(loop, 'val_interval'):
        return False
    loop._decide_current_val_interval()
    return step >= loop.val_begin and (step % loop.val_interval == 0 or step == total)


def resume_state(runner: Any) -> None:
    """Count early stopping from the saved metrics of a resumed run, and make a validation that was cut off."""
    if runner.iter == 0:
        return
    for hook in runner.hooks:
        history = runner.message_hub.log_scalars.get(f'val/{getattr(hook, "monitor", "")}')
        if isinstance(hook, EarlyStoppingHook) and history is not None and not hook.wait_count:
            for value in history.data[0]:
                ends, reason = hook._check_stop_condition(float(value))
            if len(history.data[0]) and ends:
                runner.train_loop.stop_training = True
                runner.logger.warning(f'{type(hook).__name__} had ended the training: {reason}')
    if is_validation_due(runner):
        runner.logger.info('validating first: the checkpoint was saved before its validation.')
        runner.val_loop.run()
