# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import copy
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook, Hook, ParamSchedulerHook
from mmengine.optim.scheduler.param_scheduler import INF
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop

from ...utils.building import unwrapped
from ...utils.errors import RunError, meant
from ..optimizers.saved_groups import PER_GROUP, all_schedulers, by_settings, named_wrappers


class SimulatedSchedule:
    """Learning rates of a training, simulated from iteration ``begin`` to ``iters`` by copies of the schedulers.

    ``groups`` are the ``param_groups`` of the optimizer; groups of equal settings count as one. ``rates`` has the shape
    (iterations, groups); ``bases`` are the rates without schedule, and ``sizes`` the numbers of parameter tensors.
    ``epoch_length`` is the number of iterations in an epoch, 0 without epochs.

    Raises:
        RunError: A scheduler fails before the end.
    """

    def __init__(self, schedulers: list, groups: list[dict], iters: int, epoch_length: int, begin: int):
        def settings(i: int) -> tuple:
            kept = {key: value for key, value in groups[i].items() if key not in ('params', 'param_names')}
            return kept, [vars(each)[key][i : i + 1] for each in schedulers for key in PER_GROUP if key in vars(each)]

        alike = [same for _, same in by_settings(range(len(groups)), settings)]
        chosen = [same[0] for same in alike]
        # MMEngine's base_param_settings come last and have no parameters
        self.sizes = [sum(len(groups[i].get('params') or ()) for i in same) for same in alike]
        self.bases = [groups[i].get('initial_lr', groups[i]['lr']) for i in chosen]
        self.iters, self.epoch_length, self.begin = iters, epoch_length, begin
        without = [{key: value for key, value in groups[i].items() if key != 'params'} for i in chosen]
        step = SimpleNamespace(_with_counter=True)  # MMEngine looks for its counter there
        stage: Any = SimpleNamespace(param_groups=without, step=step, _global_step=1)
        actors = [copy.copy(each) for each in schedulers]
        for actor in actors:
            actor.optimizer, actor.verbose = stage, False
            for key in PER_GROUP:
                if isinstance(vars(actor).get(key), list):
                    setattr(actor, key, [vars(actor)[key][i] for i in chosen])
        self.rates = np.empty((iters - begin, len(chosen)))
        for i in range(begin, iters):
            self.rates[i - begin] = [group['lr'] for group in without]
            is_end = epoch_length and (i + 1) % epoch_length == 0
            for actor in actors:
                if is_end or not actor.by_epoch:
                    try:
                        actor.step()
                    except ValueError as error:
                        kind = type(actor).__name__
                        raise RunError(f'param_scheduler: {kind} fails after iteration {i + 1}: {error}.') from error


def _reach(scheduler: Any) -> int:
    """Return the step at which a scheduler no longer changes the rate; 0 if it has no end."""
    marks = getattr(scheduler, 'milestones', None)
    if marks:
        return scheduler.begin + max(marks) + 1
    period = getattr(scheduler, 'T_max', getattr(scheduler, 'total_steps', None))
    if period:
        return scheduler.begin + period
    return scheduler.end if scheduler.end < INF else 0


def schedule_errors(
    schedulers: list, groups: list[dict], iters: int, epoch_length: int, begin: int = 0
) -> Iterator[str]:
    """Simulate a learning rate schedule to the end of the training, and describe its errors.

    Errors are a rate above its base, a long warm-up, an end too late or too early, a second rise, and a scheduler by
    epoch in an iteration-based loop (``epoch_length`` 0). For the arguments see :class:`SimulatedSchedule`.
    """
    rates = [each for each in schedulers if each.param_name == 'lr' and not getattr(each, 'need_val_args', False)]
    for name in [type(each).__name__ for each in rates if each.by_epoch and not epoch_length]:
        yield f'{name} changes the rate after epochs, and the iteration-based loop has none: set by_epoch=False.'
    rates = [each for each in rates if epoch_length or not each.by_epoch]
    if not rates or begin >= iters:
        return
    found = SimulatedSchedule(rates, groups, iters, epoch_length, begin)
    yield from filter(None, (_error_above_base(found, rates), _error_of_warm_up(found, rates)))
    yield from filter(None, (_error_of_end(found, each, rates) for each in rates if not _is_warm_up(each)))


def _is_warm_up(scheduler: Any) -> bool:
    """Return True for LinearLR and ConstantLR with a rising rate, and for MMDetection's warm-up schedulers."""
    start = getattr(scheduler, 'start_factor', getattr(scheduler, 'factor', math.inf))
    return 'Warmup' in type(scheduler).__name__ or start <= getattr(scheduler, 'end_factor', 1.0)


