# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import time
from typing import Any

import torch
from mmcv.cnn.bricks import DropPath
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import Tensor, nn
from torch.fx.experimental import _config as shape_config

from ...attention import StageContext
from ...backbones.base import Backbone
from ...utils.errors import RunError
from ...utils.private_apis import call_compiled, keep_sizes_open

# Inductor's own search for the memory format of convolutions compares sizes, which it cannot where they are dynamic
# ("cannot determine truth value of Relational" in a training step, PyTorch 2.14). Ours is channels-last already.
OPTIONS = dict(options=dict(layout_optimization=False))


def compile_blocks(model: nn.Module, **options) -> None:
    """Compile the blocks of every backbone of this package in ``model``, in place.

    The blocks, not the whole detector: the rest (heads, data-dependent shapes, losses) is not worth its
    compilation. Sizes are dynamic, and blocks that differ only in their weights share what is compiled. A batch of one
    image, windows of which a map has one, and inference are compiled once more. ``state_dict`` keeps its keys, copies
    of the model are not compiled.

    Args:
        model (nn.Module): A model that is on its device already.
        options: Of ``torch.compile`` in place of :data:`OPTIONS`, for example ``backend``.

    Raises:
        RunError: No backbone of this package in ``model``.
    """
    from torch._dynamo import config as dynamo_config  # the import replaces functions of torch

    backbones: list[Any] = [module for module in model.modules() if isinstance(module, Backbone)]
    if not backbones:
        raise RunError('CompileHook (--compile): the model has no backbone of mmlinattn.')
    # by default, code compiled for a square map runs square maps only: equal sizes share one symbol
    if hasattr(shape_config, 'use_duck_shape'):  # since PyTorch 2.5
        shape_config.use_duck_shape = False
    # by default, code that was compiled more than 8 times runs without compilation from then on
    dynamo_config.cache_size_limit = max(dynamo_config.cache_size_limit, 256)
    keep_sizes_open()
    compiled = torch.compile(_call, dynamic=True, **(options or OPTIONS))

    def call_of(block: nn.Module):
        # the first block of a stage may get a view, the others do not; for views PyTorch compiles anew
        return lambda x, stage: compiled(block, x.clone() if x._is_view() else x, stage)

    stages = (stage for backbone in backbones for stage in getattr(backbone, 'stages', None) or [backbone.blocks])
    for block in (block for stage in stages for block in stage):
        device = next(block.parameters()).device
        for module in [*block.modules()]:
            for name, path in module.named_children():
                if type(path) is DropPath:
                    setattr(module, name, SharedDropPath(path.drop_prob, device).train(path.training))
        call_compiled(block, call_of(block))  # not copied, not saved


def _call(block: nn.Module, x: Tensor, stage: StageContext):
    # each block makes its windows: the first of a stage, which would make those of all, would be another graph
    return block._call_impl(x, stage._replace(windows=None))


class SharedDropPath(DropPath):
    """Stochastic depth with a tensor as rate: blocks of different rates share their compiled code."""

    def __init__(self, drop_prob: float, device: torch.device):
        super().__init__(drop_prob)
        # no buffer: EMAHook pairs those of the model and of its copy, which may be older, by their order
        self.keep_rate = torch.tensor(1 - drop_prob, device=device)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = self.keep_rate.to(x.dtype)
        chance = torch.rand(x.shape[0], *(1,) * (x.dim() - 1), dtype=x.dtype, device=x.device)
        return x / keep * (keep + chance).floor()


@HOOKS.register_module(force=True)
class CompileHook(Hook):
    """Compile the blocks of the backbone with ``torch.compile``, and log each iteration that takes its time for it.
    ``--compile`` of the tools adds it; in a config it is ``custom_hooks=[dict(type='CompileHook')]``.

    Raises:
        RunError: The model has no backbone of this package.
    """

    def before_run(self, runner) -> None:
        from torch._dynamo.utils import counters

        compile_blocks(runner.model)
        runner.logger.info('CompileHook: blocks are compiled when they are first used; those iterations take longer.')
        self.counters, self.graphs = counters, counters['stats']['unique_graphs']

    def _before_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        self.start = time.monotonic()

    def _after_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        graphs, seconds = self.counters['stats']['unique_graphs'] - self.graphs, time.monotonic() - self.start
        if graphs:
            runner.logger.info(f'CompileHook: compiled {graphs} graphs; the iteration took {seconds:.0f} s.')
            self.graphs += graphs
