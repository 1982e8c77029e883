# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Any, Optional

from mmengine.registry import MODELS
from torch import nn

from ..attention import Attention, GlobalAttention, get_mixer
from ..layers import build_ffn
from .arch import COUNT, COUNT_OR_ZERO, check_type
from .base import PyramidBackbone
from .nextvit_blocks import (
    SHARE,
    AveragedKeysAttention,
    ConvBlock,
    ConvNorm,
    PooledEmbed,
    ReLUMLP,
    TransformerBlock,
)

REDUCTIONS = ('grid', 'sequence')


@MODELS.register_module()
class LinearNextViT(PyramidBackbone):
    """Next-ViT with any attention (Li et al. 2022; hMHSA/cFFN Tab. 1): convolution blocks, and transformer blocks that
    mix an attention with a convolution.

    Every stage but the first ends in a transformer block; in the long third stage, every fifth block is one. Linear
    attentions use all keys of the feature map, quadratic ones keys averaged over ``sr_ratios`` ** 2 tokens each.

    Args:
        arch (str | dict): ``hmhsa-small``, ``softmax-{small,base,large}``, or a dict with ``embed_dims`` (width of a
            stage's result), ``depths``, ``num_heads`` (of the attentions, on three quarters of the width). Optional
            keys: ``attn_every`` (every n-th block and the last one have an attention; 0 for none), ``mlp_ratios`` (of
            convolution blocks), ``attn_mlp_ratios`` (of transformer blocks). Also ``sr_ratios``, ``group_dim``
            (channels of a convolution's group), ``stem_dims`` (widths of the first three convolutions), ``grids``
            (trained sizes of the maps), ``ffn``, ``stage_attns``, ``drop_path_rate``, and ``key_reduction``: how
            quadratic attentions average keys, ``'grid'`` or ``'sequence'`` (release, for ``softmax-*``), see
            :class:`AveragedKeysAttention`. Attentions that use neighbours of keys (``'hallucinated'``) always take
            ``'grid'``.
        stage_attns (Sequence, optional): As in :class:`~mmlinattn.backbones.base.Backbone`; entries of convolution
            blocks (None, or any) have no effect.
        stage_norms (bool, optional): End each stage in a batch norm that also feeds the next stage, as in the released
            segmentation backbones. False applies norms to the outputs alone: the classifier has one, on the last
            stage. None is True if ``out_norm`` is set and there are several outputs.
        norm_cfg (dict, optional): Config of all norms; by default batch norms with eps 1e-5.
        in_channels, out_indices, out_norm, frozen_stages, norm_eval, with_cp, drop_path_rate, deploy, init_cfg:
            See :class:`~mmlinattn.backbones.base.PyramidBackbone`; the output norms are batch norms.

    Raises:
        ValueError: For an unknown ``key_reduction``, widths that ``group_dim`` does not divide, an ``attn_every`` below
            0, and other than three ``stem_dims``.

    Examples:
        >>> import torch
        >>> from mmlinattn.backbones import LinearNextViT
        >>> model = LinearNextViT('softmax-small', stage_attns=('rala',) * 4).eval()
        >>> [tuple(out.shape) for out in model(torch.rand(1, 3, 64, 90))]
        [(1, 96, 16, 23), (1, 256, 8, 12), (1, 512, 4, 6), (1, 1024, 2, 3)]
    """

    default_init_cfg = [
        *PyramidBackbone.default_init_cfg,
        dict(type='TruncNormal', layer='Conv2d', std=0.02, bias=0.0),
    ]
    arch_rules = dict(PyramidBackbone.arch_rules, attn_every=COUNT_OR_ZERO, sr_ratios=COUNT, grids=COUNT)
    arch_defaults = dict(
        attn_every=(0, 5, 5, 5),
        mlp_ratios=3,
        attn_mlp_ratios=2,
        sr_ratios=(8, 4, 2, 1),
        key_reduction='grid',
        group_dim=32,
        stem_dims=(64, 32, 64),
        grids=(56, 28, 14, 7),
        drop_path_rate=0.1,
    )
    sizes: dict[str, dict] = {
        'small': dict(depths=(3, 4, 10, 3)),
        'base': dict(depths=(3, 4, 20, 3), drop_path_rate=0.2),
        'large': dict(depths=(3, 4, 30, 3), drop_path_rate=0.2),
    }
    # heads have 32 channels of the attention's width, three quarters of embed_dims
    _widths: dict = dict(embed_dims=(96, 256, 512, 1024), num_heads=(3, 6, 12, 24))
    arch_zoo = {
        'hmhsa-small': dict(_widths, **sizes['small'], stage_attns=('hallucinated',) * 4, ffn=dict(type='compact')),
        **PyramidBackbone.zoo(sizes, {'softmax': dict(key_reduction='sequence')}, **_widths),
    }

    def __init__(
        self,
        arch='softmax-small',
        *,
        stage_norms: Optional[bool] = None,
        norm_cfg: Optional[dict] = None,
        **kwargs,
    ) -> None:
        super().__init__(arch, **kwargs)
        self.out_norm_cfg = {'eps': 1e-5, **(norm_cfg or dict(type='BN'))}
        if stage_norms is None:
            stage_norms = self.out_norm and len(self.out_indices) > 1
        self.norms_feed_on = check_type('stage_norms', stage_norms, bool)
        self.build_stages()
        norm: Any
        for norm in self.out_norms.values():
            if getattr(norm, 'running_var', None) is not None:
                # exactly the identity: a classifier's file lacks these norms, and features stay as trained
                norm.running_var.fill_(1 - norm.eps)

    def build_embed(self, stage: int, in_dim: int, dim: int) -> nn.Module:
        attn_dim, norm_cfg = self.attn_dims[stage], self.out_norm_cfg
        if stage > 0:
            return PooledEmbed(in_dim, attn_dim, norm_cfg)
        # four 3x3 convolutions, the fourth as wide as the third, then a 1x1 convolution
        widths = (in_dim, *self.arch['stem_dims'], self.arch['stem_dims'][-1])
        stem = [
            ConvNorm(widths[i], widths[i + 1], norm_cfg, 3, stride, relu=True) for i, stride in enumerate((2, 1, 1, 2))
        ]
        return nn.Sequential(nn.Sequential(*stem), ConvNorm(widths[-1], attn_dim, norm_cfg))

    def build_block(self, stage: int, index: int, spec: Any, drop_path: float) -> nn.Module:
        dim, attn_dim, norm_cfg = self.embed_dims[stage], self.attn_dims[stage], self.out_norm_cfg
        group_dim = self.arch['group_dim']
        in_dim = dim if index > 0 and self.attn_blocks[stage][index - 1] else attn_dim
        if spec is None:
            ffn = self._ffn(stage, attn_dim, 'mlp_ratios')
            return ConvBlock(in_dim, attn_dim, group_dim, ffn, norm_cfg, drop_path)
        attn, ffn = self._attention(stage, spec), self._ffn(stage, dim, 'attn_mlp_ratios')
        return TransformerBlock(in_dim, attn, attn_dim, dim, group_dim, ffn, norm_cfg, drop_path)

    def _attention(self, stage: int, spec: Any) -> Attention:
        mixer, ratio = get_mixer(spec)[0], self.per_stage('sr_ratios')[stage]
        dim, heads, grid = self.attn_dims[stage], self.arch['num_heads'][stage], (self.per_stage('grids')[stage],) * 2
        if not (mixer.quadratic and ratio > 1):
            return GlobalAttention(dim, heads, spec, grid=grid)
        reduction = 'grid' if mixer.local_keys else self.arch['key_reduction']
        return AveragedKeysAttention(dim, heads, spec, ratio, reduction, self.out_norm_cfg, grid=grid)

    def _ffn(self, stage: int, dim: int, ratios: str):
        """Build the feed-forward network of a block with ``dim`` channels; ``ratios`` is the arch's key of its hidden
        ratio. Branches of a compact network get the backbone's type of batch norm."""
        spec, norm_cfg = self.per_stage('ffn')[stage], dict(self.out_norm_cfg)
        if isinstance(spec, dict) and spec.get('type') == 'compact':
            norm_cfg['type'] = 'BN1d' if norm_cfg['type'] == 'BN' else norm_cfg['type']
            spec = dict(norm_cfg=norm_cfg, **spec) if 'norm_cfg' not in spec else spec
        return build_ffn(spec, ReLUMLP, dim, int(dim * self.per_stage(ratios)[stage]))

    @property
    def attn_blocks(self) -> list[list[bool]]:
        every = self.per_stage('attn_every')
        return [
            [n > 0 and ((j + 1) % n == 0 or j + 1 == depth) for j in range(depth)]
            for n, depth in zip(every, self.depths)
        ]

    @property
    def attn_dims(self) -> tuple[int, ...]:
        """Channels of the attentions and convolution blocks of each stage.

        Stages without attention have ``embed_dims``. Others have 3/4 of it, rounded to a multiple of ``group_dim``.
        """
        group = self.arch['group_dim']
        return tuple(
            int(SHARE * dim / group + 0.5) * group if any(blocks) else dim
            for dim, blocks in zip(self.embed_dims, self.attn_blocks)
        )

    def _check_sizes(self) -> None:
        super()._check_sizes()
        if self.arch['key_reduction'] not in REDUCTIONS:
            raise ValueError(f'arch: key_reduction={self.arch["key_reduction"]!r}: expected one of {REDUCTIONS}')
        group, stem_dims = self.arch['group_dim'], self.arch['stem_dims']
        if not COUNT.allows(group):
            raise ValueError(f'arch: group_dim={group!r}: expected an int >= 1')
        if not isinstance(stem_dims, (list, tuple)) or len(stem_dims) != 3 or not all(map(COUNT.allows, stem_dims)):
            raise ValueError(f'arch: stem_dims={stem_dims!r}: expected three entries, ints >= 1')
        for dim, attn_dim, blocks in zip(self.embed_dims, self.attn_dims, self.attn_blocks):
            if dim % group or (any(blocks) and not 0 < attn_dim < dim):
                raise ValueError(
                    f'arch: embed_dims={self.embed_dims}: expected multiples of group_dim={group}, and at least three '
                    'times that in a stage with attentions'
                )

    def ignorable_keys(self, key: str) -> bool:
        feed_on = [f'out_norms.{i}.' for i in range(self.num_stages - 1)]
        # without a norm that feeds the next stage, the network would compute something else
        return not key.startswith(tuple(feed_on)) and super().ignorable_keys(key)
