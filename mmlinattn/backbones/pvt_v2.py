# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Any

from mmengine.registry import MODELS
from torch import nn

from ..layers import Block, DWConvFFN, PatchEmbed
from .base import PyramidBackbone
from .pvt import INNER_NORM, NORM, LinearPVT, spatial_attention


@MODELS.register_module()
class LinearPVTv2(PyramidBackbone):
    """PVT v2 with any attention (Wang et al. 2022, Tab. 1; FLatten supplement): overlapping patch embedding,
    convolutional FFN.

    The LayerNorm at the end of each stage also feeds the next stage; ``out_norm=False`` returns the map before it.

    Args:
        arch (str | dict): ``{flatten,softmax}-{b0,b1,b2,b3,b4}``, ``hmhsa-b1``, or a dict with ``embed_dims``,
            ``depths``, ``num_heads`` and optionally ``mlp_ratios``, ``ffn``, ``sr_ratios``, ``grids`` (trained sizes of
            the feature maps), ``stage_attns``, ``drop_path_rate``.
        in_channels, out_indices, out_norm, frozen_stages, norm_eval, with_cp, drop_path_rate, stage_attns, deploy,
            init_cfg: See :class:`~mmlinattn.backbones.base.PyramidBackbone`.
    """

    default_init_cfg = [*PyramidBackbone.default_init_cfg, dict(type='GroupedFanOutInit')]
    norms_feed_on = True
    arch_rules, arch_defaults = LinearPVT.arch_rules, LinearPVT.arch_defaults
    sizes: dict[str, dict] = {
        'b0': dict(embed_dims=(32, 64, 160, 256), depths=(2, 2, 2, 2)),
        'b1': dict(depths=(2, 2, 2, 2)),
        'b2': dict(depths=(3, 4, 6, 3)),
        'b3': dict(depths=(3, 4, 18, 3), drop_path_rate=0.3),
        'b4': dict(depths=(3, 8, 27, 3), drop_path_rate=0.3),
    }
    methods: dict[str, dict] = {
        'flatten': dict(stage_attns=('focused',) * 4),
        'softmax': {},
    }
    arch_zoo = PyramidBackbone.zoo(sizes, methods, embed_dims=(64, 128, 320, 512), num_heads=(1, 2, 5, 8))
    arch_zoo['hmhsa-b1'] = dict(arch_zoo['softmax-b1'], stage_attns=('hallucinated',) * 4, ffn=dict(type='compact'))

    def __init__(self, arch='flatten-b1', **kwargs) -> None:
        super().__init__(arch, **kwargs)
        self.build_stages()

    def build_embed(self, stage: int, in_dim: int, dim: int) -> nn.Module:
        kernel_size, stride, padding = (7, 4, 3) if stage == 0 else (3, 2, 1)
        return PatchEmbed(in_dim, dim, kernel_size, stride, padding, norm_cfg=INNER_NORM)

    def build_block(self, stage: int, index: int, spec: Any, drop_path: float) -> nn.Module:
        ffn = self.build_ffn(stage, DWConvFFN)
        return Block(self.embed_dims[stage], spatial_attention(self, stage, spec), ffn, NORM, drop_path)
