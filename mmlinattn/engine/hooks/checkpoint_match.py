# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from typing import Union

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner.base_loop import BaseLoop
from torch.optim import Optimizer

from ...backbones.base import Backbone
from ...checkpoints.loading import (
    UNUSED_IN_TESTS,
    check_values,
    fill,
    runner_state,
    running_statistics,
)
from ...checkpoints.states import some
from ...utils.building import unwrapped
from ...utils.errors import RunError
from ..optimizers.saved_groups import fit_checkpoint

# of a schedule's state, what is no setting
_PROGRESS = ('last_step', 'base_values', 'verbose', 'best', 'num_bad_epochs', 'cooldown_counter')


def _kept_settings(groups: list, saved: list) -> list[str]:
    """Settings of an optimizer that differ from those in a checkpoint, which MMEngine takes on resuming."""
    kept: dict[str, str] = {}
    for group, old in zip(groups, saved):
        for key in old:
            # with a schedule, lr is that of an iteration
            begin = key in ('lr', 'momentum') and f'initial_{key}' in group and f'initial_{key}' in old
            if key in group and key != 'params' and not begin and old[key] != group[key]:
                kept.setdefault(key.replace('initial_', ''), f'{old[key]} (the config has {group[key]})')
    return [f'{key} = {values}' for key, values in kept.items()]


def _kept_schedule(schedulers: list, saved: list) -> list[str]:
    """Settings of the schedules that differ from those in a checkpoint, which MMEngine takes on resuming."""
    if len(schedulers) != len(saved):
        return [f'{len(saved)} of its param_schedulers (the config has {len(schedulers)})']
    kept = []
    for scheduler, old in zip(schedulers, saved):
        state, name = scheduler.state_dict(), type(scheduler).__name__
        own = {key for key in state if key[0] != '_' and key not in _PROGRESS}
        changed = [key for key in own & old.keys() if state[key] != old[key]]
        kept += [f'{name}.{key} = {old[key]} (the config has {state[key]})' for key in sorted(changed)]
        if own - old.keys():
            kept.append(f'another schedule than {name}')
    return kept


def _tell_kept_settings(runner, checkpoint: dict) -> None:
    """Warn of settings of the config that a resumed run does not use.

    Raises:
        RunError: The checkpoint is of another kind of optimizer.
    """
    saved, schedulers = checkpoint.get('optimizer'), runner.param_schedulers
    if not isinstance(saved, dict) or not hasattr(runner.optim_wrapper, 'param_groups'):
        return  # several optimizers, or none
    if isinstance(getattr(runner.optim_wrapper, 'optimizer', None), Optimizer) and saved.get('param_groups'):
        fit_checkpoint(runner.optim_wrapper.optimizer, checkpoint, unwrapped(runner.model))
        saved = checkpoint['optimizer']
    groups, old_groups = runner.optim_wrapper.param_groups, saved.get('param_groups') or []
    for group, old in zip(groups, old_groups):
        added, gone = (
            {key for key in one.keys() - other.keys() if not key.startswith('initial_')}  # by a schedule, where any is
            for one, other in ((group, old), (old, group))
        )
        if added and gone:  # a newer PyTorch has more settings, an older one fewer
            kind = type(runner.optim_wrapper.optimizer).__name__
            raise RunError(
                f'the checkpoint to resume from is of another optimizer than {kind}: it has {some(sorted(gone))} and '
                f'lacks {some(sorted(added))}. Set optim_wrapper.optimizer as it was, or load_from=CHECKPOINT in place '
                'of --resume, which begins at iteration 0.'
            )
    kept = _kept_settings(groups, old_groups)
    if isinstance(schedulers, list) and isinstance(checkpoint.get('param_schedulers'), list):
        kept += _kept_schedule(schedulers, checkpoint['param_schedulers'])
    if any(type(scheduler).__name__.startswith('ReduceOnPlateau') for scheduler in schedulers or ()):
        runner.logger.warning(
            'resuming with ReduceOnPlateau: checkpoints are written before the validation whose result changes the '
            'learning rate, so that from here it may differ from that of a run without interruption.'
        )
    if kept:
        runner.logger.warning(
            f'resuming goes on with optimizer and schedule of the checkpoint: {"; ".join(kept)}. The learning rate and '
            'other settings of the config take effect with load_from=CHECKPOINT in place of --resume, from iteration 0.'
        )


def _parts_of(keys: list[str]) -> str:
    """The modules of some weights, for ``left_out``."""
    return ','.join(list(dict.fromkeys(key.split()[0].rpartition('.')[0] for key in keys))[:5])


