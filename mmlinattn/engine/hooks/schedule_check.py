# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Iterator

from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook, Hook
from mmengine.optim.scheduler.param_scheduler import INF
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop


def _all_schedulers(schedulers) -> list:
    if isinstance(schedulers, dict):
        return [each for part in schedulers.values() for each in _all_schedulers(part)]
    return list(schedulers or ())


def _is_warm_up(scheduler) -> bool:
    """Return True for LinearLR and ConstantLR with a rising rate, and for MMDetection's warm-up schedulers."""
    name = type(scheduler).__name__
    start = getattr(scheduler, 'start_factor', getattr(scheduler, 'factor', 1.0))
    rises = start < getattr(scheduler, 'end_factor', 1.0)
    return 'Warmup' in name or (name.startswith(('Linear', 'Constant')) and rises)


def schedule_faults(schedulers, max_epochs: int, max_iters: int, is_by_iteration: bool) -> Iterator[str]:
    """Compare learning rate schedules with the length of the training.

    Args:
        schedulers (list or dict): MMEngine's schedulers as built by the runner.
        max_epochs (int): Number of epochs.
        max_iters (int): Number of iterations.
        is_by_iteration (bool): True for an iteration-based loop, which has no epochs.

    Yields:
        str: A sentence on a scheduler that ends too late, too early, or rises again.
    """
    rates = [each for each in _all_schedulers(schedulers) if each.param_name == 'lr']
    for each in rates:
        name, unit = type(each).__name__, 'epoch' if each.by_epoch else 'iteration'
        length = max_epochs if each.by_epoch else max_iters
        if each.by_epoch and is_by_iteration:
            yield f'{name} changes the rate after epochs, and the iteration-based loop has none: set by_epoch=False.'
            continue
        end = min(each.end, INF)
        if _is_warm_up(each):
            if end < INF and 2 * end > length:
                yield f'the warm-up of {name} lasts until {unit} {end} of {length}.'
            continue
        marks = [mark for mark in getattr(each, 'milestones', ()) if mark + each.begin >= length]
        if marks:
            yield f'{name} has milestones {sorted(marks)}, and the training ends at {unit} {length}.'
            continue
        if hasattr(each, 'milestones') or end >= INF:
            continue
        period = getattr(each, 'T_max', getattr(each, 'total_steps', None))
        reach = each.begin + period if period else end
        if reach > length:
            yield f'{name} falls until {unit} {reach}, and the training ends at {unit} {length}.'
        elif period and reach < min(end, length):
            yield f'{name} rises again after {unit} {reach} of {length} (T_max = {period}).'
        elif end < length and not any(other.begin >= end for other in rates):
            yield f'{name} ends at {unit} {end}, and the training goes on at the last rate until {unit} {length}.'


@HOOKS.register_module(force=True)
class ScheduleCheckHook(Hook):
    """Warn before the first step if learning rate schedule and training length do not match.

    It also warns in these cases:

    - an iteration-based loop with gradient accumulation, because MMEngine counts iterations rather than updates;
    - a checkpoint that is already at the end of the training;
    - a run that saves no checkpoints, or cannot save best ones.
    """

    priority = 'VERY_LOW'  # after resuming: it takes the schedule of the checkpoint

    def before_train(self, runner) -> None:
        if not is_main_process():
            return
        if 0 < runner.max_iters <= runner.iter:
            runner.logger.warning(
                f'nothing is left to train: the checkpoint is at iteration {runner.iter} of {runner.max_iters}. Set '
                'train_cfg.max_epochs or max_iters higher to go on.'
            )
            return
        savers = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
        if not savers:
            runner.logger.warning('no checkpoint will be written: default_hooks.checkpoint is off.')
        if runner.val_loop is None and any(hook.save_best for hook in savers):
            runner.logger.warning('no best checkpoint will be kept (checkpoint.save_best): the run has no validation.')
        is_by_iteration = isinstance(runner.train_loop, IterBasedTrainLoop)
        for fault in schedule_faults(runner.param_schedulers, runner.max_epochs, runner.max_iters, is_by_iteration):
            runner.logger.warning(f'schedule and length of the training differ: {fault} Set param_scheduler to fit.')
        steps = getattr(runner.optim_wrapper, '_accumulative_counts', 1)
        if is_by_iteration and steps > 1:
            runner.logger.warning(
                f'max_iters = {runner.max_iters} iterations are {runner.max_iters // steps} updates with '
                f'accumulative_counts = {steps}. Multiply max_iters and the schedule by it to train as long as without.'
            )
