# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule, ModuleList
from mmengine.registry import MODELS
from torch import Tensor, nn

from ..attention import Attention, GlobalAttention, Grid, get_mixer
from ..layers import MLP, apply_linear, build_ffn, conv_norms
from ..ops.sizes import is_known
from ..ops.tensors import to_image
from .base import PyramidBackbone, check_count, check_type, numbered

SHARE = 0.75  # of a transformer block's channels, and of its stochastic depth, that belong to the attention
REDUCTIONS = ('grid', 'sequence')


def norm_map(norm: nn.Module, x: Tensor) -> Tensor:
    """A batch norm of a (B, H, W, C) map."""
    return norm(to_image(x)).permute(0, 2, 3, 1)


class ConvNorm(BaseModule):
    """Convolution without bias, batch norm and, with ``relu``, ReLU: (B, H, W, C) -> (B, ceil(H / s), ceil(W / s), C').

    Args:
        in_dim, dim (int): Channels C and C'.
        norm_cfg (dict): The norm.
        kernel_size (int): Odd.
        stride, groups (int): Of the convolution.
        relu (bool): Apply ReLU.
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        norm_cfg: dict,
        kernel_size: int = 1,
        stride: int = 1,
        groups: int = 1,
        relu: bool = False,
        init_cfg=None,
    ) -> None:
        super().__init__(init_cfg)
        self.conv = nn.Conv2d(in_dim, dim, kernel_size, stride, kernel_size // 2, groups=groups, bias=False)
        self.norm = build_norm_layer(norm_cfg, dim)[1]
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        x = conv_norms(to_image(x), [(self.conv, self.norm)]).permute(0, 2, 3, 1)
        return F.relu(x) if self.relu else x


def mean_pool(x: Tensor, size: int) -> Tensor:
    """Means of patches of ``size`` x ``size`` pixels, at odd borders of the pixels that are there: (B, H, W, C) ->
    (B, C, ceil(H / size), ceil(W / size))."""
    image = to_image(x)
    if is_known(*x.shape[1:3]):
        return F.avg_pool2d(image, size, ceil_mode=True, count_include_pad=False)
    # whether the last patch is a whole one, a graph that leaves the size open cannot ask
    beyond = [0, size - 1, 0, size - 1]
    shares = conv_mean(F.pad(torch.ones_like(image[:1, :1]), beyond), (size, size))
    return conv_mean(F.pad(image, beyond), (size, size)) / shares


def conv_mean(image: Tensor, size: tuple[int, int]) -> Tensor:
    """``F.avg_pool2d(image, size)`` by a convolution: of the pool, ``torch.export`` asks whether the size divides the
    map."""
    weight = image.new_full((image.shape[1], 1, *size), 1 / (size[0] * size[1]))
    return F.conv2d(image, weight, stride=size, groups=image.shape[1])


class PooledEmbed(ConvNorm):
    """2x2 average pooling, then a :class:`ConvNorm` of 1x1: (B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), C').

    At odd borders the pixels that are there are averaged.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(mean_pool(x, 2).permute(0, 2, 3, 1))


class Stem(nn.Sequential):
    """Four 3x3 :class:`ConvNorm` with ReLU, strides 2 1 1 2: (B, H, W, C) -> (B, ceil(H / 4), ceil(W / 4), C').

    Args:
        in_channels (int): Channels C of the image.
        dims (Sequence[int]): Widths of the first three; the last one has the third's.
        norm_cfg (dict): The norms.
    """

    def __init__(self, in_channels: int, dims: Sequence[int], norm_cfg: dict) -> None:
        widths = (in_channels, *dims, dims[-1])
        super().__init__(
            *(
                ConvNorm(widths[i], widths[i + 1], norm_cfg, 3, stride, relu=True)
                for i, stride in enumerate((2, 1, 1, 2))
            )
        )


