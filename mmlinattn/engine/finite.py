# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
from mmengine.dist import all_gather_object, all_reduce, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ..utils.errors import RunError

__all__ = ['FiniteLossHook', 'batch_file_names']


def batch_file_names(data_batch) -> list[str]:
    """``img_path`` of every data sample of a batch as the data loader hands it out, in order."""
    samples = data_batch.get('data_samples', ()) if isinstance(data_batch, dict) else data_batch
    if not isinstance(samples, (list, tuple)):
        samples = [samples]
    names = []
    for sample in samples:
        if isinstance(sample, dict):
            sample = sample.get('data_samples', sample)
        path = getattr(sample, 'img_path', None)
        if path is not None:
            names.append(str(path))
    return names


@HOOKS.register_module(force=True)
class FiniteLossHook(Hook):
    """Stop at the first loss, or at the first checkpoint, that is not finite.

    By the time a loss is seen the optimizer has already taken a step with its gradients, so the
    weights are lost; the point is to say which iteration and which images did it and to keep the
    last good checkpoint the newest. Weights can also break under a finite loss (an overflow in
    backward), hence the second look when a checkpoint is about to be written.

    In distributed runs all processes stop together and each names the images of the process that
    saw the bad loss.

    Raises:
        RunError: ``outputs['loss']`` of a train step, or a floating point tensor of a checkpoint,
            holds NaN or Inf.
    """

    # Before the checkpoint hook (VERY_LOW) and before the logger averages the value away.
    priority = 'VERY_HIGH'

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs: Optional[dict] = None) -> None:
        """Look at the summed loss of this iteration on every process."""
        loss = (outputs or {}).get('loss')
        if not isinstance(loss, torch.Tensor):
            return
        is_bad = (~torch.isfinite(loss.detach())).any().to(torch.float32).reshape(1)
        if get_world_size() > 1:
            all_reduce(is_bad, op='max')
        if not is_bad.item():
            return

        mine = None
        if not torch.isfinite(loss).all():
            terms = {name: v.item() for name, v in outputs.items() if isinstance(v, torch.Tensor)}
            mine = (get_rank(), terms, batch_file_names(data_batch))
        culprits = [found for found in all_gather_object(mine) if found is not None]
        details = '; '.join(
            f'process {rank}: '
            + ', '.join(f'{name}={value:g}' for name, value in terms.items())
            + ' on images '
            + (', '.join(names) or '(the data samples carry no img_path)')
            for rank, terms, names in culprits
        )
        raise RunError(
            f'the loss is not finite at iteration {runner.iter + 1} (epoch {runner.epoch + 1}): '
            f'{details}. No checkpoint was written after it. Resume from the last checkpoint '
            'with a lower learning rate or gradient clipping, or look at these images.'
        )

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        """Refuse to write weights that are not finite."""
        broken = [
            name
            for name, value in checkpoint.get('state_dict', {}).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not torch.isfinite(value).all()
        ]
        if broken:
            raise RunError(
                f'{len(broken)} tensors of the model are not finite at iteration '
                f'{runner.iter + 1}, among them {", ".join(broken[:3])}: this checkpoint is not '
                'written and the previous one stays the last.'
            )
