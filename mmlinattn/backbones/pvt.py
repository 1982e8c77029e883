# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Any

from mmengine.model import ModuleList
from mmengine.registry import MODELS
from torch import Tensor, nn

from ..attention import Attention, GlobalAttention, Grid, ReducedAttention, get_mixer
from ..layers import MLP, Block, PatchEmbed, PositionTable
from ..ops.tokens import unflatten
from .arch import COUNT
from .base import PyramidBackbone

NORM = dict(type='LN', eps=1e-6)
INNER_NORM = dict(type='LN', eps=1e-5)  # norm of patch embeddings and of reduced feature maps for keys


def spatial_attention(backbone: PyramidBackbone, stage: int, spec: Any) -> Attention:
    """Build the attention of a stage over the whole feature map.

    An attention of quadratic cost gets keys and values from a feature map reduced by ``sr_ratios``, as in PVT.

    Args:
        backbone (PyramidBackbone): Backbone with the channels, heads and ratios.
        stage (int): Index of the stage, from 0.
        spec (str | dict): Token mixer, an entry of ``stage_attns``.
    """
    dim, heads = backbone.embed_dims[stage], backbone.arch['num_heads'][stage]
    ratio = backbone.per_stage('sr_ratios')[stage]
    grid = (backbone.per_stage('grids')[stage],) * 2
    if ratio > 1 and get_mixer(spec)[0].quadratic:
        return ReducedAttention(dim, heads, spec, ratio, INNER_NORM, grid=grid)
    return GlobalAttention(dim, heads, spec, grid=grid)


@MODELS.register_module()
class LinearPVT(PyramidBackbone):
    """Pyramid Vision Transformer with any attention (Wang et al. 2021; InLine Tab. 15, FLatten supplement).

    Each stage adds a position table, resized to the map, to its patch embedding. Linear attentions use all keys of the
    feature map; quadratic ones use keys of a feature map reduced by ``sr_ratios`` (spatial-reduction attention).

    Args:
        arch (str | dict): ``{inline,flatten,softmax}-{tiny,small,medium,large}``, or a dict with ``embed_dims``,
            ``depths``, ``num_heads`` and optionally ``mlp_ratios``, ``sr_ratios``, ``grids`` (trained sizes of the
            feature maps), ``stage_attns``, ``drop_path_rate``.
        in_channels, out_indices, out_norm, frozen_stages, norm_eval, with_cp, drop_path_rate, stage_attns, deploy,
            init_cfg: See :class:`~mmlinattn.backbones.base.PyramidBackbone`.

    Examples:
        >>> import torch
        >>> from mmlinattn.backbones import LinearPVT
        >>> model = LinearPVT('inline-tiny').eval()
        >>> [tuple(out.shape) for out in model(torch.rand(1, 3, 64, 90))]
        [(1, 64, 16, 23), (1, 128, 8, 12), (1, 320, 4, 6), (1, 512, 2, 3)]
    """

    arch_rules = dict(PyramidBackbone.arch_rules, sr_ratios=COUNT, grids=COUNT)
    arch_defaults = dict(
        mlp_ratios=(8, 8, 4, 4),
        sr_ratios=(8, 4, 2, 1),
        grids=(56, 28, 14, 7),
        drop_path_rate=0.1,
    )
    sizes: dict[str, dict] = {
        'tiny': dict(depths=(2, 2, 2, 2)),
        'small': dict(depths=(3, 4, 6, 3)),
        'medium': dict(depths=(3, 4, 18, 3), drop_path_rate=0.3),
        'large': dict(depths=(3, 8, 27, 3), drop_path_rate=0.3),
    }
    methods: dict[str, dict] = {
        # heads as released; InLine Tab. 15 prints 1 2 5 8
        'inline': dict(num_heads=(2, 4, 10, 16), stage_attns=('inline',) * 4),
        'flatten': dict(num_heads=(1, 2, 5, 8), stage_attns=('focused',) * 4),
        'softmax': dict(num_heads=(1, 2, 5, 8)),
    }
    arch_zoo = PyramidBackbone.zoo(sizes, methods, embed_dims=(64, 128, 320, 512))

    stage_inputs = ('patch_embeds', 'position_tables')

    def __init__(self, arch='inline-tiny', **kwargs) -> None:
        super().__init__(arch, **kwargs)
        self.position_tables = ModuleList()
        self.build_stages()

    def build_embed(self, stage: int, in_dim: int, dim: int) -> nn.Module:
        stride = 4 if stage == 0 else 2
        embed = PatchEmbed(in_dim, dim, stride, stride, norm_cfg=INNER_NORM)
        self.position_tables.append(PositionTable(dim, (self.per_stage('grids')[stage],) * 2))
        return embed

    def build_block(self, stage: int, index: int, spec: Any, drop_path: float) -> nn.Module:
        ffn = self.build_ffn(stage, MLP)
        return Block(self.embed_dims[stage], spatial_attention(self, stage, spec), ffn, NORM, drop_path)

    def embed(self, stage: int, x: Tensor) -> Tensor:
        x = super().embed(stage, x)
        table = self.position_tables[stage](Grid(*x.shape[1:3]))
        return x + unflatten(table.to(x.dtype), 1, x.shape[1:3])