def _error_above_base(simulated: SimulatedSchedule, schedulers: list) -> str:
    """Describe a learning rate that rises above its base; '' if none does."""
    if any(hasattr(each, 'total_steps') for each in schedulers):  # OneCycleLR begins below its maximum
        return ''
    peaks = simulated.rates.max(axis=0)
    ratios = [peak - base * 1.001 if size else 0 for peak, base, size in zip(peaks, simulated.bases, simulated.sizes)]
    at = int(np.argmax(ratios))
    if ratios[at] <= 1e-12:
        return ''
    text = (
        f'the rate of {simulated.sizes[at]} parameters rises above {simulated.bases[at]:.3g}, to which it is set: '
        f'{peaks[at]:.3g} at iteration {simulated.begin + int(np.argmax(simulated.rates[:, at]))} of {simulated.iters}.'
    )
    floors = [f'eta_min={each.eta_min} of {type(each).__name__}' for each in schedulers if getattr(each, 'eta_min', 0)]
    if floors:
        text += f' {" and ".join(floors)} is a floor for all parameters; eta_min_ratio is one for each rate.'
    return text


def _error_of_warm_up(simulated: SimulatedSchedule, schedulers: list) -> str:
    """Describe a warm-up that has no end, or takes more than half of the training; '' otherwise."""
    at = int(np.argmax(simulated.bases))
    rates = simulated.rates[:, at]
    peak = int(np.argmax(rates >= np.max(rates) * (1 - 1e-6)))
    names = [type(each).__name__ for each in schedulers if _is_warm_up(each)]
    if not names or 2 * (simulated.begin + peak) <= simulated.iters or rates[peak] <= rates[0]:
        return ''
    if peak == len(rates) - 1 and rates[peak] < 0.999 * simulated.bases[at]:
        return (
            f'the warm-up of {names[0]} does not end: the last rate is {rates[peak]:.3g} of {simulated.bases[at]:.3g}.'
        )
    return f'the warm-up of {names[0]} lasts until iteration {simulated.begin + peak} of {simulated.iters}.'


def _error_of_end(simulated: SimulatedSchedule, scheduler: Any, schedulers: list) -> str:
    """Describe a ``scheduler`` that ends before or after the training, or rises again within it; '' if it fits."""
    unit, each = ('epoch', simulated.epoch_length) if scheduler.by_epoch else ('iteration', 1)
    total, reach, end, name = simulated.iters // each, _reach(scheduler), scheduler.end, type(scheduler).__name__
    last, rate = simulated.rates[-1], f'{simulated.rates[-1].max():.3g}'

    def since(step: int) -> np.ndarray:
        return simulated.rates[max(step * each - simulated.begin, 0) :]

    if reach > total:
        return f'{name} changes the rate until {unit} {reach}, and the training ends at {unit} {total}, with {rate}.'
    if hasattr(scheduler, 'T_max') and reach < min(end, total) and (last > 1.01 * since(reach)[0]).any():
        return f'{name} rises again after {unit} {reach} of {total} (T_max = {scheduler.T_max}).'
    is_followed = any(other.begin >= end for other in schedulers if other.by_epoch == scheduler.by_epoch)
    if end >= total or is_followed or hasattr(scheduler, 'milestones') or hasattr(scheduler, 'step_size'):
        return ''
    if (since(end) == last).all() and (last < simulated.rates.max(axis=0) * 0.999).any():
        return f'{name} ends at {unit} {end}, and the training goes on at the last rate, {rate}, until {unit} {total}.'
    return ''


def check_custom_keys(config: Any, model: Any, logger: Any) -> None:
    """Check that each key of ``paramwise_cfg.custom_keys`` is in the name of a parameter. ``config`` is that of the
    optimizer wrapper. A key that would change the learning rate raises a RunError; others get a warning."""
    settings = config.get('paramwise_cfg') if isinstance(config, dict) else None
    names = [name for name, _ in unwrapped(model).named_parameters()]
    for key, value in ((settings or {}).get('custom_keys') or {}).items():
        if any(key in name for name in names):
            continue
        parts = dict.fromkeys(part for name in names for part in name.split('.'))
        line = f'optim_wrapper.paramwise_cfg.custom_keys: {key!r} is in the name of no parameter.{meant(key, parts)}'
        if isinstance(value, dict) and value.get('lr_mult', 1.0) != 1.0:
            raise RunError(line)
        logger.warning(line)


def _saves(hook: CheckpointHook, runner: Any) -> bool:
    """Return True if a checkpoint hook saves in the rest of the training."""
    done, total = (runner.epoch, runner.max_epochs) if hook.by_epoch else (runner.iter, runner.max_iters)
    steps = range(max(done + 1, hook.save_begin), total + 1)
    return hook.save_last or any((step - hook.save_begin) % hook.interval == 0 for step in steps if hook.interval > 0)


