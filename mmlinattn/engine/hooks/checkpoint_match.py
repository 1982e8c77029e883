# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Collection, Sequence
from typing import Union

from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop
from mmengine.runner.base_loop import BaseLoop
from torch import nn
from torch.optim import Optimizer

from ...backbones.base import Backbone
from ...checkpoints.fit import Fit, compare, needed, running_statistics, some, trained_weights
from ...checkpoints.loading import UNUSED_IN_TESTS, runner_state
from ...utils.building import unwrapped
from ...utils.errors import RunError
from ..optimizers.saved_groups import fit_checkpoint

# entries that change during the training and are not settings
_PROGRESS = ('last_step', 'base_values', 'verbose', 'best', 'num_bad_epochs', 'cooldown_counter')


def _kept_settings(groups: list, saved: list) -> list[str]:
    """Describe optimizer settings of the config that resuming replaces by those of the checkpoint."""
    kept: dict[str, str] = {}
    for group, old in zip(groups, saved):
        for key in old:
            # with a schedule, lr and momentum change by iteration; initial_lr and initial_momentum are the settings
            begin = key in ('lr', 'momentum') and f'initial_{key}' in group and f'initial_{key}' in old
            if key in group and key != 'params' and not begin and old[key] != group[key]:
                kept.setdefault(key.replace('initial_', ''), f'{old[key]} (the config has {group[key]})')
    return [f'{key} = {values}' for key, values in kept.items()]


def _kept_schedule(schedulers: list, saved: list, has_other_epochs: bool) -> list[str]:
    """Describe schedule settings of the config that resuming replaces by those of the checkpoint.

    Raises:
        RunError: The checkpoint has schedulers of other types; MMEngine would mix their states.
    """
    owns = [{key for key in each.state_dict() if key[0] != '_' and key not in _PROGRESS} for each in schedulers]
    is_other = any(
        own - old.keys() and old.keys() - each.state_dict().keys() for own, old, each in zip(owns, saved, schedulers)
    )
    if len(schedulers) != len(saved) or is_other:
        raise RunError(
            f'the checkpoint to resume from has {len(saved)} param_schedulers that do not fit those of the config: '
            f'{some([type(each).__name__ for each in schedulers])}. Set param_scheduler as it was, or '
            'load_from=CHECKPOINT instead of --resume; it starts at iteration 0.'
        )
    kept = []
    for scheduler, old, own in zip(schedulers, saved, owns):
        if has_other_epochs and not scheduler.by_epoch:
            continue  # SafeRunner fits them to the length of an epoch
        state, name = scheduler.state_dict(), type(scheduler).__name__
        changed = [key for key in own & old.keys() if state[key] != old[key]]
        kept += [f'{name}.{key} = {old[key]} (the config has {state[key]})' for key in sorted(changed)]
    return kept


def _warn_of_lost_state(runner, checkpoint: dict) -> None:
    """Warn of state that the checkpoint lacks, or that nothing in a resumed run takes up."""
    own = dict(optimizer=runner.optim_wrapper, param_schedulers=runner.param_schedulers)
    lost = [key for key, value in own.items() if value and not checkpoint.get(key)]
    if lost:
        runner.logger.warning(
            f'the checkpoint to resume from has no {" and no ".join(lost)} (save_optimizer, save_param_scheduler of '
            'CheckpointHook): these begin as at iteration 0.'
        )
    if 'ema_state_dict' in checkpoint and not any(isinstance(hook, EMAHook) for hook in runner.hooks):
        runner.logger.warning(
            'the weights of the checkpoint to resume from are averages of EMAHook, which the config lacks: training '
            'continues from the averages. Add the hook to custom_hooks to continue from the trained weights.'
        )


