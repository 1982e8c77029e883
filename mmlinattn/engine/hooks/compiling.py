# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import functools
from collections.abc import Callable, Hashable

import torch
from mmcv.cnn.bricks import DropPath
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import Tensor, nn
from torch.fx.experimental import _config as shape_config

from ...backbones.base import Backbone
from ...utils.errors import RunError
from ...utils.foreign import call_compiled, turn_into

# Inductor's own search for the memory format of convolutions compares sizes, which it cannot where they are dynamic
# (torch 2.11: "cannot determine truth value of Relational" in a training step). Ours is channels-last already.
OPTIONS = dict(options=dict(layout_optimization=False))


def compile_blocks(model: nn.Module, **options) -> int:
    """Compile the blocks of every backbone of this package in ``model``, in place.

    The blocks, not the whole detector: what is around them (heads, data-dependent shapes, losses) is not worth its
    compilation. Sizes are dynamic, and blocks that differ only in their weights share what is compiled: training at
    many image sizes compiles each kind of block twice at most (the map that enters a stage may be a view, those that
    follow are not), and as often again for inference. ``state_dict`` keeps its keys, copies of the model are not
    compiled.

    Args:
        model (nn.Module): A model that is on its device already.
        options: Of ``torch.compile`` in place of :data:`OPTIONS`, for example ``backend``.

    Returns:
        int: Number of kinds of blocks.

    Raises:
        RunError: No backbone of this package in ``model``.
    """
    backbones = [module for module in model.modules() if isinstance(module, Backbone)]
    if not backbones:
        raise RunError('--compile: the model has no backbone of mmlinattn.')
    # by default, code compiled for a square map serves square maps only: equal sizes are taken to be one
    shape_config.use_duck_shape = False
    kinds: dict[Hashable, Callable] = {}
    for backbone in backbones:
        for block in _blocks(backbone):
            device = next(block.parameters()).device
            for module in block.modules():
                if type(module) is DropPath:
                    _share_drop_path(module, device)
            kind = _kind(block)
            if kind not in kinds:
                kinds[kind] = torch.compile(_call_with_code_of_its_own(), dynamic=True, **(options or OPTIONS))
            # what Module.compile sets: not copied, not saved, hooks are called as ever
            call_compiled(block, functools.partial(kinds[kind], block))
    return len(kinds)


def _blocks(backbone: Backbone) -> list[nn.Module]:
    stages = getattr(backbone, 'stages', None)
    return [block for stage in stages for block in stage] if stages is not None else list(backbone.blocks)


def _call_with_code_of_its_own():
    """A function that calls a block. Compiled code is kept, and counted against PyTorch's limit, with the code object
    of a function: each kind of block gets one."""

    def call(block: nn.Module, *args, **kwargs):
        return block._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def _kind(module: nn.Module) -> Hashable:
    """What blocks have to share so that compiled code of one serves the other: classes, settings, shapes."""
    settings = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str, tuple, type(None)))}
    tensors = {k: (t.shape, t.dtype, t.requires_grad) for k, t in module._parameters.items() if t is not None}
    children = tuple((name, _kind(child)) for name, child in module.named_children())
    return type(module), repr(sorted(settings.items())), repr(sorted(tensors.items())), children


class SharedDropPath(DropPath):
    """Stochastic depth whose rate is a tensor: blocks of different rates share their compiled code."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = self.keep_rate.to(x.dtype)
        chance = torch.rand(x.shape[0], *(1,) * (x.dim() - 1), dtype=x.dtype, device=x.device)
        return x / keep * (keep + chance).floor()


def _share_drop_path(module: DropPath, device: torch.device) -> None:
    module.register_buffer('keep_rate', torch.tensor(1 - module.drop_prob, device=device), persistent=False)
    turn_into(module, SharedDropPath)
    del module.drop_prob


@HOOKS.register_module(force=True)
class CompileHook(Hook):
    """Compile the blocks of the backbone with ``torch.compile``; ``--compile`` of the tools adds it.

    Raises:
        RunError: The model has no backbone of this package.
    """

    def before_run(self, runner) -> None:
        """Wrap the blocks; each kind is compiled when it is first used."""
        runner.logger.info(f'{compile_blocks(runner.model)} kinds of blocks are compiled as they are first used.')
