# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Walk optimizers, schedulers and groups; fit states of a checkpoint to an optimizer with other parameter groups."""

from collections.abc import Callable, Iterable
from typing import Any, Optional

from mmengine.optim import OptimWrapperDict
from torch import nn

from ...utils.errors import RunError

_IMPLEMENTATION = ('fused', 'foreach')  # how a step is computed, not its result
_LEFT_OUT = ('params', 'param_names', 'lr_mult', 'decay_mult', *_IMPLEMENTATION)
PER_GROUP = ('base_values', '_last_value', 'min_values')  # of MMEngine's schedulers: a value for each group
_ADVICE = 'as it was, or load_from=CHECKPOINT in place of --resume.'


def named_wrappers(wrapper: Any) -> dict[str, Any]:
    """Return the wrappers of an ``OptimWrapperDict`` by name; any other wrapper has the name ''."""
    return dict(wrapper.items()) if isinstance(wrapper, OptimWrapperDict) else {'': wrapper}


def all_schedulers(schedulers: Any) -> list:
    """Return the schedulers in ``runner.param_schedulers`` as one list.

    ``schedulers`` is a list, None, or for several optimizers a dict of lists by their names.
    """
    if isinstance(schedulers, dict):
        return [each for part in schedulers.values() for each in all_schedulers(part)]
    return [each for each in schedulers or () if hasattr(each, 'step')]


def by_settings(items: Iterable, settings: Callable[[Any], Any]) -> list[tuple[Any, list]]:
    """Group items of equal ``settings(item)``, which need not be hashable.

    Returns:
        list[tuple[Any, list]]: Pairs of settings and items, in the order of first occurrence.
    """
    found: list[tuple[Any, list]] = []
    for item in items:
        own = settings(item)
        same = next((members for known, members in found if known == own), None)
        if same is None:
            found.append((own, [item]))
        else:
            same.append(item)
    return found


def _names_of(groups: list[dict], order: list[str]) -> Optional[list[list[str]]]:
    """Return the parameter names of each of an optimizer's ``param_groups``, or None if they are unknown.

    These are the stored ``param_names``. Groups of one parameter each, without names, take those of ``order``, the
    names of the parameters in the model's order.
    """
    if groups and all('param_names' in group for group in groups):
        return [list(group['param_names']) for group in groups]
    if len(groups) == len(order) and all(len(group['params']) == 1 for group in groups):
        return [[name] for name in order]
    return None


def _settings(group: dict) -> dict:
    return {key: value for key, value in group.items() if key not in _LEFT_OUT}


def fit_groups(groups: list[dict], saved: list[dict], order: list[str]) -> tuple[list[dict], list[int]]:
    """Rearrange the ``param_groups`` of a saved optimizer state to match those of an optimizer.

    Parameters of merged groups are matched by ``param_names``, parameters of MMEngine's one-parameter groups by
    ``order`` (the names of all parameters in the model), and other groups by position. As in MMEngine, the saved
    settings are used, except that ``fused`` and ``foreach`` come from the optimizer.

    Returns:
        tuple[list[dict], list[int]]: The groups to load, and for each the index of the saved group with its settings.

    Raises:
        RunError: The state has other parameters, or another number of groups without names. Or parameters of one group
            have different saved settings.
    """
    named = {name for group in [*groups, *saved] for name in group.get('param_names', ())}
    order = [name for name in order if name in named]
    names, saved_names = _names_of(groups, order), _names_of(saved, order)
    if names is None or saved_names is None:
        if len(groups) != len(saved):
            raise RunError(
                f'the optimizer of the checkpoint has {len(saved)} groups of parameters and that of the config '
                f'{len(groups)}. Set optim_wrapper.constructor and paramwise_cfg {_ADVICE}'
            )
        own = [{key: group[key] for key in _IMPLEMENTATION if key in group} for group in groups]
        return [{**old, **settings} for old, settings in zip(saved, own)], list(range(len(saved)))

    # saved group and index of each parameter
    origin = {name: (k, i) for k, each in enumerate(saved_names) for name, i in zip(each, saved[k]['params'])}
    differing = {name for each in names for name in each} ^ origin.keys()
    if differing:
        raise RunError(
            f'the optimizer of the checkpoint has other parameters than that of the config: {len(differing)} are in '
            f'one of them only, {min(differing)} first. Train the same parameters {_ADVICE}'
        )
    fitted, sources = [], []
    for group, (first, *others) in zip(groups, names):
        source = origin[first][0]
        for name in others:
            if _settings(saved[origin[name][0]]) != _settings(saved[source]):
                raise RunError(
                    f'the optimizer of the checkpoint has other settings for {name} than for {first}, which share a '
                    f'group of parameters in that of the config. Set optim_wrapper.paramwise_cfg {_ADVICE}'
                )
        kept = {key: group[key] for key in _LEFT_OUT if key in group and key != 'params'}
        fitted.append(dict(_settings(saved[source]), **kept, params=[origin[name][1] for name in (first, *others)]))
        sources.append(source)
    return fitted, sources


def fit_checkpoint(optimizer: Any, checkpoint: dict, model: nn.Module) -> None:
    """Rearrange the optimizer and scheduler states in a checkpoint of MMEngine to match the groups of an optimizer of
    ``model``, in place; errors are those of :func:`fit_groups`."""
    saved = checkpoint['optimizer']['param_groups']
    groups, sources = fit_groups(optimizer.param_groups, saved, [name for name, _ in model.named_parameters()])
    checkpoint['optimizer'] = {**checkpoint['optimizer'], 'param_groups': groups}
    schedulers = checkpoint.get('param_schedulers')
    for state in schedulers if isinstance(schedulers, list) else ():
        for key in PER_GROUP:
            values = state.get(key)
            # with two or more groups, MMEngine appends the base rate, so that a list may have one value more than
            # groups
            if isinstance(values, list) and len(values) - len(saved) in (0, 1):
                state[key] = [values[i] for i in sources] + values[len(saved) :]
