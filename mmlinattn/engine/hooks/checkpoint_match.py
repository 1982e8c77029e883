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

# entries of schedulers that change during the training, and parameters of optimizer groups
_NO_SETTINGS = {'last_step', 'base_values', 'verbose', 'best', 'num_bad_epochs', 'cooldown_counter'}
_NO_SETTINGS |= {'params', 'param_names'}
_ANEW = 'load_from=CHECKPOINT instead of --resume; it starts at iteration 0.'


def _settings(state: dict) -> dict:
    """Return the settings in the state of a scheduler or in a group of an optimizer."""
    return {key: value for key, value in state.items() if key[0] != '_' and key not in _NO_SETTINGS}


def _of_other_kinds(own: dict, saved: dict) -> bool:
    """Return True if each of two dicts of settings has keys that the other lacks; versions of PyTorch only add keys."""
    names, others = ({key for key in each if not key.startswith('initial_')} for each in (own, saved))
    return bool(names - others and others - names)


def _describe_changes(own: dict, saved: dict) -> dict[str, str]:
    """Return ``'SAVED (the config has OWN)'`` by name of each setting of the config (``own``) that differs in the
    checkpoint (``saved``)."""
    both = own.keys() & saved.keys()
    # with a schedule, lr and momentum change by iteration; initial_lr and initial_momentum are the settings
    both -= {key.removeprefix('initial_') for key in both if key.startswith('initial_')}
    changed = [key for key in sorted(both) if saved[key] != own[key]]
    return {key.removeprefix('initial_'): f'{saved[key]} (the config has {own[key]})' for key in changed}


def _settings_of_checkpoint(runner, optimizer: Optimizer, checkpoint: dict) -> dict[str, str]:
    """Describe, by name, the settings of optimizer and schedulers that a resumed run takes from the checkpoint. Another
    optimizer or other schedulers raise a RunError."""
    found: dict[str, str] = {}
    owns, olds = map(_settings, optimizer.param_groups), map(_settings, checkpoint['optimizer']['param_groups'])
    for own, old in zip(owns, olds):
        if _of_other_kinds(own, old):
            raise RunError(
                f'the checkpoint to resume from is of another optimizer than {type(optimizer).__name__}: it has '
                f'{some(sorted(old.keys() - own.keys()))} and lacks {some(sorted(own.keys() - old.keys()))}. Set '
                f'optim_wrapper.optimizer as it was, or {_ANEW}'
            )
        found = {**_describe_changes(own, old), **found}
    schedulers, saved, meta = runner.param_schedulers, checkpoint.get('param_schedulers'), checkpoint['meta']
    if not isinstance(schedulers, list) or not isinstance(saved, list):
        return found
    pairs = [(_settings(each.state_dict()), _settings(old)) for each, old in zip(schedulers, saved)]
    if len(schedulers) != len(saved) or any(_of_other_kinds(*pair) for pair in pairs):
        raise RunError(
            f'the checkpoint to resume from has {len(saved)} param_schedulers that do not fit those of the config: '
            f'{some([type(each).__name__ for each in schedulers])}. Set param_scheduler as it was, or {_ANEW}'
        )
    # SafeRunner fits schedulers by iteration to epochs of another length
    is_fitted = isinstance(runner.train_loop, EpochBasedTrainLoop) and not meta.get('stopped')
    is_fitted = is_fitted and meta['iter'] != meta['epoch'] * len(runner.train_dataloader)
    for each, pair in zip(schedulers, pairs):
        if each.by_epoch or not is_fitted:
            found.update({f'{type(each).__name__}.{key}': values for key, values in _describe_changes(*pair).items()})
    return found


def _check_resumed(runner, checkpoint: dict) -> None:
    """Warn of state and settings in which a resumed run differs from the config.

    Parameter groups in ``checkpoint`` are rearranged for the optimizer, in place.

    Raises:
        RunError: The checkpoint is of another optimizer or other schedulers, or has no epoch and iteration.
    """
    warn, meta = runner.logger.warning, checkpoint.get('meta') or {}
    own = dict(optimizer=runner.optim_wrapper, param_schedulers=runner.param_schedulers)
    lost = [key for key, value in own.items() if value and not checkpoint.get(key)]
    if lost:
        warn(
            f'the checkpoint to resume from has no {" and no ".join(lost)} (save_optimizer, save_param_scheduler of '
            'CheckpointHook): these begin as at iteration 0.'
        )
    if 'ema_state_dict' in checkpoint and not any(isinstance(hook, EMAHook) for hook in runner.hooks):
        warn(
            'the weights of the checkpoint to resume from are averages of EMAHook, which the config lacks: training '
            'continues from the averages. Add the hook to custom_hooks to continue from the trained weights.'
        )
    if not {'epoch', 'iter'} <= {*meta}:
        raise RunError(
            f'the checkpoint to resume from has no epoch and iteration, as files of weights alone. Set {_ANEW}'
        )
    saved, optimizer = checkpoint.get('optimizer'), getattr(runner.optim_wrapper, 'optimizer', None)
    if not isinstance(saved, dict) or not isinstance(optimizer, Optimizer) or not saved.get('param_groups'):
        return  # several optimizers, or none
    if saved.get('loss_scaler') == {}:  # of bfloat16: it scaled no loss
        checkpoint['optimizer'] = {key: value for key, value in saved.items() if key != 'loss_scaler'}
    fit_checkpoint(optimizer, checkpoint, unwrapped(runner.model))
    replaced = _settings_of_checkpoint(runner, optimizer, checkpoint)
    if replaced:
        listed = '; '.join(f'{key} = {values}' for key, values in replaced.items())
        warn(f'resuming takes optimizer and schedule of the checkpoint: {listed}. For those of the config, set {_ANEW}')


