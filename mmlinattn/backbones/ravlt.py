# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections import Counter, OrderedDict
from typing import Any, Optional

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..attention import GlobalAttention, Grid, StageContext
from ..layers import (
    MLP,
    Block,
    Conv2d,
    ConvDownsample,
    ConvFFN,
    ConvOfGELU,
    ConvStem,
    DWConvFFN,
    FactorisedLinear,
    Linear,
    ResidualDWConv,
    SourceBlock,
    fold_batch_norm,
    is_foldable,
    rotary_table,
)
from ..ops import Chain
from ..ops.dispatch import accumulation_dtype
from ..utils.private_apis import is_altered
from .arch import check_type
from .base import PyramidBackbone

HYBRID = ('rala', 'rala', 'softmax', 'softmax')


@MODELS.register_module()
class RAVLT(PyramidBackbone):
    """Rank-Augmented Vision Linear Transformer (RALA, Tab. 1 and the released code).

    The released models are hybrid: RALA in stages 1-2, softmax attention in stages 3-4, the default of
    ``stage_attns``. ``stage_attns=('rala',) * 4`` is the fully linear model that the paper describes; ``rotary=False,
    local_kernel=None`` is the paper's plain form of the attention.

    Args:
        arch (str | dict): ``'tiny'``, ``'small'``, ``'base'``, ``'large'``, or a dict with ``embed_dims``, ``depths``,
            ``num_heads`` and optionally ``mlp_ratios``, ``layer_scales``, ``stage_attns``, ``drop_path_rate``.
        norm_cfg (dict, optional): Batch norm of stem and down-sampling. None takes ``dict(type='BN')``; the released
            detectors trained ``SyncBN``.
        rotary (bool): Rotary position encoding of queries and keys (release).
        local_kernel (int, optional): Size of the depth-wise convolution of the values added to the attention (release:
            5).
        cpe (bool): Conditional position encoding ``x + DWConv3x3(x)`` before each block (RALA Tab. 9).
        in_channels, out_indices, out_norm, frozen_stages, norm_eval, with_cp, drop_path_rate, stage_attns, deploy,
            init_cfg: See :class:`~mmlinattn.backbones.base.PyramidBackbone`.

    Raises:
        ValueError: For an even ``local_kernel``, and with ``rotary`` for heads whose width is no multiple of 4.

    Examples:
        >>> import torch
        >>> from mmlinattn.backbones import RAVLT
        >>> model = RAVLT('tiny').eval()
        >>> [tuple(out.shape) for out in model(torch.rand(1, 3, 64, 96))]
        [(1, 64, 16, 24), (1, 128, 8, 12), (1, 256, 4, 6), (1, 512, 2, 3)]
    """

    default_init_cfg = [
        *PyramidBackbone.default_init_cfg,
        dict(type='TruncNormal', layer='Conv2d', std=0.02, bias=0.0),
    ]
    arch_defaults = dict(mlp_ratios=3.5, layer_scales=1.0, drop_path_rate=0.1, stage_attns=HYBRID)
    arch_zoo = {
        'tiny': dict(
            embed_dims=(64, 128, 256, 512),
            depths=(2, 2, 6, 2),
            num_heads=(1, 2, 4, 8),
        ),
        'small': dict(
            embed_dims=(64, 128, 320, 512),
            depths=(3, 5, 9, 3),
            num_heads=(1, 2, 5, 8),
            drop_path_rate=0.15,
        ),
        'base': dict(
            embed_dims=(96, 192, 384, 512),
            depths=(4, 6, 12, 6),
            num_heads=(1, 2, 6, 8),
            layer_scales=(1.0, 1.0, 1e-6, 1e-6),
            drop_path_rate=0.4,
        ),
        'large': dict(
            embed_dims=(96, 192, 448, 640),
            depths=(4, 7, 19, 8),
            num_heads=(1, 2, 7, 10),
            layer_scales=1e-6,
            drop_path_rate=0.55,
        ),
    }

    def __init__(
        self,
        arch='tiny',
        *,
        norm_cfg: Optional[dict] = None,
        rotary: bool = True,
        local_kernel: Optional[int] = 5,
        cpe: bool = True,
        **kwargs,
    ) -> None:
        super().__init__(arch, **kwargs)
        self.norm_cfg = check_type('norm_cfg', norm_cfg or dict(type='BN'), dict)
        self.rotary, self.cpe = check_type('rotary', rotary, bool), check_type('cpe', cpe, bool)
        self.local_kernel = local_kernel
        self.head_dims = [dim // heads for dim, heads in zip(self.embed_dims, self.arch['num_heads'])]
        self.build_stages()
        if rotary:
            for head_dim in self.head_dims[: self.num_stages]:
                rotary_table(1, 1, head_dim)  # raises here rather than in the first forward pass

    def build_embed(self, stage: int, in_dim: int, dim: int) -> nn.Module:
        return (ConvStem if stage == 0 else ConvDownsample)(in_dim, dim, self.norm_cfg)

    def build_block(self, stage: int, index: int, spec: Any, drop_path: float) -> nn.Module:
        dim, heads = self.embed_dims[stage], self.arch['num_heads'][stage]
        return Block(
            dim,
            GlobalAttention(dim, heads, spec, gate='projection', local_kernel=self.local_kernel),
            self.build_ffn(stage, ConvFFN),
            norm_cfg=dict(type='LN', eps=1e-6),
            drop_path=drop_path,
            layer_scale=self.per_stage('layer_scales')[stage],
            position=ResidualDWConv(dim) if self.cpe else None,
        )

    def stage_context(self, stage: int, x: Tensor) -> StageContext:
        grid = Grid(x.shape[1], x.shape[2])
        if not self.rotary:
            return StageContext(grid)
        # angles in float32 even for a feature map in half precision: indices above 256 are not exact in bfloat16
        return StageContext(grid, rotary_table(*grid[:2], self.head_dims[stage], x, accumulation_dtype(x)))

    @torch.no_grad()
    def switch_to_deploy(self) -> 'RAVLT':
        """Fold batch norms into convolutions and layer scales into projections, and merge compact FFNs, in place.

        Returns:
            RAVLT: The model itself, in eval mode. Its ``state_dict`` loads into ``RAVLT(..., deploy=True)``.

        Raises:
            ValueError: For a batch norm that cannot be folded or merged, before anything is changed.
        """
        owners = Counter(p for module in self.modules() for p in module._parameters.values() if p is not None)
        embeds = [embed for embed in self.patch_embeds if isinstance(embed, (ConvStem, ConvDownsample))]
        for embed in embeds:
            check_foldable(embed.layers, owners)
        super().switch_to_deploy()
        for embed in embeds:
            embed.layers = fold_batch_norms(embed.layers)
        uses = Counter(module for _, module in self.named_modules(remove_duplicate=False))
        for block in dict.fromkeys(block for stage in self.stages for block in stage):
            if ends_in_products(block):
                for layer, name in ((block.attn.proj, 'gamma1'), (block.ffn.fc2, 'gamma2')):
                    if getattr(block, name) is not None and absorbs_scale(layer, uses):
                        fold_scale(layer, getattr(block, name))
                        setattr(block, name, None)
        return self.eval()


def check_foldable(layers: nn.Sequential, owners: Counter) -> None:
    """Check that each batch norm of a stem can be folded into the convolution before it.

    Args:
        layers (nn.Sequential): Layers of the stem.
        owners (Counter): Number of modules that hold each parameter.

    Raises:
        ValueError: A batch norm has no weights or running statistics, or does not follow a convolution. Also for hooks,
            and for convolutions with shared or computed weights.
    """
    if is_altered(layers):
        raise ValueError('switch_to_deploy: the layers of a stem have a hook, and folding would lose it')
    for conv, norm in zip(layers, list(layers)[1:]):
        is_pair = type(conv) in (nn.Conv2d, Conv2d, ConvOfGELU) and not is_altered(conv) and is_foldable(norm)
        is_pair = is_pair and all(owners[parameter] == 1 for parameter in conv.parameters())
        if isinstance(norm, _BatchNorm) and not is_pair:
            raise ValueError(
                f'switch_to_deploy: {type(norm).__name__} cannot be folded into {type(conv).__name__}; allowed are '
                "batch norms with weights and running statistics, and convolutions, of PyTorch's own forward, without "
                'hooks, shared or computed weights'
            )


def ends_in_products(block: Any) -> bool:
    """Return True if both branches of a block end in a linear layer, directly before the layer scale."""
    if type(block) not in (Block, SourceBlock) or is_altered(block, block.attn, block.ffn):
        return False
    networks = MLP.forward, ConvFFN.forward, DWConvFFN.forward
    return type(block.attn) is GlobalAttention and type(block.ffn).forward in networks


def absorbs_scale(layer: nn.Module, uses: Counter) -> bool:
    """Return True if the rows of a linear layer can be multiplied by the layer scale.

    The result is False for a layer that an adapter wraps or several blocks share. ``uses`` counts the occurrences of
    each module in the model.
    """
    parts = list(layer.modules())
    is_plain = all(type(part) in (nn.Linear, Linear, FactorisedLinear) and uses[part] == 1 for part in parts)
    return is_plain and not is_altered(*parts)


def fold_scale(layer: Any, gamma: Tensor) -> None:
    """Multiply weight and bias of a linear layer by the layer scale ``gamma`` (C,), one factor per output channel.

    The results are new parameters, because the old tensors may be buffers or shared with other layers.
    """
    for part in (layer, layer.up) if isinstance(layer, FactorisedLinear) else (layer,):
        for key in ('weight', 'bias'):
            value = getattr(part, key, None)
            if value is not None:
                rows = gamma if value.dim() == 1 else gamma[:, None]
                setattr(part, key, nn.Parameter(value * rows, value.requires_grad))


def fold_batch_norms(layers: nn.Sequential) -> Chain:
    """Fold batch norms into the convolutions before them, in place, and return the other layers under their names."""
    folded: OrderedDict = OrderedDict()
    for name, layer in layers.named_children():
        if isinstance(layer, _BatchNorm):
            conv = next(reversed(folded.values()))
            weight, bias = fold_batch_norm(conv, layer)
            learns = conv.weight.requires_grad
            conv.weight, conv.bias = nn.Parameter(weight, learns), nn.Parameter(bias, learns)
        else:
            folded[name] = layer
    return Chain(folded)
