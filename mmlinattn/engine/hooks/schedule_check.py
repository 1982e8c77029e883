# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import numpy as np
from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook, Hook
from mmengine.optim import OptimWrapperDict
from mmengine.optim.scheduler.param_scheduler import INF
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop

from ...utils.building import unwrapped
from ...utils.errors import RunError, closest
from ..optimizers.saved_groups import PER_GROUP


def all_schedulers(schedulers: Any) -> list:
    """Return the built schedulers of a runner: of one optimizer or several, or none."""
    if isinstance(schedulers, dict):
        return [each for part in schedulers.values() for each in all_schedulers(part)]
    return [each for each in schedulers or () if hasattr(each, 'step')]


class Length(NamedTuple):
    """Length of a training in iterations, and of an epoch; ``epoch`` is 0 in an iteration-based loop."""

    iters: int
    epoch: int

    def unit(self, scheduler: Any) -> tuple[str, int, int]:
        """Return the name of a scheduler's step, its number of iterations, and the length of the training in it."""
        each = self.epoch if scheduler.by_epoch and self.epoch else 1
        return ('epoch' if scheduler.by_epoch else 'iteration'), each, self.iters // each


class Play:
    """A learning rate schedule, played by copies of its schedulers for each distinct group of parameters.

    Args:
        schedulers (list): Built schedulers of one optimizer, at the present state.
        groups (list[dict]): ``param_groups`` of its wrapper.
        length (Length): Length of the training.
        begin (int): Number of iterations that are done.

    Attributes:
        rates (np.ndarray): (iterations, groups) learning rates of the iterations from ``begin`` on.
        bases (list[float]): Rate of each group without schedule.
    """

    def __init__(self, schedulers: list, groups: list[dict], length: Length, begin: int):
        distinct: dict[str, list[int]] = {}
        for i, group in enumerate(groups):
            kept = {key: value for key, value in group.items() if key not in ('params', 'param_names')}
            lists = [vars(each)[key][i : i + 1] for each in schedulers for key in PER_GROUP if key in vars(each)]
            distinct.setdefault(repr((sorted(kept.items()), lists)), []).append(i)
        chosen = [same[0] for same in distinct.values()]
        # MMEngine's base_param_settings come last and have no parameters
        self.sizes = [sum(len(groups[i].get('params') or ()) for i in same) for same in distinct.values()]
        self.bases = [groups[i].get('initial_lr', groups[i]['lr']) for i in chosen]
        self.length, self.begin = length, begin
        without = [{key: value for key, value in groups[i].items() if key != 'params'} for i in chosen]
        step = SimpleNamespace(_with_counter=True)  # MMEngine looks for its counter there
        self.stage: Any = SimpleNamespace(param_groups=without, step=step, _global_step=1)
        self.actors = [self._copied(each, chosen) for each in schedulers]
        self.rates = self._played(begin, length.iters)

    def _copied(self, scheduler: Any, chosen: list[int]) -> Any:
        made = copy.copy(scheduler)
        made.optimizer, made.verbose = self.stage, False
        for key in PER_GROUP:
            if isinstance(vars(made).get(key), list):
                setattr(made, key, [vars(made)[key][i] for i in chosen])
        return made

    def _played(self, begin: int, end: int) -> np.ndarray:
        rates = np.empty((max(end - begin, 0), len(self.bases)))
        for i in range(begin, end):
            rates[i - begin] = [group['lr'] for group in self.stage.param_groups]
            is_end = self.length.epoch and (i + 1) % self.length.epoch == 0
            for actor in self.actors:
                if is_end or not actor.by_epoch:
                    try:
                        actor.step()
                    except ValueError as error:
                        kind = type(actor).__name__
                        raise RunError(f'param_scheduler: {kind} fails after iteration {i + 1}: {error}.') from error
        return rates

    def play_on(self, end: int) -> np.ndarray:
        """Play beyond the training until iteration ``end``, and return the rate of each group there."""
        for actor in self.actors:
            period = getattr(actor, 'T_max', None)
            if period and actor.end >= self.length.unit(actor)[2]:
                actor.end = max(actor.end, actor.begin + period)
        self._played(self.length.iters, end)
        return np.array([group['lr'] for group in self.stage.param_groups])


def _reach(scheduler: Any) -> int:
    """Return the step at which a scheduler no longer changes the rate; 0 if it has no end."""
    marks = getattr(scheduler, 'milestones', None)
    if marks:
        return scheduler.begin + max(marks) + 1
    period = getattr(scheduler, 'T_max', getattr(scheduler, 'total_steps', None))
    if period:
        return scheduler.begin + period
    return scheduler.end if scheduler.end < INF else 0