def _modules_of(keys: Collection[str]) -> str:
    """Return the modules of state dict ``keys``, joined by commas, as a value of the argument ``left_out``.

    More than five modules are replaced by their parent modules.
    """
    paths, names = [key.split('.')[:-1] for key in keys], dict.fromkeys([''])
    for depth in range(max(map(len, paths)), 0, -1):
        names = dict.fromkeys('.'.join(path[:depth]) for path in paths)
        if len(names) <= 5:
            break
    return ','.join(names)


def _frozen(model: nn.Module, keys: Collection[str]) -> list[str]:
    """Return those ``keys`` that are frozen weights of a backbone; output norms may keep their initial values."""
    named = [module.named_parameters(name) for name, module in model.named_modules() if isinstance(module, Backbone)]
    frozen = [key for part in named for key, weight in part if not weight.requires_grad and '.out_norms.' not in key]
    return [key for key in frozen if key in keys]


@HOOKS.register_module(force=True)
class CheckpointMatchHook(Hook):
    """Compare a checkpoint with the model before MMEngine loads it, because MMEngine only logs differences.

    - ``load_from`` in training: one warning lists weights that are missing or have another shape.
    - Resuming: one warning lists optimizer and schedule settings that the checkpoint replaces.

    Args:
        left_out (str | Sequence[str]): Prefixes of keys that may keep their initial values, without a warning or an
            error, e.g. ``'decode_head.conv_seg'``.
        allow_nonfinite (bool): Accept NaN and infinite weights in testing and resuming.

    Raises:
        RunError: One of these:

            - Weights are integer, complex, sparse or quantized tensors.
            - In testing and resuming, weights have another shape, are NaN or infinite, are missing, or belong to layers
              that the backbone lacks. Testing does not need auxiliary heads.
            - In resuming, the checkpoint has position tables of another size, no epoch and iteration, another type of
              optimizer, parameter groups that do not fit, or other schedulers.
            - In ``load_from``, no weight of the checkpoint can be loaded.
            - In ``load_from``, frozen parameters of a backbone of this package are neither in the checkpoint nor in an
              ``init_cfg``.
    """

    priority = 'VERY_HIGH'

    def __init__(self, left_out: Union[str, Sequence[str]] = (), allow_nonfinite: bool = False):
        self.allow_nonfinite = allow_nonfinite
        self.left_out = (left_out,) if isinstance(left_out, str) else tuple(left_out)

    def before_train(self, runner) -> None:
        """Set ``norm_eval`` if an adapter (MMPretrain's LoRA) does not save running statistics, so that they stay
        constant. Warn of frozen weights that no checkpoint has set."""
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
        is_training = isinstance(runner._train_loop, BaseLoop)
        is_start = is_training and not runner._resume
        option = f'--cfg-options custom_hooks.{type(self).__name__}'
        state = runner_state(checkpoint, model)
        whole = compare(model, state)
        whole.check_values(self.allow_nonfinite or is_start, f' If it is meant: {option}.allow_nonfinite=True')
        fit = needed(model, whole, self.left_out if is_training else self.left_out + UNUSED_IN_TESTS)
        if is_start:
            self._check_start(model, whole, fit, checkpoint)
            fit = fit.only(lambda key: '.out_norms.' not in key)  # classifiers have none
            if fit.mismatched or fit.missing:
                runner.logger.warning(
                    f'{fit}These train from their initial values, as is usual for a head of other classes. To say that '
                    f'it is meant: {option}.left_out={_modules_of([*fit.mismatched, *fit.missing])}'
                )
            return
        differing = fit.mismatched or fit.missing or fit.unexpected
        if differing:
            remedy = f'If it is meant: {option}.left_out={_modules_of([*differing])}'
            if is_training:  # the state of the optimizer has the old shapes
                remedy = 'load_from=CHECKPOINT instead of --resume trains other parts from scratch.'
            used = 'These would be used as initialised. ' if fit.mismatched or fit.missing else ''
            raise RunError(f'{fit}{used}Use the config of the checkpoint, with its number of classes. {remedy}')
        resized = [key for key, weight in whole.weights.items() if key in state and state[key].shape != weight.shape]
        if resized and is_training:
            raise RunError(
                f'the checkpoint to resume from has position tables of other sizes: {some(resized)}. Its optimizer '
                'cannot continue. Set load_from=CHECKPOINT instead of --resume.'
            )
        if is_training:
            _check_resumed(runner, checkpoint)

    def _check_start(self, model: nn.Module, whole: Fit, fit: Fit, checkpoint: dict) -> None:
        """Raise a RunError if ``load_from`` has no usable weight, or lacks frozen weights of the backbone. ``whole``
        compares the checkpoint with the model; ``fit`` is its part that changes outputs (:func:`needed`)."""
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
