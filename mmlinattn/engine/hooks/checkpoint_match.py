# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import copy
import re
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Union

from mmengine.hooks import Hook
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner.base_loop import BaseLoop
from torch import Tensor, nn

from ...checkpoints.states import fit_state, kind_of, not_finite, some
from ...utils.errors import RunError
from ...utils.registering import bare_name

__all__ = ['CheckpointMatchHook', 'check_weights']

UNUSED_IN_TESTS = ('auxiliary_head',)


def _state_dict(checkpoint: dict) -> OrderedDict:
    """What MMEngine will load of a checkpoint."""
    state = checkpoint.get('state_dict', checkpoint)
    # the runner's own pattern, whose dot is any character: it loads nothing into a part named module_list
    tensors = OrderedDict((re.sub('^module.', '', key), v) for key, v in state.items() if isinstance(v, Tensor))
    tensors._metadata = getattr(state, '_metadata', OrderedDict())
    return tensors


def _not_loaded(model: nn.Module, state: dict) -> tuple[list[str], list[str]]:
    """Keys of another shape (with both shapes) and missing parameters, after conversions that modules do on loading."""
    _, report = fit_state(model.state_dict(), state)
    if not report.mismatched and not report.missing:
        return [], []
    # Modules may rename or resize on loading (position tables, say), so that only loading tells.
    try:
        missing = model.load_state_dict(state, strict=False).missing_keys
        mismatched = []
    except RuntimeError as error:
        refused = [line for line in report.mismatched if f'size mismatch for {line.split()[0]}:' in str(error)]
        mismatched = refused or report.mismatched
        missing = report.missing
        if refused:
            with suppress(RuntimeError):  # modules may have more to say against it
                missing = _missing_beside(model, state, {line.split()[0] for line in refused})
    parameters = dict(model.named_parameters())
    return mismatched, [key for key in missing if key in parameters]


def _missing_beside(model: nn.Module, state: dict, refused: set[str]) -> list[str]:
    """What is missing besides the keys that are refused for their shape."""
    rest = copy.copy(state)  # with its metadata
    for key in refused:
        rest.pop(key, None)
    return [key for key in model.load_state_dict(rest, strict=False).missing_keys if key not in refused]


def _not_finite(model: nn.Module, state: dict) -> list[str]:
    """Parameters and running statistics that are NaN or infinite; masks and tables among the buffers may well be."""
    running = [key for key, _ in model.named_buffers() if key.endswith(('running_mean', 'running_var'))]
    return not_finite(state, [*dict(model.named_parameters()), *running])


def check_weights(model: nn.Module, checkpoint: dict, allow_nonfinite: bool = False) -> None:
    """Refuse a checkpoint that would leave a model with weights nobody trained.

    Args:
        model: the model to load into; the checkpoint may be loaded by this.
        checkpoint: what MMEngine's loader gave.
        allow_nonfinite: whether NaN and infinite weights may be.

    Raises:
        RunError: parameters are missing, have another shape, are no real numbers or are not finite.
    """
    state = _state_dict(checkpoint)
    _check_values(model, state, allow_nonfinite)
    mismatched, missing = _not_loaded(model, state)
    mismatched, missing = (
        [key for key in keys if not key.startswith(UNUSED_IN_TESTS)] for keys in (mismatched, missing)
    )
    if mismatched or missing:
        raise RunError(_does_not_fit(mismatched, missing) + 'The config has to be the one of the checkpoint.')


def _check_values(model: nn.Module, state: dict, allow_nonfinite: bool, option: str = '') -> None:
    own = [key for key, value in model.state_dict().items() if key in state and kind_of(value) == 'real']
    other = [f'{key} ({kind_of(state[key])})' for key in own if kind_of(state[key]) != 'real']
    if other:
        raise RunError(f'the checkpoint does not fit the model; no real numbers in memory: {some(other)}.')
    broken = [] if allow_nonfinite else _not_finite(model, state)
    if broken:
        raise RunError(
            f'{len(broken)} weights of the checkpoint are NaN or infinite: {some(broken)}. It was saved by a run that '
            f'had failed; take an earlier one.{option}'
        )


