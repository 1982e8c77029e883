# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from typing import Any, Union

import torch
from mmengine.model import ModuleList
from mmengine.registry import MODELS
from torch import Tensor, nn

from ..attention import Attention, Grid, StageContext
from ..forward_pass import recompute
from ..layers import MLP, Block, FactorisedLinear, PatchEmbed, PositionTable, TokenBlock, build_token_norm
from ..ops.tokens import to_map
from .arch import COUNT, check_type
from .base import Backbone, Part, describe_output

NORM = dict(type='LN', eps=1e-6)
OUT_TYPES = ('raw', 'cls_token', 'featmap', 'avg_featmap')


@MODELS.register_module()
class LinearDeiT(Backbone):
    """DeiT with any attention (Touvron et al. 2021; InLine Tab. 14, FLatten Fig. 6).

    One stage of equal blocks over 16x16 patches, with a class token in front. Attention is global. Convolutions over
    the grid (local residual, depth-wise convolution) act on the patch tokens.

    Args:
        arch (str | dict): ``inline-{tiny,small,base}``, ``flatten-tiny``, ``rala-tiny``, ``hmhsa-{tiny,small}``,
            ``{hydra,efficient,angular,enhanced}-tiny``, ``softmax-{tiny,small,base}``. A dict has ``embed_dims``,
            ``depths``, ``num_heads`` (sequences of length one) and optionally ``mlp_ratios``, ``ffn``, ``grid``
            (patches a side in training), ``qkv_bias``, ``absolute_position`` (position table, True by default),
            ``stage_attns``, ``drop_path_rate``.
        out_type (str): As MMPretrain's ``VisionTransformer``: ``'cls_token'`` (B, C), ``'featmap'`` (B, C, ceil(H /
            16), ceil(W / 16)), ``'avg_featmap'`` (B, C), the mean of the patch tokens, ``'raw'`` (B, 1 + N, C).
        out_indices (Sequence[int] | int): Blocks to return the tokens of, ascending; negative ones count from the last.
        out_norm (bool): Apply the final LayerNorm to each output.
        stage_attns (Sequence, optional): One entry: an attention for all blocks, or a list with one for each block.
        in_channels, frozen_stages, norm_eval, with_cp, drop_path_rate, deploy, init_cfg: See
            :class:`~mmlinattn.backbones.base.Backbone`; ``frozen_stages`` counts blocks.

    Raises:
        ValueError: For an unknown ``out_type``, ``out_indices`` or ``frozen_stages`` out of range, an arch of more than
            one stage, and a compact ``ffn`` with a convolution.

    Shape: (B, in_channels, H, W), H, W >= 32, any size -> tuple with one tensor for each of ``out_indices``.

    Examples:
        >>> import torch
        >>> from mmlinattn.backbones import LinearDeiT
        >>> LinearDeiT('inline-tiny', out_type='featmap').eval()(torch.rand(1, 3, 64, 90))[0].shape
        torch.Size([1, 192, 4, 6])
    """

    num_extra_tokens = 1  # as MMPretrain's ViT
    out_norm_cfg = NORM
    undecayed = ('position_table.weight', 'cls_token')
    arch_rules = dict(Backbone.arch_rules, grid=COUNT)
    arch_defaults = dict(mlp_ratios=4, grid=14, qkv_bias=True, absolute_position=True, drop_path_rate=0.1)
    sizes = {
        'tiny': dict(embed_dims=(192,), depths=(12,), num_heads=(3,)),
        'small': dict(embed_dims=(384,), depths=(12,), num_heads=(6,)),
        'base': dict(embed_dims=(768,), depths=(12,), num_heads=(12,)),
    }
    arch_zoo = {
        # InLine Tab. 14: width, heads and resolution differ from DeiT's
        'inline-tiny': dict(embed_dims=(192,), depths=(12,), num_heads=(6,), stage_attns=('inline',)),
        'inline-small': dict(embed_dims=(320,), depths=(12,), num_heads=(10,), grid=18, stage_attns=('inline',)),
        'inline-base': dict(embed_dims=(384,), depths=(12,), num_heads=(12,), grid=28, stage_attns=('inline',)),
        # No code was released. Position tables in the attentions alone give the 6.1 M parameters of FLatten Fig. 6; an
        # absolute position table as well would give 6.19 M.
        'flatten-tiny': dict(sizes['tiny'], stage_attns=('focused',), qkv_bias=False, absolute_position=False),
        'hmhsa-tiny': dict(sizes['tiny'], stage_attns=('hallucinated',), ffn=dict(type='compact')),
        'hmhsa-small': dict(sizes['small'], stage_attns=('hallucinated',), ffn=dict(type='compact')),
        # RALA Tab. 8 and FLatten Tab. 3
        'rala-tiny': dict(sizes['tiny'], stage_attns=('rala',)),
        'hydra-tiny': dict(sizes['tiny'], stage_attns=('hydra',)),
        'efficient-tiny': dict(sizes['tiny'], stage_attns=('efficient',)),
        'angular-tiny': dict(sizes['tiny'], stage_attns=(dict(type='angular', conv='sequence'),)),
        'enhanced-tiny': dict(sizes['tiny'], stage_attns=('enhanced',), ffn='dwconv'),
        'softmax-tiny': sizes['tiny'],
        'softmax-small': sizes['small'],
        'softmax-base': sizes['base'],
    }

    def __init__(
        self,
        arch='inline-tiny',
        out_type: str = 'cls_token',
        out_indices: Union[int, Sequence[int]] = -1,
        out_norm: bool = True,
        **kwargs,
    ) -> None:
        super().__init__(arch, **kwargs)
        if out_type not in OUT_TYPES:
            raise ValueError(f'out_type={out_type!r}: expected one of {OUT_TYPES}')
        if len(self.depths) != 1:
            raise ValueError(f'arch: depths={self.depths} of {type(self).__name__}: expected one entry, the blocks')
        self.out_type = out_type
        depth, dim, side = self.depths[0], self.embed_dims[0], self.per_stage('grid')[0]
        indices = [out_indices] if type(out_indices) is int else check_type('out_indices', out_indices, (list, tuple))
        self.out_indices = self._check_outputs(
            [i + depth if type(i) is int and -depth <= i < 0 else i for i in indices], depth
        )
        self.num_blocks = self.out_indices[-1] + 1
        self.built_depths = (self.num_blocks,)
        self.patch_embeds = ModuleList([PatchEmbed(self.in_channels, dim, 16, 16)])
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.position_table = PositionTable(dim, (side, side), prefix=1) if self.arch['absolute_position'] else None
        self.blocks = ModuleList(
            self.build_block(spec, rate, (side, side))
            for spec, rate in list(zip(self.block_attns[0], self.drop_paths[0]))[: self.num_blocks]
        )
        self.out_norm = build_token_norm(self.out_norm_cfg, dim) if check_type('out_norm', out_norm, bool) else None
        self.finish_init()

    def build_block(self, spec: Any, drop_path: float, grid: tuple[int, int]) -> Block:
        dim, heads = self.embed_dims[0], self.arch['num_heads'][0]
        attn, ffn = Attention(dim, heads, spec, grid=grid, qkv_bias=self.arch['qkv_bias']), self.build_ffn(0, MLP)
        kind = TokenBlock if hasattr(ffn, 'dwconv') else Block
        if kind is TokenBlock and any(isinstance(layer, FactorisedLinear) for layer in ffn.children()):
            # TokenBlock passes class tokens apart, and their batch statistics differ
            raise ValueError("arch: ffn of type 'compact' has batch norms: not with a convolution here")
        return kind(dim, attn, ffn, norm_cfg=NORM, drop_path=drop_path)

    @property
    def feature_info(self) -> list[dict]:
        return [describe_output(i, self.embed_dims[0], 16, f'blocks.{i}') for i in self.out_indices]

    def features(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.patch_embeds[0](x.permute(0, 2, 3, 1).contiguous())
        grid = Grid(x.shape[1], x.shape[2], prefix=1)
        x = torch.cat((self.cls_token.to(x.dtype).expand(x.shape[0], -1, -1), x.flatten(1, 2)), dim=1)
        if self.position_table is not None:
            x = x + self.position_table(grid).to(x.dtype)
        outs, stage = [], StageContext(grid)
        for i, block in enumerate(self.blocks):
            x = recompute(block, x, stage) if self.with_cp else block(x, stage)
            if i in self.out_indices:
                outs.append(self.output(x if self.out_norm is None else self.out_norm(x), grid))
        return tuple(outs)

    def output(self, x: Tensor, grid: Grid) -> Tensor:
        if self.out_type == 'raw':
            return x
        if self.out_type == 'cls_token':
            return x[:, 0]
        return to_map(x, grid).contiguous() if self.out_type == 'featmap' else x[:, 1:].mean(dim=1)

    def parts(self) -> list[Part]:
        tables = [] if self.position_table is None else ['position_table']
        # groups of four blocks: their gradients are cast, and sent by DDP, while those of earlier blocks are computed
        return [
            Part('patch_embeds', 0, 0, 0),
            *(Part(name, 0, 0) for name in ('cls_token', *tables)),
            *(Part(f'blocks.{i}', i + 1, i + 1, 1 + i // 4, i < self.num_blocks) for i in range(self.depths[0])),
            Part('out_norm', None, self.depths[0] + 1, None, self.out_norm is not None),
        ]