@HOOKS.register_module(force=True)
class CheckpointMatchHook(Hook):
    """Say which weights of a checkpoint do not fit the model, above all those of a head for other classes.

    A run that resumes keeps the learning rate of its checkpoint; where the config has another, one line says so.

    MMEngine loads the weights that fit and logs the rest. For ``load_from`` in training that is right: here it is one
    warning with both shapes of each weight. Testing or resuming with weights as they were initialised is a mistake:
    the run stops.

    Args:
        left_out: Beginnings of the keys that may stay as they are initialised, e.g. ``'decode_head.conv_seg'``: no
            warning and no error for these.
        allow_nonfinite: Whether to test with, and resume from, NaN and infinite weights.

    Raises:
        RunError: In test, validation or resuming, weights of the checkpoint have another shape than the model's, are
            not finite, or parameters of the model are missing (auxiliary heads, which only train, aside). In
            ``load_from``, frozen parameters of a backbone of this package are neither in the checkpoint nor in an
            ``init_cfg``. In all of them, weights are no real numbers, or nothing of the checkpoint fits.
    """

    priority = 'VERY_HIGH'

    def __init__(self, left_out: Union[str, Sequence[str]] = (), allow_nonfinite: bool = False):
        self.allow_nonfinite = allow_nonfinite
        self.left_out = (left_out,) if isinstance(left_out, str) else tuple(left_out)

    def before_train(self, runner) -> None:
        """Keep running statistics that adapters (MMPretrain's LoRA) do not save: a test would have others."""
        model = unwrapped(runner.model)
        saved = model.state_dict().keys()
        for name, module in model.named_modules():
            held = running_statistics(module) if isinstance(module, Backbone) else ()
            lost = [key for key in held if f'{name}.{key}'.lstrip('.') not in saved]
            if lost and not module.norm_eval:
                module.norm_eval = True
                runner.logger.warning(
                    f'running statistics of {name} stay as they are (norm_eval=True): its adapter does not save '
                    f'{some(lost)}.'
                )

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Compare before MMEngine loads."""
        model = unwrapped(runner.model)
        state = runner_state(checkpoint, model)
        is_training = isinstance(runner._train_loop, BaseLoop)
        is_fatal = not is_training or runner._resume
        if is_training and runner._resume:
            _tell_kept_settings(runner, checkpoint)
        meant = f'--cfg-options custom_hooks.{type(self).__name__}'
        advice = f' If it is meant: {meant}.allow_nonfinite=True'
        check_values(model, state, self.allow_nonfinite or not is_fatal, advice)
        left_out = self.left_out if is_training else self.left_out + UNUSED_IN_TESTS
        lacking = fill(model, state, left_out)
        mismatched, missing, unexpected, nothing_fits = lacking
        if not is_fatal and missing and nothing_fits:
            raise RunError(
                f'nothing in the checkpoint fits the model; it has {some(checkpoint.get("state_dict", checkpoint))}.'
            )
        left = set() if is_fatal else {*missing, *(text.split()[0] for text in mismatched)}
        for name, module in model.named_modules():
            own = module.named_parameters(name) if isinstance(module, Backbone) else ()
            # output norms begin as plain norms, which frozen weights of a classifier come without
            frozen = [
                key for key, weight in own if key in left and not weight.requires_grad and '.out_norms.' not in key
            ]
            if frozen:
                raise RunError(
                    f'{len(frozen)} frozen parameters of the backbone are not in the checkpoint: {some(frozen)}. They '
                    'would stay as they are initialised. Name their weights in its init_cfg, or, if it is meant: '
                    f'{meant}.left_out={_parts_of(frozen)}'
                )
        differs = mismatched or missing or not state.keys() <= model.state_dict().keys()
        averaging = [type(hook).__name__ for hook in runner.hooks if getattr(hook, 'strict_load', False)]
        if not is_fatal and differs and averaging:
            raise RunError(
                f'{averaging[0]} takes the weights of the checkpoint for its averages, and they are not those of the '
                f'model: {some(mismatched or missing or state.keys() - model.state_dict().keys())}. Set '
                f"strict_load=False in {averaging[0]}: the averages of the others then begin with the model's."
            )
        if not mismatched and not (is_fatal and (missing or unexpected)):
            return
        meant += f'.left_out={_parts_of(mismatched or missing or unexpected)}'
        if not is_fatal:
            runner.logger.warning(
                f'{lacking}These train from their initial values, as is usual for other classes than those of the '
                f'checkpoint. To say that it is meant: {meant}'
            )
            return
        used = 'These would be used as initialised. ' if mismatched or missing else ''
        # resumed from, the state of the optimizer has the old shapes, too
        advice = 'load_from=... in place of resuming trains other parts anew.' if is_training else ''
        raise RunError(
            f'{lacking}{used}The config has to be the one of the checkpoint, its class '
            f'count included. {advice or f"If it is meant: {meant}"}'
        )