def _does_not_fit(mismatched: list[str], missing: list[str]) -> str:
    parts = [f'left out for its shape: {", ".join(mismatched)}'] * bool(mismatched)
    parts += [f'{len(missing)} parameters not in the file: {some(missing)}'] * bool(missing)
    return f'the checkpoint does not fit the model; {"; ".join(parts)}. '


@HOOKS.register_module(force=True)
class CheckpointMatchHook(Hook):
    """Say which weights of a checkpoint do not fit the model, above all those of a head for other classes.

    MMEngine loads what fits and lists the rest in its log. That is what one wants of ``load_from`` in training, so here
    this is one warning with both shapes of each weight. A model that is tested or that resumes with some of its weights
    as they were initialised is a mistake, and stops.

    Args:
        left_out: Beginnings of the keys that may stay as they are initialised, e.g. ``'decode_head.conv_seg'``: no
            warning and no error for these.
        allow_nonfinite: Whether to test with, and resume from, NaN and infinite weights.

    Raises:
        RunError: In test, validation or resuming, weights of the checkpoint have another shape than the model's, are
            not finite, or parameters of the model are missing (auxiliary heads, which only train, aside). In all of
            them and in ``load_from``, weights are no real numbers, or nothing of the checkpoint fits.
    """

    priority = 'VERY_HIGH'

    def __init__(self, left_out: Union[str, Sequence[str]] = (), allow_nonfinite: bool = False):
        self.allow_nonfinite = allow_nonfinite
        self.left_out = (left_out,) if isinstance(left_out, str) else tuple(left_out)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Compare before MMEngine loads."""
        model = runner.model
        while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
            model = model.module
        state = _state_dict(checkpoint)
        is_training = isinstance(runner._train_loop, BaseLoop)
        is_resuming = is_training and (runner._resume or getattr(runner, 'is_resuming', False))
        is_fatal = not is_training or is_resuming
        option = f' If it is meant: --cfg-options {self._option(runner, "allow_nonfinite")}=True'
        _check_values(model, state, self.allow_nonfinite or not is_fatal, option)
        mismatched, missing = _not_loaded(model, state)
        if not any(key in state for key in model.state_dict()) and not is_fatal:
            raise RunError(
                f'nothing in the checkpoint fits the model; it has {some(checkpoint.get("state_dict", checkpoint))}.'
            )
        known = self.left_out if is_training else self.left_out + UNUSED_IN_TESTS
        mismatched, missing = ([key for key in keys if not key.startswith(known)] for keys in (mismatched, missing))
        if not mismatched and not (missing and is_fatal):
            return
        what = _does_not_fit(mismatched, missing)
        prefixes = dict.fromkeys(key.split()[0].rpartition('.')[0] for key in mismatched or missing)
        option = f'{self._option(runner, "left_out")}={",".join(list(prefixes)[:5])}'
        if is_fatal:
            # resumed from, the state of the optimizer has the old shapes, too
            meant = (
                'load_from=... in place of resuming trains other parts anew.'
                if is_resuming
                else f'If it is meant: --cfg-options {option}'
            )
            raise RunError(
                f'{what}These would be used as initialised. The config has to be the one of the checkpoint, its class '
                f'count included. {meant}'
            )
        runner.logger.warning(
            f'{what}These train from their initial values, as is usual for other classes than those of the checkpoint. '
            f'To say that it is meant: --cfg-options {option}'
        )

    def _option(self, runner, name: str) -> str:
        hooks = runner.cfg.get('custom_hooks') or []
        index = next((i for i, hook in enumerate(hooks) if bare_name(hook.get('type')) == type(self).__name__), 'N')
        return f'custom_hooks.{index}.{name}'
