# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ...checkpoints.fit import not_finite, some, trained_weights
from ...utils.building import unwrapped
from ...utils.errors import RunError


@HOOKS.register_module(force=True)
class FiniteLossHook(Hook):
    """Stop the run at the first NaN or infinite loss, before a checkpoint is saved. The message names the images.

    MMDetection's ``CheckInvalidLossHook`` checks every 50th loss and names no images. When the hook runs, the optimizer
    has already used the gradients, so that no later checkpoint may be written. The process stops without waiting for
    others, and the launcher ends them.

    Raises:
        RunError: ``outputs['loss']`` of a train step, or a weight to be saved, holds NaN or infinity.
    """

    priority = 'VERY_HIGH'  # before the checkpoint hook, and before the logger averages the loss

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs: Optional[dict] = None) -> None:
        outputs = outputs or {}
        loss = outputs.get('loss')
        if not isinstance(loss, torch.Tensor) or torch.isfinite(loss.detach()).all():
            return
        terms = ', '.join(
            f'{name}={value.item():g}'
            for name, value in outputs.items()
            if isinstance(value, torch.Tensor) and value.numel() == 1
        )
        samples = data_batch.get('data_samples') if isinstance(data_batch, dict) else None
        samples = samples if isinstance(samples, (list, tuple)) else ()
        paths = [str(sample.img_path) for sample in samples if getattr(sample, 'img_path', None) is not None]
        names = ', '.join(paths) or '(the data samples carry no img_path)'
        raise RunError(
            f'the loss is not finite at iteration {runner.iter + 1} (epoch {runner.epoch + 1}): process {get_rank()}: '
            f'{terms} on images {names}. No checkpoint was written after it. Resume from the last checkpoint with a '
            'lower learning rate or gradient clipping, or look at these images.'
        )

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        tensors = {key: value for key, value in checkpoint['state_dict'].items() if isinstance(value, torch.Tensor)}
        broken = not_finite(tensors, trained_weights(unwrapped(runner.model)))
        if broken:
            raise RunError(
                f'{len(broken)} tensors of the model are not finite at iteration {runner.iter + 1}: {some(broken)}. '
                'This checkpoint is not written and the previous one stays the last.'
            )
