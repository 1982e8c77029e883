# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import logging
from collections import Counter
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper, ZeroRedundancyOptimizer
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from torch import nn

from ...utils.quietness import log_level
from .saved_groups import by_settings, fit_groups

_APPLIED = ('lr_mult', 'decay_mult')  # factors that lr and weight_decay of a group contain
# optimizers of PyTorch with a fused kernel for CPUs and for CUDA
_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


def optimizer_class(kind: Any) -> Any:
    """Resolve a registered name to its class, as MMEngine does."""
    if not isinstance(kind, str):
        return kind
    with OPTIMIZERS.switch_scope_and_registry(None) as registry:
        return registry.get(kind)


def can_be_fused(optimizer: dict, model: nn.Module) -> bool:
    """Return True if ``fused=True`` may be added to a config of AdamW, Adam or SGD for all parameters of a model.

    The config may set neither ``fused`` nor an option that excludes it. Parameters and gradients have to be
    dense floating-point tensors on a CPU or a CUDA device, because fused kernels read them in memory order.
    """
    if optimizer_class(optimizer.get('type')) not in _FUSED:
        return False
    if any(optimizer.get(option) is not None for option in ('fused', 'foreach', 'differentiable')):
        return False
    if any(getattr(module, 'sparse', False) is True for module in model.modules()):
        return False  # gradients of embeddings
    return all(
        type(p) is nn.Parameter and p.is_floating_point() and p.device.type in ('cpu', 'cuda') and _is_dense(p)
        for p in model.parameters()
    )


