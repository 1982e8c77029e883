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

# Inductor compares sizes to choose the memory format of convolutions, and fails for dynamic ones in training ("cannot
# determine truth value of Relational", PyTorch 2.14). Ours are channels-last already.
OPTIONS = dict(options=dict(layout_optimization=False))


def compile_blocks(model: nn.Module, **options) -> None:
    """Compile the blocks of every backbone of this package in ``model``, in place.

    Heads, data-dependent shapes and losses are not worth their compilation. Sizes are dynamic, and blocks that differ
    only in their weights share a graph. A batch of one image, a map of one window, and inference get another graph.
    ``state_dict`` keeps its keys; copies of the model are not compiled.

    Args:
        model (nn.Module): A model on its final device.
        options: Arguments of ``torch.compile`` instead of :data:`OPTIONS`, for example ``backend``.

    Raises:
        RunError: No backbone of this package in ``model``.
    """
    from torch._dynamo import config as dynamo_config  # the import replaces functions of torch

    backbones: list[Any] = [module for module in model.modules() if isinstance(module, Backbone)]
    if not backbones:
        raise RunError('CompileHook (--compile): the model has no backbone of mmlinattn.')
    # duck shapes share a symbol between equal sizes: code compiled for a square map would run square maps only
    if hasattr(shape_config, 'use_duck_shape'):  # since PyTorch 2.5
        shape_config.use_duck_shape = False
    # at its default of 8 graphs, PyTorch falls back to eager mode
    dynamo_config.cache_size_limit = max(dynamo_config.cache_size_limit, 256)
    keep_sizes_open()
    compiled = torch.compile(_call, dynamic=True, **(options or OPTIONS))

    def call_of(block: nn.Module):
        # views get a graph of their own; only the first block of a stage may get one
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
    # each block makes its windows: else the first block of a stage would need another graph
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
    """Compile the blocks of the backbone with ``torch.compile``, and log the iterations that compile.

    ``--compile`` of the tools adds it to ``custom_hooks``.

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