class ConvAttention(BaseModule):
    """Multi-head convolutional attention (Next-ViT Eq. 2): 3x3 convolution in groups, batch norm, ReLU, linear.

    Args:
        dim (int): Width C, a multiple of ``group_dim``.
        group_dim (int): Channels of a group, the "head" of the convolution.
        norm_cfg (dict): The norm.
    """

    def __init__(self, dim: int, group_dim: int, norm_cfg: dict, init_cfg=None) -> None:
        super().__init__(init_cfg)
        self.conv = ConvNorm(dim, dim, norm_cfg, 3, groups=dim // group_dim, relu=True)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return apply_linear(self.proj, self.conv(x))


class ReLUMLP(MLP):
    """Feed-forward network with ReLU. Arguments as :class:`~mmlinattn.layers.MLP`."""

    def hidden(self, x: Tensor) -> Tensor:
        return F.relu(apply_linear(self.fc1, x))


class AveragedKeysAttention(Attention):
    """Global attention whose keys and values are those of averaged tokens, after a batch norm (Next-ViT Eq. 5).

    Args:
        dim, num_heads, mixer, kwargs: See :class:`~mmlinattn.attention.Attention`.
        ratio (int): Reduction r of height and width.
        reduction (str): ``'grid'`` averages patches of r x r tokens, those at the border over the tokens they have.
            ``'sequence'`` is what the released code does: it averages r^2 tokens that follow each other in the
            flattened map, which mixes rows and leaves the keys without a grid, and drops the tokens that are left over;
            a map has to have r^2 tokens.
        norm_cfg (dict): Norm of the averages.
    """

    def __init__(self, dim: int, num_heads: int, mixer, ratio: int, reduction: str, norm_cfg: dict, **kwargs) -> None:
        super().__init__(dim, num_heads, mixer, **kwargs)
        self.ratio = ratio
        self.reduction = reduction
        self.norm = build_norm_layer(norm_cfg, dim)[1]

    def reduce(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, C, h, w); of sequences, h is 1."""
        if self.reduction == 'grid':
            return mean_pool(x, self.ratio)
        sequence = to_image(x.flatten(1, 2)[:, None])
        mean = F.avg_pool2d if is_known(*x.shape[1:3]) else conv_mean
        return mean(sequence, (1, self.ratio**2))

    def forward(self, x: Tensor, **shared) -> Tensor:  # type: ignore[override]
        grid = Grid(*x.shape[1:3])
        reduced = self.norm(self.reduce(x)).permute(0, 2, 3, 1)
        key_grid = Grid(*reduced.shape[1:3])
        out = super().forward(x.flatten(1, 2), grid, kv=reduced.flatten(1, 2), key_grid=key_grid, **shared)
        return out.unflatten(1, grid[:2])


class ConvBlock(BaseModule):
    """Next convolution block: ``x + ConvAttention(x)``, then ``x + FFN(BN(x))``.

    Args:
        in_dim (int): Width of the map that enters.
        dim (int): Width C; a 1x1 convolution leads to it where it differs.
        group_dim (int): See :class:`ConvAttention`.
        ffn (nn.Module): Takes and gives maps of width C.
        norm_cfg (dict): All norms.
        drop_path (float): Rate of stochastic depth.
    """

    def __init__(
        self, in_dim: int, dim: int, group_dim: int, ffn: nn.Module, norm_cfg: dict, drop_path: float, init_cfg=None
    ) -> None:
        super().__init__(init_cfg)
        self.embed = ConvNorm(in_dim, dim, norm_cfg) if in_dim != dim else None
        self.conv = ConvAttention(dim, group_dim, norm_cfg)
        self.norm = build_norm_layer(norm_cfg, dim)[1]
        self.ffn = ffn
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, **shared) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        x = x + self.drop_path(self.conv(x))
        return x + self.drop_path(self.ffn(norm_map(self.norm, x)))


class TransformerBlock(BaseModule):
    """Next transformer block (Next-ViT Eq. 6): attention on three quarters of the channels, a convolution on the rest.

    ``x + Attention(BN(x))``; of that, a 1x1 convolution ``y``, and ``y + ConvAttention(y)``; of both side by side
    ``z + FFN(BN(z))``.

    Args:
        in_dim (int): Width of the map that enters.
        attn (nn.Module): Attention on maps of width ``attn_dim``.
        attn_dim (int): Its width; a 1x1 convolution leads to it where it differs from ``in_dim``.
        dim (int): Width of the result, above ``attn_dim``.
        group_dim, ffn, norm_cfg, drop_path: See :class:`ConvBlock`.
    """

    def __init__(
        self,
        in_dim: int,
        attn: nn.Module,
        attn_dim: int,
        dim: int,
        group_dim: int,
        ffn: nn.Module,
        norm_cfg: dict,
        drop_path: float,
        init_cfg=None,
    ) -> None:
        super().__init__(init_cfg)
        self.embed = ConvNorm(in_dim, attn_dim, norm_cfg) if in_dim != attn_dim else None
        self.norm1 = build_norm_layer(norm_cfg, attn_dim)[1]
        self.attn = attn
        self.narrow = ConvNorm(attn_dim, dim - attn_dim, norm_cfg)
        self.conv = ConvAttention(dim - attn_dim, group_dim, norm_cfg)
        self.norm2 = build_norm_layer(norm_cfg, dim)[1]
        self.ffn = ffn
        self.attn_drop_path = DropPath(drop_path * SHARE)
        self.conv_drop_path = DropPath(drop_path * (1 - SHARE))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, **shared) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        x = x + self.attn_drop_path(self.attn(norm_map(self.norm1, x), **shared))
        y = self.narrow(x)
        y = y + self.conv_drop_path(self.conv(y))
        x = torch.cat((x, y), dim=-1)
        return x + self.drop_path(self.ffn(norm_map(self.norm2, x)))


@MODELS.register_module()
class LinearNextViT(PyramidBackbone):
    """Next-ViT with any attention (Li et al. 2022; hMHSA/cFFN Tab. 1): convolution blocks, and transformer blocks that
    mix an attention with a convolution.

    Every stage but the first ends in a transformer block; the long third one has one in five. Linear attentions see the
    whole map, quadratic ones keys averaged over the stage's ``sr_ratios``.

    Args:
        arch (str | dict): ``hmhsa-small``, ``softmax-{small,base,large}``, or a dict with ``embed_dims`` (width of a
            stage's result), ``depths``, ``num_heads`` (of the attentions, on three quarters of the width) and
            optionally ``attn_every`` (every n-th block and the last one have an attention; 0 for none), ``mlp_ratios``
            (of convolution blocks), ``attn_mlp_ratios`` (of transformer blocks), ``sr_ratios``, ``key_reduction``,
            ``group_dim`` (channels of a group of the convolutions), ``stem_dims`` (widths of the first three
            convolutions), ``grids`` (trained sizes of the maps), ``ffn``, ``stage_attns``, ``drop_path_rate``.
        stage_attns (Sequence, optional): As in :class:`~mmlinattn.backbones.base.Backbone`; entries of convolution
            blocks (None, or any) have no effect.
        key_reduction (str, optional): How quadratic attentions average keys: ``'grid'`` or ``'sequence'``, see
            :class:`AveragedKeysAttention`. None takes the arch's: the release's ``'sequence'`` for ``softmax-*``, else
            ``'grid'``, and ``'grid'`` where an attention looks at the neighbours of keys (``'hallucinated'``).
        stage_norms (bool, optional): Whether each stage ends in a batch norm that feeds the next one too, as in the
            released segmentation backbones. None: where several outputs are normalised. Without it, norms act on the
            outputs alone: the classifier has one, on the last stage.
        norm_cfg (dict, optional): All norms, batch norms with eps 1e-5 by default.
        in_channels, out_indices, out_norm, frozen_stages, norm_eval, with_cp, drop_path_rate, deploy, init_cfg:
            See :class:`~mmlinattn.backbones.base.PyramidBackbone`; the output norms are batch norms.

    Raises:
        ValueError: For a ``key_reduction`` that is unknown or leaves an attention without the grid it needs, widths
            that groups do not divide, an ``attn_every`` below 0.

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
    arch_counts = ('sr_ratios', 'grids')
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
        stage_attns=('softmax',) * 4,
    )
    sizes: dict[str, dict] = {
        'small': dict(depths=(3, 4, 10, 3)),
        'base': dict(depths=(3, 4, 20, 3), drop_path_rate=0.2),
        'large': dict(depths=(3, 4, 30, 3), drop_path_rate=0.2),
    }
    # heads of 32 channels: those of attentions are of three quarters of the width
    _widths: dict = dict(embed_dims=(96, 256, 512, 1024), num_heads=(3, 6, 12, 24))
    arch_zoo = {
        'hmhsa-small': dict(_widths, **sizes['small'], stage_attns=('hallucinated',) * 4, ffn=dict(type='compact')),
        **PyramidBackbone.zoo(sizes, {'softmax': dict(key_reduction='sequence')}, **_widths),
    }

    def __init__(
        self,
        arch='softmax-small',
        *,
        key_reduction: Optional[str] = None,
        stage_norms: Optional[bool] = None,
        norm_cfg: Optional[dict] = None,
        **kwargs,
    ) -> None:
        super().__init__(arch, **kwargs)
        norm_cfg = {'eps': 1e-5, **(norm_cfg or dict(type='BN'))}
        self.out_norm_cfg = norm_cfg
        if stage_norms is None:
            stage_norms = self.out_norm and len(self.out_indices) > 1
        self.norms_feed_on = check_type('stage_norms', stage_norms, bool)
        self.key_reduction = key_reduction
        for reduction in (self.arch['key_reduction'], *([] if key_reduction is None else [key_reduction])):
            if reduction not in REDUCTIONS:
                raise ValueError(f'key_reduction={reduction!r} has to be one of {REDUCTIONS}')
        keys = ('mlp_ratios', 'attn_mlp_ratios', 'sr_ratios', 'grids')
        ratios, attn_ratios, sr_ratios, grids = (self.per_stage(key) for key in keys)
        group_dim = self.arch['group_dim']
        width = self.arch['stem_dims'][-1]
        for i in range(self.num_stages):
            dim, attn_dim, heads = self.embed_dims[i], self.attn_dims[i], self.arch['num_heads'][i]
            if i == 0:
                stem = Stem(self.in_channels, self.arch['stem_dims'], norm_cfg)
                self.patch_embeds.append(nn.Sequential(stem, ConvNorm(width, attn_dim, norm_cfg)))
            else:
                self.patch_embeds.append(PooledEmbed(width, attn_dim, norm_cfg))
            blocks, width = ModuleList(), attn_dim
            for spec, rate in zip(self.block_attns[i], self.drop_paths[i]):
                if spec is None:
                    ffn = self.build_ffn(i, ReLUMLP, attn_dim, int(attn_dim * ratios[i]))
                    blocks.append(ConvBlock(width, attn_dim, group_dim, ffn, norm_cfg, rate))
                    width = attn_dim
                else:
                    attn = self._attention(i, spec, attn_dim, heads, sr_ratios[i], (grids[i], grids[i]), norm_cfg)
                    ffn = self.build_ffn(i, ReLUMLP, dim, int(dim * attn_ratios[i]))
                    blocks.append(TransformerBlock(width, attn, attn_dim, dim, group_dim, ffn, norm_cfg, rate))
                    width = dim
            self.stages.append(blocks)
        self.finish_init()
        norm: Any
        for norm in self.out_norms.values():
            if getattr(norm, 'running_var', None) is not None:
                # the identity, to the last digit: a classifier's file, which lacks them, gives its own features
                norm.running_var.fill_(1 - norm.eps)

    def _attention(self, stage, spec, dim, heads, ratio, grid, norm_cfg):
        mixer = get_mixer(spec)[0]
        if not (mixer.quadratic and ratio > 1):
            return GlobalAttention(dim, heads, spec, grid=grid)
        reduction = self.key_reduction
        if mixer.local_keys and reduction == 'sequence':
            raise ValueError(
                f"key_reduction='sequence' leaves the keys without a grid, which the attention {spec!r} of stage "
                f"{stage} needs; allowed is 'grid'"
            )
        if reduction is None:
            reduction = 'grid' if mixer.local_keys else self.arch['key_reduction']
        return AveragedKeysAttention(dim, heads, spec, ratio, reduction, norm_cfg, grid=grid)

    def build_ffn(self, stage: int, default: type, dim: int, hidden_dim: int):
        """As in the base class; the branches of compact FFNs have the host's kind of batch norm."""
        spec, norm_cfg = self.per_stage('ffn')[stage], dict(self.out_norm_cfg)
        if isinstance(spec, dict) and spec.get('type') == 'compact':
            norm_cfg['type'] = 'BN1d' if norm_cfg['type'] == 'BN' else norm_cfg['type']
            spec = dict(norm_cfg=norm_cfg, **spec) if 'norm_cfg' not in spec else spec
        return build_ffn(spec, default, dim, hidden_dim)

    @property
    def attn_blocks(self) -> list[list[bool]]:
        every = self.per_stage('attn_every')
        return [
            [n > 0 and ((j + 1) % n == 0 or j + 1 == depth) for j in range(depth)]
            for n, depth in zip(every, self.depths)
        ]

    @property
    def attn_dims(self) -> tuple[int, ...]:
        """Also the widths of the convolution blocks: three quarters, in whole groups, where there are attentions."""
        group = self.arch['group_dim']
        return tuple(
            int(SHARE * dim / group + 0.5) * group if any(blocks) else dim
            for dim, blocks in zip(self.embed_dims, self.attn_blocks)
        )

    def _check_sizes(self) -> None:
        super()._check_sizes()
        check_count('arch: group_dim', self.arch['group_dim'])
        for key, least in dict(attn_every=0, stem_dims=1).items():
            values = self.arch[key] if isinstance(self.arch[key], (list, tuple)) else [self.arch[key]]
            if not all(type(value) is int and value >= least for value in values):
                raise ValueError(f'arch: {key}={self.arch[key]} has to consist of ints >= {least}')
        if isinstance(self.arch['stem_dims'], int) or len(self.arch['stem_dims']) != 3:
            raise ValueError(f'arch: stem_dims={self.arch["stem_dims"]} has to have three entries')
        group = self.arch['group_dim']
        for dim, attn_dim, blocks in zip(self.embed_dims, self.attn_dims, self.attn_blocks):
            if dim % group or (any(blocks) and not 0 < attn_dim < dim):
                raise ValueError(
                    f'arch: embed_dims={self.embed_dims} have to be multiples of group_dim={group}, and at least three '
                    'times that where a stage has attentions'
                )

    def norm_output(self, stage: int, x: Tensor) -> Tensor:
        return norm_map(self.out_norms[str(stage)], x)

    def ignorable_keys(self, key: str) -> bool:
        part, number = numbered(key)
        if part == 'out_norms' and number is not None and number < self.num_stages - 1:
            return False  # it would feed the next stage: another network
        return super().ignorable_keys(key)
