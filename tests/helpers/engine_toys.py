# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Runner that trains a linear model on random vectors, with random augmentation; a hook that waits."""

import os
import random
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, MODELS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import nn

from mmlinattn.utils.errors import RunError


@DATASETS.register_module(force=True)
class ToyDataset(BaseDataset):
    """Vectors (4,), jittered by all random generators of augmentations."""

    def __init__(self, size=12, **kwargs):
        self.size = size
        super().__init__(serialize_data=size > 0, **kwargs)

    def load_data_list(self):
        return [dict(img_path=f'folder/{i}.jpg') for i in range(self.size)]

    def __getitem__(self, index):
        jitter = random.random() + np.random.rand() + torch.rand(()).item()
        inputs = torch.full((4,), float(index)) / self.size + jitter
        return dict(inputs=inputs, data_samples=BaseDataElement(metainfo=self.get_data_info(index)))


@MODELS.register_module(force=True)
class ToyModel(BaseModel):
    """Linear layer behind dropout. After ``bad_at`` steps ``bad`` multiplies the loss or the weights' gradient."""

    def __init__(self, bad_at=None, break_weights=False, bad=float('nan')):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.dropout = nn.Dropout(0.5)
        self.bad_at = bad_at
        self.break_weights = break_weights
        self.bad = bad
        self.steps = 0

    def forward(self, inputs, data_samples=None, mode='loss'):
        x = torch.stack(list(inputs))
        if mode != 'loss':
            return data_samples
        self.steps += 1
        loss = self.layer(self.dropout(x)).square().mean()
        if self.bad_at is not None and self.steps > self.bad_at:
            if self.break_weights:  # a finite loss with a step to broken weights
                self.layer.weight.register_hook(lambda grad: grad * self.bad)
            else:
                loss = loss * self.bad
        return dict(loss=loss)


@MODELS.register_module(force=True)
class SkippingModel(BaseModel):
    """Detector with a neck that skips the first feature map of its backbone."""

    def __init__(self, skips=True):
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.out_indices = (0, 1, 3)
        self.backbone.stem = nn.Linear(4, 4)
        self.backbone.out_norms = nn.ModuleDict({str(i): nn.LayerNorm(4) for i in (0, 1, 3)})
        self.skips = skips

    def forward(self, inputs, data_samples=None, mode='loss'):
        x = self.backbone.stem(torch.stack(list(inputs)))
        norms = list(self.backbone.out_norms.values())[self.skips :]
        return dict(loss=sum(norm(x).square().sum() for norm in norms) + 0 * x.sum())


@HOOKS.register_module(force=True)
class HoldHook(Hook):
    """Wait in iteration ``HOLD`` (from 1) for a file ``go_on`` in the work dir or a SIGTERM seen by ``StopHook``."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 != int(os.environ.get('HOLD', '0')):
            return
        go_on = Path(runner.work_dir, 'go_on')
        while not (go_on.exists() or any(getattr(hook, 'is_signalled', False) for hook in runner.hooks)):
            time.sleep(0.02)


class At(Hook):
    """Call ``function(runner)`` before an iteration of training, or of the validation there.

    ``skip`` counts the batches of that validation before the call.
    """

    def __init__(self, iteration, function, mode='train', skip=0):
        self.at, self.function, self.skip = (iteration, mode), function, skip

    def _before_iter(self, runner, batch_idx, data_batch=None, mode='train'):
        if (runner.iter, mode) == self.at:
            self.skip -= 1
            if self.skip == -1:
                self.function(runner)


def interrupt(runner):
    """Raise a KeyboardInterrupt, as Ctrl-C does."""
    raise KeyboardInterrupt


class Count(BaseMetric):
    """Metric ``acc`` that grows by 1 with each evaluation."""

    calls = 0

    def process(self, data_batch, data_samples):
        self.results.append(len(data_samples))

    def compute_metrics(self, results):
        Count.calls += 1
        return dict(acc=float(Count.calls))


LOADER = dict(dataset=dict(type='ToyDataset'), sampler=dict(type='DefaultSampler', shuffle=False), batch_size=4)


def validation(*metrics):
    """Return arguments of :func:`make_runner` for a validation after each epoch by ``metrics`` (default: ``Count``)."""
    return dict(val_dataloader=LOADER, val_cfg={}, val_evaluator=list(metrics) or [Count()])


def refused(line, kind=RunError):
    """Expect an error whose message matches ``line``; no error for ''."""
    return pytest.raises(kind, match=line) if line else nullcontext()


def warnings_of(runner, *words):
    """Train; return the warnings of our hooks, or those with all ``words``."""
    said = []
    runner.logger.warning = said.append
    runner.train()
    return [line for line in said if line[0] != '`' and all(word in line for word in words)]  # MMEngine's own have it


def make_runner(work_dir, hooks, train_cfg=None, loader=None, model=None, optim=None, kind=Runner, **kwargs):
    """Build a Runner of 2 epochs of 3 batches of 4 samples, ready for ``train()``."""
    return kind(
        model={'type': 'ToyModel', **(model or {})},
        work_dir=str(work_dir),
        train_dataloader={**LOADER, 'sampler': dict(type='DefaultSampler', shuffle=True), **(loader or {})},
        train_cfg=train_cfg or dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01, momentum=0.9), **(optim or {})),
        custom_hooks=hooks,
        experiment_name=f'{work_dir}_{random.random()}',
        default_scope='mmengine',
        **{'log_level': 'ERROR', **kwargs},
    )