def _warn_of_kept_settings(runner, checkpoint: dict) -> None:
    """Warn of optimizer and schedule settings that a resumed run takes from the checkpoint instead of the config.

    Raises:
        RunError: The checkpoint belongs to another type of optimizer, or to other types of schedulers.
    """
    saved, schedulers = checkpoint.get('optimizer'), runner.param_schedulers
    if not isinstance(saved, dict) or not hasattr(runner.optim_wrapper, 'param_groups'):
        return  # several optimizers, or none
    if isinstance(getattr(runner.optim_wrapper, 'optimizer', None), Optimizer) and saved.get('param_groups'):
        fit_checkpoint(runner.optim_wrapper.optimizer, checkpoint, unwrapped(runner.model))
        saved = checkpoint['optimizer']
    groups, old_groups = runner.optim_wrapper.param_groups, saved.get('param_groups') or []
    for group, old in zip(groups, old_groups):
        keys, old_keys = ({key for key in g if not key.startswith('initial_')} for g in (group, old))  # of schedules
        missing, extra = sorted(keys - old_keys), sorted(old_keys - keys)
        if missing and extra:  # a newer PyTorch has more settings, an older one fewer
            kind = type(runner.optim_wrapper.optimizer).__name__
            raise RunError(
                f'the checkpoint to resume from is of another optimizer than {kind}: it has {some(extra)} and lacks '
                f'{some(missing)}. Set optim_wrapper.optimizer as it was, or load_from=CHECKPOINT instead of --resume; '
                'it starts at iteration 0.'
            )
    kept = _kept_settings(groups, old_groups)
    if isinstance(schedulers, list) and isinstance(checkpoint.get('param_schedulers'), list):
        meta, loop = checkpoint.get('meta') or {}, runner.train_loop
        is_fitted = isinstance(loop, EpochBasedTrainLoop) and not meta.get('stopped')
        is_fitted = is_fitted and meta.get('iter') != meta.get('epoch', 0) * len(loop.dataloader)
        kept += _kept_schedule(schedulers, checkpoint['param_schedulers'], is_fitted)
    if kept:
        runner.logger.warning(
            f'resuming takes optimizer and schedule of the checkpoint: {"; ".join(kept)}. For those of the config, set '
            'load_from=CHECKPOINT instead of --resume; it starts at iteration 0.'
        )


def _modules_of(keys: Collection[str]) -> str:
    """Return the names of modules with the weights ``keys``, joined by commas, as a value of ``left_out``.

    More than five are replaced by the modules that hold them.
    """
    paths, depth = [key.split('.')[:-1] for key in keys], max(key.count('.') for key in keys)
    names = dict.fromkeys('.'.join(path) for path in paths)
    while len(names) > 5 and depth > 1:
        depth -= 1
        names = dict.fromkeys('.'.join(path[:depth]) for path in paths)
    return ','.join(names)


def _frozen(model: nn.Module, keys: Collection[str]) -> list[str]:
    """Return those ``keys`` that are frozen weights of a backbone; output norms may keep their initial values."""
    named = [module.named_parameters(name) for name, module in model.named_modules() if isinstance(module, Backbone)]
    frozen = [key for part in named for key, weight in part if not weight.requires_grad and '.out_norms.' not in key]
    return [key for key in frozen if key in keys]


