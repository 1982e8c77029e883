# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Union

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner.base_loop import BaseLoop
from torch import Tensor, nn

from ...checkpoints.states import kind_of, not_finite, some
from ...utils.building import unwrapped
from ...utils.errors import RunError

UNUSED_IN_TESTS = ('auxiliary_head',)
_OTHER_SHAPE = re.compile(r'size mismatch for (\S+): .*?\[([\d, ]*)\]\D*\[([\d, ]*)\]')  # in PyTorch's own message


def _state_dict(checkpoint: dict) -> OrderedDict:
    """What MMEngine will load of a checkpoint."""
    state = checkpoint.get('state_dict', checkpoint)
    # the runner's own pattern, whose dot is any character: it loads nothing into a part named module_list
    tensors = OrderedDict((re.sub('^module.', '', key), v) for key, v in state.items() if isinstance(v, Tensor))
    vars(tensors)['_metadata'] = getattr(state, '_metadata', OrderedDict())  # the versions of its modules
    return tensors


def _check_values(model: nn.Module, state: dict, allow_nonfinite: bool, advice: str = '') -> None:
    own = [key for key, value in model.state_dict().items() if key in state and kind_of(value) == 'real']
    other = [f'{key} ({kind_of(state[key])})' for key in own if kind_of(state[key]) != 'real']
    if other:
        raise RunError(f'the checkpoint does not fit the model; no real numbers in memory: {some(other)}.')
    # masks and tables among the buffers may well be infinite
    running = [key for key, _ in model.named_buffers() if key.endswith(('running_mean', 'running_var'))]
    broken = [] if allow_nonfinite else not_finite(state, [*dict(model.named_parameters()), *running])
    if broken:
        raise RunError(
            f'{len(broken)} weights of the checkpoint are NaN or infinite: {some(broken)}. It was saved by a run that '
            f'had failed; take an earlier one.{advice}'
        )


def _not_loaded(model: nn.Module, state: dict, left_out: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Load, as modules may rename and resize weights then, and find the keys of other shapes and of parameters that
    are missing; those that begin as ``left_out`` says aside."""
    missing: list[str] = []
    differing = {}
    handle = model.register_load_state_dict_post_hook(lambda _, keys: missing.extend(keys.missing_keys))
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        for key, *shapes in _OTHER_SHAPE.findall(str(error)):
            theirs, ours = (shape.replace(', ', 'x') or 'scalar' for shape in shapes)
            differing[key] = f'{key} ({theirs} in the file, {ours} in the model)'
    finally:
        handle.remove()
    parameters = dict(model.named_parameters())
    return (
        [text for key, text in differing.items() if not key.startswith(left_out)],
        [key for key in missing if key in parameters and not key.startswith(left_out)],
    )


def _does_not_fit(mismatched: list[str], missing: list[str]) -> str:
    parts = [f'left out for its shape: {", ".join(mismatched)}'] * bool(mismatched)
    parts += [f'{len(missing)} parameters not in the file: {some(missing)}'] * bool(missing)
    return f'the checkpoint does not fit the model; {"; ".join(parts)}. '


def check_weights(model: nn.Module, checkpoint: dict) -> None:
    """Refuse a checkpoint that would leave a model with weights nobody trained.

    Args:
        model: the model to load into; the checkpoint is loaded by this.
        checkpoint: what MMEngine's loader gave.

    Raises:
        RunError: parameters are missing, have another shape, are no real numbers or are not finite.
    """
    state = _state_dict(checkpoint)
    _check_values(model, state, allow_nonfinite=False)
    mismatched, missing = _not_loaded(model, state, UNUSED_IN_TESTS)
    if mismatched or missing:
        raise RunError(_does_not_fit(mismatched, missing) + 'The config has to be the one of the checkpoint.')


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
        model = unwrapped(runner.model)
        state = _state_dict(checkpoint)
        is_training = isinstance(runner._train_loop, BaseLoop)
        is_fatal = not is_training or runner._resume
        meant = f'--cfg-options custom_hooks.{type(self).__name__}'
        advice = f' If it is meant: {meant}.allow_nonfinite=True'
        _check_values(model, state, self.allow_nonfinite or not is_fatal, advice)
        if not is_fatal and not any(key in state for key in model.state_dict()):
            raise RunError(
                f'nothing in the checkpoint fits the model; it has {some(checkpoint.get("state_dict", checkpoint))}.'
            )
        left_out = self.left_out if is_training else self.left_out + UNUSED_IN_TESTS
        mismatched, missing = _not_loaded(model, state, left_out)
        if not mismatched and not (missing and is_fatal):
            return
        what = _does_not_fit(mismatched, missing)
        prefixes = dict.fromkeys(key.split()[0].rpartition('.')[0] for key in mismatched or missing)
        meant += f'.left_out={",".join(list(prefixes)[:5])}'
        if not is_fatal:
            runner.logger.warning(
                f'{what}These train from their initial values, as is usual for other classes than those of the '
                f'checkpoint. To say that it is meant: {meant}'
            )
            return
        # resumed from, the state of the optimizer has the old shapes, too
        advice = 'load_from=... in place of resuming trains other parts anew.' if is_training else ''
        raise RunError(
            f'{what}These would be used as initialised. The config has to be the one of the checkpoint, its class '
            f'count included. {advice or f"If it is meant: {meant}"}'
        )
