# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import re

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from torch.nn.parallel import DistributedDataParallel

from ...checkpoints.fit import some
from ...utils.building import unwrapped
from ...utils.errors import RunError


@HOOKS.register_module(force=True)
class UnusedParametersHook(Hook):
    """Report the parameters that got no gradient in the first iteration.

    If an output norm of the backbone is among them, the neck does not use that feature map (``start_level=1``).
    ``DistributedDataParallel`` without ``find_unused_parameters`` would fail in iteration 2; this hook stops the run
    before. In all other cases it warns. Other model wrappers are not checked.

    Raises:
        RunError: In distributed training without ``find_unused_parameters``, some parameter got no gradient.
    """

    priority = 'VERY_HIGH'

    def before_train(self, runner) -> None:
        """Register gradient hooks on all trained parameters: optimizers clear gradients before ``after_train_iter``."""
        is_flat = is_model_wrapper(runner.model) and not isinstance(runner.model, DistributedDataParallel)
        named = {} if is_flat else dict(unwrapped(runner.model).named_parameters())
        self._without = {name: None for name, parameter in named.items() if parameter.requires_grad}
        # a hook returning None leaves the gradient as it is
        self._handles = [named[n].register_hook(lambda _, n=n: self._without.pop(n, None)) for n in self._without]

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Remove the gradient hooks after the first iteration, and report."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        if not handles or not self._without:
            return
        message = f'{len(self._without)} parameters got no gradient in the first iteration: {some(self._without)}. '
        unread = sorted({int(i) for i in re.findall(r'\bbackbone\.out_norms\.(\d+)\.', ' '.join(self._without))})
        if unread:
            message += (
                f'Nothing reads the maps {unread} of the backbone: leave them out of model.backbone.out_indices, '
                'and set in_channels and start_level=0 or in_index of the neck or heads to match. '
            )
        model = runner.model
        if isinstance(model, DistributedDataParallel) and not (model.find_unused_parameters or model.static_graph):
            raise RunError(
                f'{message}Distributed training stops at such parameters. find_unused_parameters=True accepts them, '
                'and searches in each iteration.'
            )
        runner.logger.warning(f'{message}They are not trained, and distributed training would stop here.')