def schedule_faults(schedulers: list, groups: list[dict], length: Length, begin: int = 0) -> Iterator[str]:
    """Play a learning rate schedule to the end of the training, and describe what it does to the rates.

    Args:
        schedulers (list): MMEngine's schedulers of one optimizer, as built or resumed by the runner.
        groups (list[dict]): ``param_groups`` of its wrapper.
        length (Length): Length of the training.
        begin (int): Number of iterations that are done.

    Yields:
        str: A sentence on a rate above its base, a warm-up that takes most of the training, and on a schedule that
        ends too late or too early, or rises again.
    """
    rates = [each for each in schedulers if each.param_name == 'lr' and not getattr(each, 'need_val_args', False)]
    for each in rates if not length.epoch else ():
        if each.by_epoch:
            name = type(each).__name__
            yield f'{name} changes the rate after epochs, and the iteration-based loop has none: set by_epoch=False.'
    rates = [each for each in rates if length.epoch or not each.by_epoch]
    if not rates or begin >= length.iters:
        return
    play = Play(rates, groups, length, begin)
    yield from filter(None, (_above_base(play, rates), _warm_up(play, rates)))
    peaks, last = play.rates.max(axis=0), play.rates[-1]
    for each in rates:
        yield from _rises_again(play, each)
    late = {each: _reach(each) for each in rates if _reach(each) > length.unit(each)[2]}
    ends = {each: min(each.end, INF) for each in rates if each not in late and not hasattr(each, 'milestones')}
    for each, end in ends.items():
        unit, size, total = length.unit(each)
        is_last = not any(other.begin >= end for other in rates if other.by_epoch == each.by_epoch)
        tail = play.rates[max(end * size - begin, 0) :]
        falls = len(tail) and (tail == tail[0]).all() and (last < peaks * 0.999).any() and not _is_warm_up(each)
        if end < total and is_last and falls and not hasattr(each, 'step_size'):
            yield (
                f'{type(each).__name__} ends at {unit} {end}, and the training goes on at the last rate, '
                f'{tail[0].max():.3g}, until {unit} {total}.'
            )
    if not late:
        return
    final = play.play_on(max(reach * length.unit(each)[1] for each, reach in late.items()))
    at = int(np.argmax(last / np.maximum(final, 1e-30)))
    for each, reach in late.items() if final[at] < 0.99 * last[at] else ():
        unit, _, total = length.unit(each)
        if not _is_warm_up(each):
            yield (
                f'{type(each).__name__} changes the rate until {unit} {reach}, and the training ends at {unit} '
                f'{total}, with {last[at]:.3g} instead of {final[at]:.3g}.'
            )


def _is_warm_up(scheduler: Any) -> bool:
    """Return True for LinearLR and ConstantLR with a rising rate, and for MMDetection's warm-up schedulers."""
    start = getattr(scheduler, 'start_factor', getattr(scheduler, 'factor', 1.0))
    return 'Warmup' in type(scheduler).__name__ or start < getattr(scheduler, 'end_factor', 1.0)


def _above_base(play: Play, schedulers: list) -> Optional[str]:
    if any(hasattr(each, 'total_steps') for each in schedulers):  # OneCycleLR begins below its maximum
        return None
    peaks = play.rates.max(axis=0)
    ratios = [peak - base * 1.001 if size else 0 for peak, base, size in zip(peaks, play.bases, play.sizes)]
    at = int(np.argmax(ratios))
    if ratios[at] <= 1e-12:
        return None
    floors = [f'eta_min={each.eta_min} of {type(each).__name__}' for each in schedulers if getattr(each, 'eta_min', 0)]
    floor = ''
    if floors:
        floor = f'{" and ".join(floors)} is a floor for all parameters; eta_min_ratio is one for each rate. '
    return (
        f'the rate of {play.sizes[at]} parameters rises above {play.bases[at]:.3g}, to which it is set: '
        f'{peaks[at]:.3g} at iteration {play.begin + int(np.argmax(play.rates[:, at]))} of {play.length.iters}. {floor}'
    ).strip()


def _warm_up(play: Play, schedulers: list) -> Optional[str]:
    at = int(np.argmax(play.bases))
    rates, total = play.rates[:, at], play.length.iters
    peak = int(np.argmax(rates >= rates.max() * (1 - 1e-6)))
    names = [type(each).__name__ for each in schedulers if _is_warm_up(each)]
    if not names or 2 * (play.begin + peak) <= total or rates[peak] <= rates[0]:
        return None
    if peak == len(rates) - 1 and rates[peak] < 0.999 * play.bases[at]:
        return f'the warm-up of {names[0]} does not end: the last rate is {rates[peak]:.3g} of {play.bases[at]:.3g}.'
    return f'the warm-up of {names[0]} lasts until iteration {play.begin + peak} of {total}.'


def _rises_again(play: Play, scheduler: Any) -> Iterator[str]:
    unit, each, total = play.length.unit(scheduler)
    period, begin = getattr(scheduler, 'T_max', None), scheduler.begin
    rates = play.rates[max((begin + (period or 0)) * each - play.begin, 0) :]
    if period and begin + period < min(scheduler.end, total) and len(rates) and (rates[-1] > 1.01 * rates[0]).any():
        yield f'{type(scheduler).__name__} rises again after {unit} {begin + period} of {total} (T_max = {period}).'


