# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Whether a checkpoint can be resumed from: everything MMEngine takes over from it without looking."""

import math
from numbers import Real
from typing import Any

import torch
from mmengine.logging import HistoryBuffer
from mmengine.optim import OptimWrapperDict
from mmengine.optim.scheduler import param_scheduler
from mmengine.runner.base_loop import BaseLoop
from torch import Tensor

from ..utils.errors import CheckpointError

__all__ = ['check_optimizers', 'check_resumable']

_MAX_SEED = 2**32 - 1  # NumPy's
# State that PyTorch's optimizers keep in the shape of the parameter.
_OF_PARAMETER_SHAPE = ('momentum_buffer', 'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'square_avg', 'sum', 'acc_delta')
_ONE_CYCLE = tuple(
    getattr(param_scheduler.OneCycleParamScheduler, name) for name in ('_annealing_cos', '_annealing_linear')
)


def check_resumable(runner, checkpoint: dict, source: str) -> None:
    """Check counters, seed, message hub and schedules of a checkpoint before MMEngine takes them over.

    Raises:
        CheckpointError: one of them is missing, of another kind, or a number that cannot be; in one line.
    """
    try:
        _check_meta(runner, checkpoint.get('meta'))
        _check_hub(checkpoint.get('message_hub'))
        _check_schedules(checkpoint.get('param_schedulers', []))
        _require(isinstance(checkpoint.get('optimizer', {}), dict), 'optimizer is no dict')
    except _NotResumable as error:
        hint = '. It can be loaded without its state: --cfg-options load_from=FILE, without --resume'
        raise CheckpointError(f'{source} cannot be resumed from: {error}{hint}') from None


class _NotResumable(ValueError):
    pass


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise _NotResumable(message)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_meta(runner, meta: Any) -> None:
    _require(isinstance(meta, dict), 'it has no meta')
    for name, maximum in (('epoch', 'max_epochs'), ('iter', 'max_iters')):
        value = meta.get(name)
        _require(_is_count(value), f'meta.{name} = {value!r:.80} is no count')
        # An epoch-based run of fewer batches than the saved one may well be beyond its iterations.
        loop = runner.train_loop
        end = getattr(loop, maximum, None) if isinstance(loop, BaseLoop) else None
        if _is_count(end) and _is_by_epoch(loop) == (name == 'epoch'):
            _require(value <= end, f'it is at {name} {value}, and this run ends at {end} ({maximum})')
    seed = meta.get('seed')
    _require(seed is None or _is_count(seed) and seed <= _MAX_SEED, f'meta.seed = {seed!r:.80} is no seed')


def _is_by_epoch(loop: BaseLoop) -> bool:
    return hasattr(loop, 'run_epoch')


def _check_hub(hub: Any) -> None:
    _require(isinstance(hub, dict), 'it has no message_hub')
    for name in ('log_scalars', 'runtime_info', 'resumed_keys'):
        _require(isinstance(hub.get(name), dict), f'message_hub.{name} is no dict')
    for key, value in hub['log_scalars'].items():
        # MMEngine leaves out what is no log buffer.
        is_fine = (
            not isinstance(value, HistoryBuffer) or type(value) is HistoryBuffer and hasattr(value, '_log_history')
        )
        _require(is_fine, f'log scalar {key} is an empty log buffer')
    for key, value in hub['runtime_info'].items():
        if key == 'best_score' or key.startswith('best_score_'):
            _require(_is_number(value), f'message_hub.runtime_info.{key} = {value!r:.80} is no number')
    for key, value in hub['resumed_keys'].items():
        _require(isinstance(value, bool), f'message_hub.resumed_keys.{key} = {value!r:.80} is neither True nor False')


def _is_number(value: Any) -> bool:
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else value
    return isinstance(value, Real)


def _check_schedules(schedules: Any) -> None:
    groups = schedules.values() if isinstance(schedules, dict) else [schedules]
    for group in groups:
        _require(isinstance(group, list), 'param_schedulers is no list')
        for state in group:
            _require(isinstance(state, dict), 'an entry of param_schedulers is no dict')
            for key, value in state.items():
                # MMEngine makes each an attribute of the scheduler, methods included.
                is_method = callable(getattr(param_scheduler._ParamScheduler, str(key), None))
                _require(isinstance(key, str) and not is_method, f'param_schedulers has an entry {key!r:.80}')
                is_open = key in ('best', 'rule_worse')  # of ReduceOnPlateau, infinite before the first value
                _require(is_open or _is_plain(value), f'param_schedulers.{key} = {value!r:.80} is no finite number')


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if value is None or isinstance(value, str) or any(value is function for function in _ONE_CYCLE):
        return True
    return _is_finite_number(value)


def check_optimizers(runner, source: str) -> None:
    """Check the optimizers after they took over a checkpoint's state; PyTorch compares numbers of parameters only.

    Raises:
        CheckpointError: a setting is no number, or state of a parameter has another shape or is not finite.
    """
    wrapper = runner.optim_wrapper
    for wrapped in wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]:
        optimizer = getattr(wrapped, 'optimizer', None)
        if isinstance(optimizer, torch.optim.Optimizer):
            try:
                _check_optimizer(optimizer)
            except _NotResumable as error:
                raise CheckpointError(f'{source} cannot be resumed from: {error}') from None


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for key, default in optimizer.defaults.items():
            _require(_is_like(group.get(key), default), f'the optimizer has {key} = {group.get(key)!r:.80}')
    for number, (parameter, state) in enumerate(optimizer.state.items()):
        _require(isinstance(state, dict), f"the optimizer's state of parameter {number} is no dict")
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            name = f"the optimizer's {key} of parameter {number}"
            if key in _OF_PARAMETER_SHAPE:
                _require(
                    value.shape == parameter.shape,
                    f'{name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}',
                )
            _require(not value.is_meta and bool(value.isfinite().all()), f'{name} is not finite')


def _is_like(value: Any, default: Any) -> bool:
    """Whether a setting is of the kind of its default; None and switches may stand for each other."""
    if isinstance(default, (bool, type(None))):
        return isinstance(value, (bool, type(None)))
    if isinstance(default, tuple):
        return isinstance(value, (tuple, list)) and len(value) == len(default) and all(map(_is_like, value, default))
    return _is_finite_number(value) if _is_number(default) else isinstance(value, type(default))


def _is_finite_number(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)
