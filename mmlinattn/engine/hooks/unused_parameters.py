# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import re
from typing import Optional

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...checkpoints.states import some
from ...utils.building import unwrapped
from ...utils.errors import RunError

_OUT_NORM = re.compile(r'(?:^|\.)backbone\.out_norms\.(\d+)\.')


def read_outputs(model: nn.Module, unused: list[str]) -> Optional[tuple[int, ...]]:
    """The ``out_indices`` that leave out the backbone's maps behind whose norms there is no gradient; None where no
    output norm is unused, or all are."""
    skipped = {int(found[1]) for found in map(_OUT_NORM.search, unused) if found}
    backbone = next((module for name, module in model.named_modules() if name.split('.')[-1] == 'backbone'), None)
    given = getattr(backbone, 'out_indices', None)
    if not skipped or not isinstance(given, (list, tuple)):
        return None
    return tuple(i for i in given if i not in skipped) or None


@HOOKS.register_module(force=True)
class UnusedParametersHook(Hook):
    """Name the parameters that the first iteration gave no gradient, and the ``out_indices`` that mend it.

    Where a neck skips a map (``start_level=1``), the norm behind that map is never trained. One process goes on and
    warns. ``DistributedDataParallel`` without ``find_unused_parameters`` would stop in the second iteration with a
    puzzle; here the run stops before it, and says what to set.

    Raises:
        RunError: In distributed training without ``find_unused_parameters``, some parameter got no gradient.
    """

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self._without: set[str] = set()
        self._handles: list = []

    def before_train(self, runner) -> None:
        """Watch every parameter that is trained; optimizers clear gradients before a hook could look at them."""
        model = runner.model
        if is_model_wrapper(model) and not isinstance(model, DistributedDataParallel):
            return  # others flatten parameters
        self._release()
        named = {name: p for name, p in unwrapped(model).named_parameters() if p.requires_grad}
        self._without = set(named)
        for name, parameter in named.items():
            # returns None: the gradient stays as it is
            self._handles.append(parameter.register_hook(lambda _, name=name: self._without.discard(name)))

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Once, after the first iteration."""
        if not self._handles:
            return
        self._release()
        if not self._without:
            return
        model = runner.model
        inner = unwrapped(model)
        unused = [name for name, _ in inner.named_parameters() if name in self._without]
        message = f'{len(unused)} parameters got no gradient in the first iteration: {some(unused)}. '
        outputs_read = read_outputs(inner, unused)
        if outputs_read:
            message += (
                f'What follows the backbone does not read all of its maps: set model.backbone.out_indices='
                f'{outputs_read}, the in_channels of the neck or heads to these maps, and start_level=0 or in_index to '
                'match. '
            )
        stops = isinstance(model, DistributedDataParallel) and not model.find_unused_parameters
        if stops:
            raise RunError(
                f'{message}Distributed training stops at such parameters; find_unused_parameters=True lets them be, '
                'at the price of a search in each iteration.'
            )
        runner.logger.warning(f'{message}They are not trained, and distributed training would stop here.')

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
