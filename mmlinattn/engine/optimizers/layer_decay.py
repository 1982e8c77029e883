# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import inspect
from typing import Any, Optional

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from torch import nn

# Learned tables and scales of the backbones, which no recipe decays
_TABLES = ('relative_bias.table', 'position_table', 'cls_token', 'mixer.position', 'mixer.scale')


def _own_decay(optimizer: Any) -> Optional[float]:
    """The weight decay of an optimizer, a class or a name, that is told none; None where it has no such argument."""
    made = OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer
    decay = inspect.signature(made).parameters.get('weight_decay') if callable(made) else None
    return decay.default if decay is not None and isinstance(decay.default, (int, float)) else None


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class BackboneLayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Learning rates that fall from the head to the stem, for detectors and segmentors (BEiT, Bao et al. 2022).

    A parameter of depth i (:meth:`~mmlinattn.backbones.base.Backbone.get_layer_depth`) of L blocks gets the learning
    rate times ``layer_decay_rate ** (L + 1 - i)``: the head all of it, the last block one power less, the stem L + 1
    powers less. MMPretrain has a constructor of the kind for classifiers,
    ``LearningRateDecayOptimWrapperConstructor``, which works with these backbones as well.

    Norms, biases, other vectors, position tables and class tokens do not decay (``weight_decay``, the optimizer's own
    where the config has none), unless ``paramwise_cfg`` says otherwise. As in MMEngine, a parameter that a custom key
    matches decays by the key's ``decay_mult`` alone, one where the key has none.

    Args:
        optim_wrapper_cfg (dict): As MMEngine's; the optimizer needs a learning rate.
        paramwise_cfg (dict): ``layer_decay_rate`` in (0, 1], and what
            :class:`~mmengine.optim.DefaultOptimWrapperConstructor` takes: ``custom_keys``, ``norm_decay_mult`` and so
            on, whose factors come on top.

    Raises:
        ValueError: ``layer_decay_rate`` is missing or out of range, the optimizer has no ``lr``, or no module called
            ``backbone``, or inside of one, has a ``get_layer_depth``.

    Examples:
        >>> optim_wrapper = dict(
        ...     constructor='BackboneLayerDecayOptimWrapperConstructor',
        ...     optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
        ...     paramwise_cfg=dict(layer_decay_rate=0.75),
        ... )
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: Optional[dict] = None) -> None:
        given = dict(paramwise_cfg or {})
        rate = given.pop('layer_decay_rate', None)
        if not isinstance(rate, (int, float)) or not 0 < rate <= 1:
            raise ValueError(f'paramwise_cfg.layer_decay_rate={rate!r} has to be a number in (0, 1]')
        optimizer = optim_wrapper_cfg.get('optimizer') or {}
        if optimizer.get('lr') is None:
            raise ValueError('optim_wrapper.optimizer.lr is missing: layer_decay_rate is a factor of it')
        if optimizer.get('weight_decay') is None:
            optimizer = {**optimizer, 'weight_decay': _own_decay(optimizer.get('type'))}
        if optimizer['weight_decay'] is None:
            optimizer.pop('weight_decay')
        else:
            given = {**dict(norm_decay_mult=0.0, bias_decay_mult=0.0, flat_decay_mult=0.0), **given}
        # with nothing at all in it MMEngine would not call `add_params`
        given['custom_keys'] = given.get('custom_keys') or {}
        super().__init__({**optim_wrapper_cfg, 'optimizer': optimizer}, given)
        self.layer_decay_rate = float(rate)

    def add_params(self, params: list, module: nn.Module, prefix: str = '', **kwargs) -> None:
        """Groups of one parameter each, as MMEngine's, with their rates scaled by depth."""
        super().add_params(params, module, prefix=prefix, **kwargs)
        if prefix == '':
            if self.base_wd is not None:
                self._spare_tables(params, module)
            self._scale(params, module)

    def _spare_tables(self, params: list, model: nn.Module) -> None:
        names, keys = {p: name for name, p in model.named_parameters()}, self.paramwise_cfg['custom_keys']
        for group in params:
            name = names[group['params'][0]]
            if any(table in name for table in _TABLES) and not any(key in name for key in keys):
                group['weight_decay'] = 0.0

    def _scale(self, params: list, model: nn.Module) -> None:
        found = [
            (f'{name}.', module)
            for name, module in model.named_modules()
            # of the class: adapters pass on what the backbone inside of them has
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
        of_depth = sorted(set(scales.values()))
        print_log(
            f'learning rates of {", ".join(prefix[:-1] for prefix, _ in found)}: {len(of_depth)} depths, '
            f'{self.base_lr * of_depth[0]:.3g} to {self.base_lr * of_depth[-1]:.3g}; of the rest {self.base_lr:.3g}',
            'current',
        )