def undecayed(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters without weight decay, as named by the ``no_weight_decay`` methods of all modules."""
    found: set[nn.Parameter] = set()
    module: Any
    for module in model.modules():
        # asked of the class, because adapters forward attributes of the backbone that they wrap
        if hasattr(type(module), 'no_weight_decay'):
            names = module.no_weight_decay()
            found.update(parameter for name, parameter in module.named_parameters() if name in names)
    return found


def _is_dense(x: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.is_contiguous() or x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class MergedOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """MMEngine's default constructor, but parameters with equal settings share a group, and optimizers are fused if
    possible.

    With ``paramwise_cfg``, MMEngine makes a group for each parameter. A step then starts about eight kernels per
    parameter, and schedulers loop over all groups. Merged groups are in the order of their first parameters, so that
    the logged ``lr`` does not change. AdamW, Adam and SGD of PyTorch get ``fused=True`` if :func:`can_be_fused` allows
    it. With MMEngine's ``ZeroRedundancyOptimizer``, groups are not merged.

    As in timm, weights named by a ``no_weight_decay`` method of the model or of its parts do not decay: position tables
    and class tokens of this package's backbones. A custom key with a ``decay_mult`` overrides this.

    Optimizer states of checkpoints with other groups are matched by parameter name
    (:func:`~mmlinattn.engine.optimizers.saved_groups.fit_groups`).

    Args:
        optim_wrapper_cfg (dict): Same as MMEngine's.
        paramwise_cfg (dict): Same as MMEngine's.

    Raises:
        ValueError: Modules share a parameter and ``paramwise_cfg.bypass_duplicate`` is not set.

    Examples:
        >>> optim_wrapper = dict(
        ...     constructor='MergedOptimWrapperConstructor',
        ...     optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
        ...     paramwise_cfg=dict(norm_decay_mult=0.0),
        ... )
    """

    optimizer_cfg: Any
    paramwise_cfg: dict

    def __call__(self, model: nn.Module) -> OptimWrapper:
        inner: Any = model.module if hasattr(model, 'module') else model
        given = self.optimizer_cfg
        if can_be_fused(given, inner):
            self.optimizer_cfg = {**given, 'fused': True}
        if self.base_wd and not self.paramwise_cfg and undecayed(inner):
            # MMEngine calls `add_params` only if paramwise_cfg is not empty
            self.paramwise_cfg = dict(bypass_duplicate=True)
        try:
            wrapper = super().__call__(model)
        finally:
            self.optimizer_cfg = given
        optimizer = wrapper.optimizer
        if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, ZeroRedundancyOptimizer):
            _adapt_loading(optimizer, [name for name, _ in inner.named_parameters()])
            _log_groups(optimizer)
        return wrapper

    def add_params(self, params: list, module: nn.Module, prefix: str = '', **kwargs) -> None:
        """Let MMEngine make a group for each parameter, then merge groups with equal settings."""
        if prefix:  # MMEngine calls this method for each module inside
            super().add_params(params, module, prefix=prefix, **kwargs)
            return
        with log_level(logging.ERROR):  # MMEngine logs up to three lines for each parameter, and warns of frozen ones
            super().add_params(params, module, **kwargs)
        if self.base_wd:
            exempt = undecayed(module)
            for group in params:
                if group['params'][0] in exempt and 'decay_mult' not in group:
                    group['weight_decay'] = 0.0
        self.adjust(params, module)
        if optimizer_class(self.optimizer_cfg['type']) is not ZeroRedundancyOptimizer:
            params[:] = self._merged(params, module)

    def adjust(self, params: list, model: nn.Module) -> None:
        """Change the one-parameter groups in ``params`` before they are merged; subclasses override this method."""

    def _merged(self, params: list, model: nn.Module) -> list[dict]:
        names = {p: name for name, p in model.named_parameters()}
        defaults = dict(lr=self.base_lr, weight_decay=self.base_wd)
        base = {key: value for key, value in defaults.items() if value is not None}

        def settings(group: dict) -> dict:
            return {**base, **{key: value for key, value in group.items() if key not in ('params', *_APPLIED)}}

        shared = [p for p, count in Counter(p for group in params for p in group['params']).items() if count > 1]
        if shared:
            raise ValueError(
                f'several modules share the parameter {names[shared[0]]}. '
                'Set optim_wrapper.paramwise_cfg.bypass_duplicate=True.'
            )
        merged = []
        for common, groups in by_settings(params, settings):
            own = [group['params'][0] for group in groups]
            merged.append(dict(common, params=own, param_names=[names[parameter] for parameter in own]))
        return merged


def _adapt_loading(optimizer: torch.optim.Optimizer, order: list[str]) -> None:
    """Register hooks that adapt a loaded optimizer state to the groups and memory formats of an optimizer.

    Fused kernels on a CPU give wrong values in silence if a state has other strides than its parameter. ``order`` has
    the names of all parameters, in the order of ``model.named_parameters()``.
    """
    maps = [p for group in optimizer.param_groups for p in group['params'] if p.dim() > 3]
    strides: list[tuple] = []

    def fit(optimizer, state_dict: dict) -> None:
        state_dict['param_groups'], _ = fit_groups(optimizer.param_groups, state_dict['param_groups'], order)
        strides.clear()

    def align(optimizer, *_) -> None:
        now = [p.stride() for p in maps]
        if now != strides:
            strides[:] = now
            for p in maps:
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, torch.Tensor) and value.shape == p.shape and value.stride() != p.stride():
                        optimizer.state[p][key] = torch.empty_like(p).copy_(value)

    optimizer.register_load_state_dict_pre_hook(fit)
    if optimizer.defaults.get('fused'):
        optimizer.register_step_pre_hook(align)


def _log_groups(optimizer: torch.optim.Optimizer) -> None:
    """Log the settings of each parameter group; of more than four groups, log those of the first and the last."""
    groups, parts = optimizer.param_groups, []
    for group in groups:
        settings = [f'{key}={group[key]:.4g}' for key in ('lr', 'weight_decay') if isinstance(group.get(key), float)]
        parts.append(f'{len(group["params"])} with {", ".join(settings)}')
    if len(parts) > 4:
        parts[1:-1] = ['...']
    kind = type(optimizer).__name__ + (' (fused)' if optimizer.defaults.get('fused') else '')
    total = sum(len(group['params']) for group in groups)
    print_log(f'{kind}: {total} parameters in {len(groups)} groups: {"; ".join(parts)}', 'current')
