# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from mmengine.model import ModuleList
from mmengine.registry import MODELS

from ..layers import Block, DWConvFFN, PatchEmbed
from .base import PyramidBackbone
from .pvt import NORM, spatial_attention


@MODELS.register_module()
class LinearPVTv2(PyramidBackbone):
    """PVT v2 with any attention (Wang et al. 2022, Tab. 1; FLatten supplement): overlapping patch embedding,
    convolutional FFN.

    Each stage ends in a LayerNorm that also feeds the next stage; it is the output norm of ``out_norm=True``.

    Args:
        arch (str | dict): ``{flatten,softmax}-{b0,b1,b2,b3,b4}``, ``hmhsa-b1``, or a dict with ``embed_dims``,
            ``depths``, ``num_heads`` and optionally ``mlp_ratios``, ``ffn``, ``sr_ratios``, ``grids`` (trained sizes of
            the maps), ``stage_attns``, ``drop_path_rate``.
        in_channels, out_indices, out_norm, frozen_stages, norm_eval, with_cp, drop_path_rate, stage_attns, deploy,
            init_cfg: See :class:`~mmlinattn.backbones.base.PyramidBackbone`.
    """

    norms_feed_on = True
    arch_counts = ('sr_ratios', 'grids')
    arch_defaults = dict(
        mlp_ratios=(8, 8, 4, 4),
        sr_ratios=(8, 4, 2, 1),
        grids=(56, 28, 14, 7),
        drop_path_rate=0.1,
        stage_attns=('softmax',) * 4,
    )
    sizes: dict[str, dict] = {
        'b0': dict(embed_dims=(32, 64, 160, 256), depths=(2, 2, 2, 2)),
        'b1': dict(depths=(2, 2, 2, 2)),
        'b2': dict(depths=(3, 4, 6, 3)),
        'b3': dict(depths=(3, 4, 18, 3), drop_path_rate=0.3),
        'b4': dict(depths=(3, 8, 27, 3), drop_path_rate=0.3),
    }
    methods: dict[str, dict] = {
        'flatten': dict(stage_attns=('focused',) * 4),
        'softmax': dict(stage_attns=('softmax',) * 4),
    }
    arch_zoo = PyramidBackbone.zoo(sizes, methods, embed_dims=(64, 128, 320, 512), num_heads=(1, 2, 5, 8))
    arch_zoo['hmhsa-b1'] = dict(arch_zoo['softmax-b1'], stage_attns=('hallucinated',) * 4, ffn=dict(type='compact'))

    def __init__(self, arch='flatten-b1', **kwargs) -> None:
        super().__init__(arch, **kwargs)
        mlp_ratios, sr_ratios, grids = (self.per_stage(key) for key in ('mlp_ratios', 'sr_ratios', 'grids'))
        norm_cfg = dict(type='LN', eps=1e-5)
        for i in range(self.num_stages):
            dim, grid = self.embed_dims[i], (grids[i], grids[i])
            if i == 0:
                embed = PatchEmbed(self.in_channels, dim, 7, 4, 3, norm_cfg=norm_cfg)
            else:
                embed = PatchEmbed(self.embed_dims[i - 1], dim, 3, 2, 1, norm_cfg=norm_cfg)
            self.patch_embeds.append(embed)
            self.stages.append(
                ModuleList(
                    Block(
                        dim,
                        spatial_attention(dim, self.arch['num_heads'][i], spec, sr_ratios[i], norm_cfg, grid=grid),
                        self.build_ffn(i, DWConvFFN, dim, int(dim * mlp_ratios[i])),
                        norm_cfg=NORM,
                        drop_path=rate,
                    )
                    for spec, rate in zip(self.block_attns[i], self.drop_paths[i])
                )
            )
        self.finish_init()
