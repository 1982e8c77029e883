# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import time
from typing import Any, Callable, Optional

import torch
from mmcv.cnn.bricks import DropPath
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import Tensor, nn
from torch.fx.experimental import _config as shape_config

from ...attention import StageContext
from ...backbones.base import Backbone
from ...utils.errors import RunError
from ...utils.foreign import call_compiled

# Inductor's own search for the memory format of convolutions compares sizes, which it cannot where they are dynamic
# (torch 2.11: "cannot determine truth value of Relational" in a training step). Ours is channels-last already.
OPTIONS = dict(options=dict(layout_optimization=False))
HAS_DUCK_SHAPES = hasattr(shape_config, 'use_duck_shape')  # since PyTorch 2.5


def compile_blocks(model: nn.Module, **options) -> int:
    """Compile the blocks of every backbone of this package in ``model``, in place.

    The blocks, not the whole detector: the rest (heads, data-dependent shapes, losses) is not worth its
    compilation. Sizes are dynamic, and blocks that differ only in their weights share what is compiled. A batch of one
    image, windows of which a map has one, and inference are compiled once more. ``state_dict`` keeps its keys, copies
    of the model are not compiled.

    Args:
        model (nn.Module): A model that is on its device already.
        options: Of ``torch.compile`` in place of :data:`OPTIONS`, for example ``backend``.

    Returns:
        int: Number of kinds of blocks.

    Raises:
        RunError: No backbone of this package in ``model``.
    """
    from torch._dynamo import config as dynamo_config  # the import replaces functions of torch

    backbones = [module for module in model.modules() if isinstance(module, Backbone)]
    if not backbones:
        raise RunError('CompileHook (--compile): the model has no backbone of mmlinattn.')
    # by default, code compiled for a square map runs square maps only: equal sizes share one symbol
    if HAS_DUCK_SHAPES:
        shape_config.use_duck_shape = False
    # by default, code that was compiled more than 8 times runs without compilation from then on
    dynamo_config.cache_size_limit = max(dynamo_config.cache_size_limit, 64)
    kinds: dict[str, Callable] = {}
    for block in (block for backbone in backbones for block in _blocks(backbone)):
        for name, module in list(block.named_modules()):
            if type(module) is DropPath:
                parent, _, child = name.rpartition('.')
                shared = SharedDropPath(module.drop_prob, _device(block)).train(module.training)
                setattr(block.get_submodule(parent), child, shared)
        kind = repr(block)
        if kind not in kinds:
            kinds[kind] = torch.compile(_call_of_its_own(), dynamic=True, **(options or OPTIONS))
        call_compiled(block, _without_views(kinds[kind], block))  # not copied, not saved
    return len(kinds)


def _blocks(backbone: Backbone) -> list[nn.Module]:
    stages = getattr(backbone, 'stages', None)
    return [block for stage in stages for block in stage] if stages is not None else list(backbone.blocks)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _call_of_its_own() -> Callable:
    """A function that calls a block. PyTorch keeps compiled code with a function's code object: each kind gets one."""

    def call(block: nn.Module, x: Tensor, stage: StageContext):
        # each block makes its windows: the first of a stage, which would make those of all, would be another graph
        return block._call_impl(x, stage._replace(windows=None))

    call.__code__ = call.__code__.replace()
    return call


def _without_views(call: Callable, block: nn.Module) -> Callable:
    """The first block of a stage may get a view, the others do not; for views PyTorch compiles anew."""
    return lambda x, stage: call(block, x.clone() if x._is_view() else x, stage)


class SharedDropPath(DropPath):
    """Stochastic depth whose rate is a tensor: blocks of different rates share their compiled code."""

    def __init__(self, drop_prob: float, device: Optional[torch.device] = None) -> None:
        super().__init__()
        del self.drop_prob
        self.register_buffer('keep_rate', torch.tensor(1 - drop_prob, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = self.keep_rate.to(x.dtype)
        chance = torch.rand(x.shape[0], *(1,) * (x.dim() - 1), dtype=x.dtype, device=x.device)
        return x / keep * (keep + chance).floor()


@HOOKS.register_module(force=True)
class CompileHook(Hook):
    """Compile the blocks of the backbone with ``torch.compile``, and say so in the log while it takes its time.
    ``--compile`` of the tools adds it; in a config it is ``custom_hooks=[dict(type='CompileHook')]``.

    Raises:
        RunError: The model has no backbone of this package.
    """

    def before_run(self, runner) -> None:
        """Wrap the blocks; each kind is compiled when it is first used."""
        from torch._dynamo import callback
        from torch._dynamo.utils import counters

        self.since: Optional[float] = None
        self.counters, self.callbacks = counters, callback.callback_handler

        def begin(*_) -> None:
            if self.since is None:
                self.since, self.graphs = time.monotonic(), self.counters['stats']['unique_graphs']
                runner.logger.info('CompileHook: compiling begins, this iteration takes longer.')

        self.begin = begin
        self.callbacks.register_start_callback(begin)
        count = compile_blocks(runner.model)
        runner.logger.info(f'CompileHook: {count} kinds of blocks are compiled when they are first used.')

    def _after_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        if self.since is not None:
            graphs, seconds = self.counters['stats']['unique_graphs'] - self.graphs, time.monotonic() - self.since
            runner.logger.info(f'CompileHook: compiling ends, {graphs} graphs; the iteration took {seconds:.0f} s.')
            self.since = None

    def after_run(self, runner) -> None:
        self.callbacks.remove_start_callback(self.begin)