@HOOKS.register_module(force=True)
class CheckpointMatchHook(Hook):
    """Compare a checkpoint with the model before MMEngine loads it, because MMEngine only logs differences.

    - ``load_from`` in training: one warning lists weights of another shape, such as a head for other classes.
    - Testing and resuming: the run stops if weights would keep their initial values.
    - Resuming: one warning lists optimizer and schedule settings that the checkpoint replaces.

    Args:
        left_out (str | Sequence[str]): Prefixes of keys that may keep their initial values, without a warning or an
            error, e.g. ``'decode_head.conv_seg'``.
        allow_nonfinite (bool): Accept NaN and infinite weights in testing and resuming.

    Raises:
        RunError: One of these:

            - Weights are not real numbers, or no weight of the checkpoint can be loaded.
            - In testing and resuming, weights have another shape, are not finite, or are missing. Testing does not need
              auxiliary heads.
            - In ``load_from``, frozen parameters of a backbone of this package are neither in the checkpoint nor in an
              ``init_cfg``.
    """

    priority = 'VERY_HIGH'

    def __init__(self, left_out: Union[str, Sequence[str]] = (), allow_nonfinite: bool = False):
        self.allow_nonfinite = allow_nonfinite
        self.left_out = (left_out,) if isinstance(left_out, str) else tuple(left_out)

    def before_train(self, runner) -> None:
        """Set ``norm_eval`` if an adapter (MMPretrain's LoRA) does not save running statistics, so that they stay
        constant.

        Warn of frozen weights that no checkpoint has set.
        """
        model = unwrapped(runner.model)
        if not runner._load_from and _frozen(model, model.state_dict()):
            random = _frozen(model, needed(model, compare(model, {}), self.left_out).missing)
            if random:
                runner.logger.warning(
                    f'{len(random)} frozen parameters of the backbone keep their random values: {some(random)}. Name '
                    'their weights in its init_cfg or load_from, or set frozen_stages=-1.'
                )
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
        model = unwrapped(runner.model)
        state = runner_state(checkpoint, model)
        is_training = isinstance(runner._train_loop, BaseLoop)
        is_fatal = not is_training or runner._resume
        if is_training and runner._resume:
            saved = checkpoint.get('optimizer')
            if isinstance(saved, dict) and saved.get('loss_scaler') == {}:  # of bfloat16: it scaled no loss
                checkpoint['optimizer'] = {key: value for key, value in saved.items() if key != 'loss_scaler'}
            _warn_of_lost_state(runner, checkpoint)
            _warn_of_kept_settings(runner, checkpoint)
        option = f'--cfg-options custom_hooks.{type(self).__name__}'
        whole = compare(model, state)
        whole.check_values(self.allow_nonfinite or not is_fatal, f' If it is meant: {option}.allow_nonfinite=True')
        fit = needed(model, whole, self.left_out if is_training else self.left_out + UNUSED_IN_TESTS)
        if not is_fatal:
            self._check_start(model, whole, fit, checkpoint)
            fit = fit.only(lambda key: '.out_norms.' not in key)  # classifiers have none
            if fit.mismatched or fit.missing:
                runner.logger.warning(
                    f'{fit}These train from their initial values, as is usual for a head of other classes. To say that '
                    f'it is meant: {option}.left_out={_modules_of([*fit.mismatched, *fit.missing])}'
                )
        elif fit.mismatched or fit.missing or fit.unexpected:
            used = 'These would be used as initialised. ' if fit.mismatched or fit.missing else ''
            # on resuming, the state of the optimizer would have the old shapes
            remedy = (
                f'If it is meant: {option}.left_out={_modules_of([*(fit.mismatched or fit.missing or fit.unexpected)])}'
            )
            if is_training:
                remedy = 'load_from=CHECKPOINT instead of --resume trains other parts from scratch.'
            raise RunError(f'{fit}{used}Use the config of the checkpoint, with its number of classes. {remedy}')
        resized = [key for key, weight in whole.weights.items() if key in state and state[key].shape != weight.shape]
        if resized and is_training and runner._resume:
            raise RunError(
                f'the checkpoint to resume from has position tables of other sizes: {some(resized)}. Its optimizer '
                'cannot continue. Set load_from=CHECKPOINT instead of --resume.'
            )

        if is_training and runner._resume and not {'epoch', 'iter'} <= {*(checkpoint.get('meta') or {})}:
            raise RunError(
                'the checkpoint to resume from has no epoch and iteration, as files of weights alone. Set '
                'load_from=CHECKPOINT instead of --resume; it starts at iteration 0.'
            )

    def _check_start(self, model: nn.Module, whole: Fit, fit: Fit, checkpoint: dict) -> None:
        """Refuse a ``load_from`` checkpoint without any usable weight, or without frozen weights of the backbone."""
        if fit.missing and whole.weights.keys().isdisjoint(trained_weights(model)):
            raise RunError(
                f'nothing in the checkpoint fits the model; it has {some(checkpoint.get("state_dict", checkpoint))}.'
            )
        frozen = _frozen(model, {*fit.missing, *fit.mismatched})
        if frozen:
            raise RunError(
                f'{len(frozen)} frozen parameters of the backbone are not in the checkpoint: {some(frozen)}. They '
                'would stay as they are initialised. Name their weights in its init_cfg, or, if it is meant: '
                f'--cfg-options custom_hooks.{type(self).__name__}.left_out={_modules_of(frozen)}'
            )
