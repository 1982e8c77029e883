# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import inspect
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

# Inductor's search for the memory format of convolutions fails for dynamic sizes ("cannot determine truth value of
# Relational" in a training step, PyTorch 2.14). The blocks are channels-last already.
OPTIONS = dict(options=dict(layout_optimization=False))


def compile_blocks(model: nn.Module, **options) -> None:
    """Compile the blocks of every backbone of this package in ``model``, in place.

    Heads and losses, with their data-dependent shapes, are not compiled. Image sizes are dynamic. Blocks that differ
    only in their weights share a graph; training and inference have separate graphs. PyTorch compiles another graph for
    size 1: if the first batch has several images, later batches of one image run eagerly. Keys of ``state_dict`` do not
    change. Copies of the model are not compiled. The model has to be on its final device. ``options`` are arguments of
    ``torch.compile`` in place of :data:`OPTIONS`, for example ``backend``.

    Raises:
        RunError: ``model`` has no backbone of this package.
    """
    from torch._dynamo import config as dynamo_config  # the import replaces functions of torch
    from torch._functorch import config as partition_config

    backbones: list[Any] = [module for module in model.modules() if isinstance(module, Backbone)]
    if not backbones:
        raise RunError('CompileHook (--compile): the model has no backbone of mmlinattn.')
    # by default, equal sizes share one symbol, and code compiled for a square map fails for others
    if hasattr(shape_config, 'use_duck_shape'):  # since PyTorch 2.5
        shape_config.use_duck_shape = False
    # by default, a function compiled more than 8 times runs eagerly from then on
    dynamo_config.cache_size_limit = max(dynamo_config.cache_size_limit, 256)
    # by default, the graph of RALA keeps more for the backward pass than eager mode does
    partition_config.aggressive_recomputation = True
    keep_sizes_open()
    options = options or dict(OPTIONS)
    if 'isolate_recompiles' in inspect.signature(torch.compile).parameters:  # since PyTorch 2.14
        options['isolate_recompiles'] = True
    stages = [stage for backbone in backbones for stage in getattr(backbone, 'stages', None) or [backbone.blocks]]
    for backbone in backbones:
        share_drop_paths(backbone)
    for stage in stages:
        # one compiled function for each stage: a stage is not recompiled when the guards of another one fail
        compiled = torch.compile(_call, dynamic=True, **options)
        for block in stage:
            call_compiled(block, _block_call(block, compiled))  # neither copied nor saved


def _call(block: nn.Module, x: Tensor, stage: StageContext):
    # each block computes its own windows: otherwise the first block's graph would have to pass them to the other graphs
    return block._call_impl(x, stage._replace(windows=None))


def _block_call(block: nn.Module, compiled: Any) -> Any:
    """Return a function that runs a block compiled, or eagerly batches of one image if the first batch had several."""
    firsts: dict[tuple[bool, bool], bool] = {}  # of training and of inference: the first batch had one image

    def call(x: Tensor, stage: StageContext) -> Tensor:
        has_one = 1 in x.shape
        takes_one = firsts.setdefault((block.training, torch.is_grad_enabled()), has_one)
        if has_one and not takes_one:
            return block._call_impl(x, stage)
        # views are copied: only the first block of a stage gets views, and PyTorch would recompile for them
        return compiled(block, x.clone() if x._is_view() else x, stage)

    return call


def share_drop_paths(backbone: nn.Module) -> None:
    """Replace stochastic depth layers by :class:`SharedDropPath`, in place. The identity in place of a layer of rate 0
    (first block) is replaced too, unless all rates are 0."""
    found = [
        (parent, name, path)
        for parent in backbone.modules()
        for name, path in parent.named_children()
        if type(path) is DropPath or (name == 'drop_path' and type(path) is nn.Identity)
    ]
    rates = [getattr(path, 'drop_prob', 0.0) for *_, path in found]
    device = next(backbone.parameters()).device
    for (parent, name, path), rate in zip(found, rates if any(rates) else []):
        shared = SharedDropPath(rate).train(path.training)
        # not a buffer: EMAHook pairs the buffers of the model with those of its averaged copy by order, and the copy
        # may have been made before this call
        shared.keep_rate = torch.tensor(1 - rate, device=device)
        setattr(parent, name, shared)


class SharedDropPath(DropPath):
    """Stochastic depth with its rate in a tensor, so that blocks of different rates share a compiled graph."""

    keep_rate: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = self.keep_rate.to(x.dtype)
        chance = torch.rand(x.shape[0], *(1,) * (x.dim() - 1), dtype=x.dtype, device=x.device)
        return x / keep * (keep + chance).floor()


@HOOKS.register_module(force=True)
class CompileHook(Hook):
    """Compile the blocks of the backbone with ``torch.compile``.

    The option ``--compile`` of the tools adds this hook; in a config write ``custom_hooks=[dict(type='CompileHook')]``.
    With ``TORCH_LOGS=recompiles`` PyTorch logs each compilation.

    Raises:
        RunError: The model has no backbone of this package.
    """

    def before_run(self, runner) -> None:
        compile_blocks(runner.model)
        runner.logger.info('CompileHook: blocks are compiled when they are first used; those iterations take longer.')
