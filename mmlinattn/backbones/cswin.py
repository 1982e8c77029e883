# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Any

from mmengine.registry import MODELS
from torch import nn

from ..attention import GlobalAttention, StripeAttention, get_mixer
from ..layers import MLP, PatchEmbed, SourceBlock
from .arch import COUNT, COUNT_OR_NONE
from .base import PyramidBackbone

NORM = dict(type='LN', eps=1e-5)
LEPE = 3


@MODELS.register_module()
class LinearCSWin(PyramidBackbone):
    """CSWin Transformer with any attention (Dong et al. 2022; InLine Tab. 18, FLatten supplement).

    Quadratic attentions act in cross-shaped windows: half of the heads in vertical and half in horizontal stripes as
    long as the map. In the last stage they act on the whole map, and linear attentions do so in every stage.
    Attentions add a locally-enhanced position encoding (LePE, a depth-wise 3x3 convolution of the values).

    Args:
        arch (str | dict): ``{inline,flatten}-{tiny,small,base,base-384}``, ``softmax-{tiny,small,base,base-384}``, or a
            dict with ``embed_dims``, ``depths``, ``num_heads``. Optional keys: ``mlp_ratios``, ``stripes`` (widths in
            tokens of the stripes, None for the whole map), ``grids`` (trained sizes of the maps), ``stage_attns``,
            ``drop_path_rate``.
        in_channels, out_indices, out_norm, frozen_stages, norm_eval, with_cp, drop_path_rate, stage_attns, deploy,
            init_cfg: See :class:`~mmlinattn.backbones.base.PyramidBackbone`.

    Examples:
        >>> import torch
        >>> from mmlinattn.backbones import LinearCSWin
        >>> model = LinearCSWin('inline-tiny').eval()
        >>> [tuple(out.shape) for out in model(torch.rand(1, 3, 64, 90))]
        [(1, 64, 16, 23), (1, 128, 8, 12), (1, 256, 4, 6), (1, 512, 2, 3)]
    """

    out_norm_cfg = NORM
    arch_rules = dict(PyramidBackbone.arch_rules, stripes=COUNT_OR_NONE, grids=COUNT)
    arch_defaults = dict(
        mlp_ratios=4,
        stripes=(1, 2, 7, None),
        grids=(56, 28, 14, 7),
        drop_path_rate=0.2,
    )
    _narrow = dict(embed_dims=(64, 128, 256, 512), num_heads=(2, 4, 8, 16))
    _wide = dict(embed_dims=(96, 192, 384, 768), num_heads=(4, 8, 16, 32), drop_path_rate=0.5)
    _at_384 = dict(stripes=(1, 2, 12, None), grids=(96, 48, 24, 12))
    _inline = dict(stage_attns=('inline', 'inline', 'softmax', 'softmax'))
    _flatten = dict(stage_attns=('focused', 'focused', 'softmax', 'softmax'))
    arch_zoo = {
        'inline-tiny': dict(_narrow, **_inline, depths=(2, 4, 18, 1)),
        'inline-small': dict(_narrow, **_inline, depths=(3, 6, 29, 2), drop_path_rate=0.4),
        'inline-base': dict(_wide, **_inline, depths=(3, 6, 29, 2)),
        'inline-base-384': dict(_wide, **_inline, **_at_384, depths=(3, 6, 29, 2)),
        'flatten-tiny': dict(_narrow, **_flatten, depths=(2, 4, 18, 1)),
        'flatten-small': dict(_narrow, **_flatten, depths=(2, 4, 32, 2), drop_path_rate=0.4),
        'flatten-base': dict(_wide, **_flatten, depths=(3, 6, 29, 2)),
        'flatten-base-384': dict(_wide, **_flatten, **_at_384, depths=(3, 6, 29, 2)),
        # the published CSWin (CSWin Tab. 1)
        'softmax-tiny': dict(_narrow, depths=(1, 2, 21, 1)),
        'softmax-small': dict(_narrow, depths=(2, 4, 32, 2), drop_path_rate=0.4),
        'softmax-base': dict(_wide, depths=(2, 4, 32, 2)),
        'softmax-base-384': dict(_wide, **_at_384, depths=(2, 4, 32, 2)),
    }

    def __init__(self, arch='inline-tiny', **kwargs) -> None:
        super().__init__(arch, **kwargs)
        self.build_stages()

    def build_embed(self, stage: int, in_dim: int, dim: int) -> nn.Module:
        # PatchEmbed pads at the bottom and right, so that sizes that are no multiple of 4 round up
        kernel_size, stride, padding = (7, 4, 2) if stage == 0 else (3, 2, 1)
        return PatchEmbed(in_dim, dim, kernel_size, stride, padding, norm_cfg=NORM)

    def build_block(self, stage: int, index: int, spec: Any, drop_path: float) -> nn.Module:
        dim, heads, stripe = self.embed_dims[stage], self.arch['num_heads'][stage], self.per_stage('stripes')[stage]
        attn: nn.Module
        if stripe is not None and get_mixer(spec)[0].quadratic:
            attn = StripeAttention(dim, heads, spec, stripe, local_kernel=LEPE)
        else:
            grid = (self.per_stage('grids')[stage],) * 2
            attn = GlobalAttention(dim, heads, spec, grid=grid, local_kernel=LEPE)
        return SourceBlock(dim, attn, self.build_ffn(stage, MLP), norm_cfg=NORM, drop_path=drop_path)