def check_custom_keys(config: Any, model: Any, logger: Any) -> None:
    """Check that each key of ``paramwise_cfg.custom_keys`` is in the name of a parameter.

    Raises:
        RunError: A key that would change the learning rate is in none. Other keys get a warning.
    """
    settings = config.get('paramwise_cfg') if isinstance(config, dict) else None
    names = [name for name, _ in unwrapped(model).named_parameters()]
    for key, value in ((settings or {}).get('custom_keys') or {}).items():
        if any(key in name for name in names):
            continue
        parts = dict.fromkeys(part for name in names for part in name.split('.'))
        near = closest(key, parts)
        line = f'optim_wrapper.paramwise_cfg.custom_keys: {key!r} is in the name of no parameter.'
        line += f' Did you mean {near!r}?' if near else ''
        if isinstance(value, dict) and value.get('lr_mult', 1.0) != 1.0:
            raise RunError(line)
        logger.warning(line)


def _saves(hook: CheckpointHook, runner: Any) -> bool:
    """Return True if a checkpoint hook saves in the rest of the training."""
    done, total = (runner.epoch, runner.max_epochs) if hook.by_epoch else (runner.iter, runner.max_iters)
    steps = range(max(done, hook.save_begin) + 1, total + 1)
    return hook.save_last or any((step - hook.save_begin) % hook.interval == 0 for step in steps if hook.interval > 0)


@HOOKS.register_module(force=True)
class ScheduleCheckHook(Hook):
    """Play the learning rate schedule before the first step, and warn if it does not fit the training.

    The schedulers themselves are played to the end of the training for each group of parameters, at the real batch
    and, in a resumed run, from its position. The hook also warns in these cases:

    - an iteration-based loop with gradient accumulation, because MMEngine counts iterations rather than updates;
    - a checkpoint that is already at the end of the training;
    - a run without checkpoints, or without the validation that the config has;
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
        unit = 'iteration' if by_iteration else 'epoch'
        if 0 < total <= done:
            runner.logger.warning(
                f'nothing is left to train: the checkpoint is at {unit} {done} of {total}. Set train_cfg.max_epochs or '
                'max_iters higher to go on.'
            )
            return
        self._check_hooks(runner, by_iteration, unit, total)
        length = Length(runner.max_iters, 0 if by_iteration else len(runner.train_dataloader))
        wrappers, schedulers = {'': runner.optim_wrapper}, {'': runner.param_schedulers}
        if isinstance(runner.optim_wrapper, OptimWrapperDict):
            wrappers = dict(runner.optim_wrapper.items())
            schedulers = runner.param_schedulers if isinstance(runner.param_schedulers, dict) else {}
        for name, wrapper in wrappers.items():
            groups = getattr(wrapper, 'param_groups', None)
            for fault in schedule_faults(all_schedulers(schedulers.get(name)), groups or [], length, runner.iter):
                said = f'schedule of {name}' if name else 'schedule'
                runner.logger.warning(f'{said} and length of the training: {fault} Set param_scheduler to fit.')
            steps = getattr(wrapper, '_accumulative_counts', 1)
            if by_iteration and steps > 1:
                runner.logger.warning(
                    f'max_iters = {runner.max_iters} iterations are {runner.max_iters // steps} updates with '
                    f'accumulative_counts = {steps}. Multiply max_iters and the schedule by it to train as long as '
                    'without.'
                )

    @staticmethod
    def _check_hooks(runner, by_iteration: bool, unit: str, total: int) -> None:
        """Warn of missing checkpoints and validations, and of hooks that wait for epochs in a loop by iteration."""
        loop, savers = runner.train_loop, [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
        for hook in runner.hooks:
            for name, value in vars(hook).items():
                if type(value) is int and name.endswith('_iter' if by_iteration else '_epoch') and value > total:
                    runner.logger.warning(f'{type(hook).__name__}.{name}={value} is after the last {unit}, {total}.')
        interval = getattr(loop, 'val_interval', 1)
        if runner.val_loop is not None and (type(interval) is not int or interval < 1):
            raise RunError(f'train_cfg.val_interval={interval!r}: expected an integer from 1 up.')
        if runner.val_loop is not None and loop.val_begin > total:
            runner.logger.warning(
                f'train_cfg.val_begin={loop.val_begin} is after the last {unit}, {total}: there is no validation.'
            )
        if not any(_saves(hook, runner) for hook in savers):
            runner.logger.warning(
                'no checkpoint will be written: default_hooks.checkpoint is off, or its interval and save_begin are '
                'beyond the training and save_last=False.'
            )
        if not by_iteration:
            return
        if any(hook.by_epoch for hook in savers):
            runner.logger.warning(
                'default_hooks.checkpoint.by_epoch=True: an iteration-based loop has one epoch, so that one checkpoint '
                'is written, at its end. Set it to False.'
            )
        if runner.val_loop is not None and any(getattr(h, 'log_metric_by_epoch', 0) for h in runner.hooks):
            runner.logger.warning(
                'default_hooks.logger.log_metric_by_epoch=True: an iteration-based loop logs all validations at step '
                '0. Set it to False.'
            )
