# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import inspect
from typing import Optional

from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

from .merged_groups import MergedOptimWrapperConstructor, optimizer_class


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class BackboneLayerDecayOptimWrapperConstructor(MergedOptimWrapperConstructor):
    """Layer-wise learning rate decay for detectors and segmentors (BEiT, Bao et al. 2022).

    In a backbone of L blocks, the learning rate of a parameter at depth i is multiplied by ``layer_decay_rate ** (L + 1
    - i)``; i comes from :meth:`~mmlinattn.backbones.base.Backbone.get_layer_depth`. Heads and necks keep the full rate.
    Classifiers of these backbones can also use MMPretrain's ``LearningRateDecayOptimWrapperConstructor``.

    Norms, biases and other vectors get no weight decay, unless ``paramwise_cfg`` sets their factors. Without
    ``weight_decay`` in the config, the optimizer's default is used. As in MMEngine, ``decay_mult`` of a matching custom
    key (1 if absent) replaces these factors.

    Args:
        optim_wrapper_cfg (dict): Same as MMEngine's; the optimizer needs a learning rate.
        paramwise_cfg (dict): ``layer_decay_rate`` in (0, 1], and the options of
            :class:`~mmengine.optim.DefaultOptimWrapperConstructor`, such as ``custom_keys`` and ``norm_decay_mult``.
            Their learning rate factors are multiplied by those of the layers.

    Raises:
        ValueError: ``layer_decay_rate`` is missing or out of range, the optimizer has no ``lr``, or neither a module
            called ``backbone`` nor a module inside it has a ``get_layer_depth``.

    Examples:
        >>> optim_wrapper = dict(
        ...     constructor='BackboneLayerDecayOptimWrapperConstructor',
        ...     optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
        ...     paramwise_cfg=dict(layer_decay_rate=0.75),
        ... )
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: Optional[dict] = None) -> None:
        settings = dict(paramwise_cfg or {})
        rate = settings.pop('layer_decay_rate', None)
        if not isinstance(rate, (int, float)) or not 0 < rate <= 1:
            raise ValueError(f'paramwise_cfg.layer_decay_rate={rate!r}: expected a number in (0, 1]')
        optimizer = optim_wrapper_cfg.get('optimizer') or {}
        if optimizer.get('lr') is None:
            raise ValueError('optim_wrapper.optimizer.lr is missing: layer_decay_rate is a factor of it')
        if optimizer.get('weight_decay') is None:
            kind = optimizer_class(optimizer.get('type'))
            decay = inspect.signature(kind).parameters.get('weight_decay') if callable(kind) else None
            if decay is not None and isinstance(decay.default, (int, float)):
                optimizer = {**optimizer, 'weight_decay': decay.default}
        if optimizer.get('weight_decay') is not None:
            settings = {**dict(norm_decay_mult=0.0, bias_decay_mult=0.0, flat_decay_mult=0.0), **settings}
        # MMEngine calls `add_params` only if paramwise_cfg is not empty
        settings['custom_keys'] = settings.get('custom_keys') or {}
        super().__init__({**optim_wrapper_cfg, 'optimizer': optimizer}, settings)
        self.layer_decay_rate = float(rate)

    def adjust(self, params: list, model: nn.Module) -> None:
        """Scale learning rates by depth."""
        found = [
            (f'{name}.', module)
            for name, module in model.named_modules()
            # asked of the class, because adapters forward attributes of the backbone that they wrap
            if 'backbone' in name.split('.') and hasattr(type(module), 'get_layer_depth')
        ]
        if not found:
            raise ValueError(
                f'layer_decay_rate: no module of {type(model).__name__} called backbone, or inside of one, has a '
                'get_layer_depth'
            )
        scales = {}
        for prefix, backbone in found:
            for name, parameter in backbone.named_parameters():
                depth, num_depths = backbone.get_layer_depth(prefix + name, prefix)
                scales[parameter] = self.layer_decay_rate ** (num_depths - 1 - depth)
        for group in params:
            (parameter,) = group['params']
            scale = scales.get(parameter, 1.0)
            group['lr'] = group.get('lr', self.base_lr) * scale
            group['lr_scale'] = scale