def loop_errors(runner: Any, by_iteration: bool) -> Iterator[str]:
    """Describe settings of schedules, checkpoints, validations and hooks that have no effect in the train loop.

    Raises:
        RunError: ``val_interval`` is not a positive integer.
    """
    loop, savers = runner.train_loop, [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
    unit, total = ('iteration', runner.max_iters) if by_iteration else ('epoch', runner.max_epochs)
    steps = {f'{type(hook).__name__}.{name}': value for hook in runner.hooks for name, value in vars(hook).items()}
    steps['train_cfg.val_begin'] = loop.val_begin if runner.val_loop is not None else 0
    for name, step in steps.items():
        if type(step) is int and name.endswith(('_iter' if by_iteration else '_epoch', '.val_begin')) and step > total:
            yield f'{name}={step} is after the last {unit}, {total}.'
    interval = getattr(loop, 'val_interval', 1)
    if runner.val_loop is not None and (type(interval) is not int or interval < 1):
        raise RunError(f'train_cfg.val_interval={interval!r}: expected an integer from 1 up.')
    is_stepped = any(isinstance(hook, ParamSchedulerHook) for hook in runner.hooks)
    if all_schedulers(runner.param_schedulers) and not is_stepped:
        yield (
            'no hook steps param_scheduler, and the learning rate stays constant: default_hooks.param_scheduler is no '
            'ParamSchedulerHook. Set param_scheduler=None for a constant rate.'
        )
    if not any(_saves(hook, runner) for hook in savers):
        is_best_saved = runner.val_loop is not None and any(hook.save_best for hook in savers)
        others = ' to resume from will be written, only the best one' if is_best_saved else ' will be written'
        yield (
            f'no checkpoint{others}: default_hooks.checkpoint is off, or its interval and save_begin are beyond the '
            'training and save_last=False.'
        )
    if by_iteration and any(hook.by_epoch for hook in savers):
        yield (
            'default_hooks.checkpoint.by_epoch=True: an iteration-based loop has one epoch, so that one checkpoint '
            'is written, at its end. Set it to False.'
        )
    if by_iteration and runner.val_loop is not None and any(getattr(h, 'log_metric_by_epoch', 0) for h in runner.hooks):
        yield (
            'default_hooks.logger.log_metric_by_epoch=True: an iteration-based loop logs all validations at step '
            '0. Set it to False.'
        )


@HOOKS.register_module(force=True)
class ScheduleCheckHook(Hook):
    """Simulate the learning rate schedule before the first step, and warn if it does not fit the training.

    Copies of the schedulers run for each parameter group, in a resumed run from its position. The hook also warns in
    these cases:

    - a key of ``custom_keys`` without ``lr_mult`` that matches no parameter;
    - an iteration-based loop with gradient accumulation, because MMEngine counts iterations rather than updates;
    - a checkpoint that is already at the end of the training;
    - schedulers without a ``ParamSchedulerHook``;
    - a run without checkpoints, or a hook or validation that would begin after the end;
    - an iteration-based loop with hooks that count epochs.

    Raises:
        RunError: A key of ``custom_keys`` with ``lr_mult`` matches no parameter, a schedule fails before the end, or
            ``val_interval`` is not a positive integer.
    """

    priority = 'VERY_LOW'  # after resuming: it takes the schedule of the checkpoint

    def before_train(self, runner) -> None:
        if not is_main_process():
            return
        check_custom_keys(runner.cfg.get('optim_wrapper'), runner.model, runner.logger)
        by_iteration = isinstance(runner.train_loop, IterBasedTrainLoop)
        done, total = (runner.iter, runner.max_iters) if by_iteration else (runner.epoch, runner.max_epochs)
        if 0 < total <= done:
            at = f'{"iteration" if by_iteration else "epoch"} {done} of {total}'
            remedy = 'Set train_cfg.max_epochs or max_iters higher to go on.'
            runner.logger.warning(f'nothing is left to train: the checkpoint is at {at}. {remedy}')
            return
        for line in loop_errors(runner, by_iteration):
            runner.logger.warning(line)
        epoch_length = 0 if by_iteration else len(runner.train_dataloader)
        for name, wrapper in named_wrappers(runner.optim_wrapper).items():
            schedulers = runner.param_schedulers
            schedulers = all_schedulers(schedulers.get(name) if isinstance(schedulers, dict) else schedulers)
            groups = getattr(wrapper, 'param_groups', None) or []
            for error in schedule_errors(schedulers, groups, runner.max_iters, epoch_length, runner.iter):
                said = f'schedule of {name}' if name else 'schedule'
                runner.logger.warning(f'{said} and length of the training: {error} Set param_scheduler to fit.')
            steps = getattr(wrapper, '_accumulative_counts', 1)
            if by_iteration and steps > 1:
                runner.logger.warning(
                    f'max_iters = {runner.max_iters} iterations are {runner.max_iters // steps} updates with '
                    f'accumulative_counts = {steps}. Multiply max_iters and the schedule by it to train as long as '
                    'without.'
                )
