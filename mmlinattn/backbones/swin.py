# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from typing import Any, Union

from mmengine.registry import MODELS
from torch import nn

from ..attention import WindowAttention, get_mixer
from ..layers import MLP, Block, PatchEmbed, PatchMerging
from .arch import COUNT
from .base import PyramidBackbone

NORM = dict(type='LN', eps=1e-5)


@MODELS.register_module()
class LinearSwin(PyramidBackbone):
    """Swin Transformer with any attention (Liu et al. 2021; InLine Tab. 16-17, FLatten supplement).

    Linear attentions act in windows as large as the stage's map in training, without shift and relative bias. Quadratic
    attentions act in Swin's shifted windows with relative position bias. Maps are padded to whole windows, and padding
    is masked.

    Args:
        arch (str | dict): ``{inline,flatten,softmax}-{tiny,small,base,base-384}``, ``rala-{tiny,small}``,
            ``{hydra,efficient,angular,enhanced}-tiny``, or a dict with ``embed_dims``, ``depths``, ``num_heads`` and
            optionally ``mlp_ratios``, ``ffn``, ``window`` (of quadratic attentions), ``linear_windows`` (of linear
            ones), ``stage_attns``, ``drop_path_rate``.
        window_size (str | int | Sequence | None): ``'trained'`` takes the arch's windows. None makes linear attentions
            global, while quadratic ones keep their windows. An int is the window of all stages. A sequence has one of
            these entries for each stage.
        in_channels, out_indices, out_norm, frozen_stages, norm_eval, with_cp, drop_path_rate, stage_attns, deploy,
            init_cfg: See :class:`~mmlinattn.backbones.base.PyramidBackbone`.

    Raises:
        ValueError: For another ``window_size``, one below 1, or one above 90 of attentions with relative position bias.

    Examples:
        >>> import torch
        >>> from mmlinattn.backbones import LinearSwin
        >>> model = LinearSwin('inline-tiny', window_size=None).eval()
        >>> [tuple(out.shape) for out in model(torch.rand(1, 3, 64, 90))]
        [(1, 96, 16, 23), (1, 192, 8, 12), (1, 384, 4, 6), (1, 768, 2, 3)]
    """

    out_norm_cfg = NORM
    undecayed = ('relative_bias.table',)
    arch_rules = dict(PyramidBackbone.arch_rules, window=COUNT, linear_windows=COUNT)
    arch_defaults = dict(
        mlp_ratios=4,
        window=7,
        linear_windows=(56, 28, 14, 7),
        drop_path_rate=0.2,
    )
    sizes: dict[str, dict] = {
        'tiny': dict(embed_dims=(96, 192, 384, 768), depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24)),
        'small': dict(
            embed_dims=(96, 192, 384, 768), depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24), drop_path_rate=0.3
        ),
        'base': dict(
            embed_dims=(128, 256, 512, 1024), depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32), drop_path_rate=0.5
        ),
    }
    sizes['base-384'] = dict(sizes['base'], window=12, linear_windows=(96, 48, 24, 12))
    methods = {
        'flatten': dict(stage_attns=('focused', 'focused', 'softmax', 'softmax')),
        'softmax': {},
    }
    # RALA Tab. 8, FLatten Tab. 3: sizes and costs as printed allow a linear attention in stages 1-2 only
    compared: dict[str, dict] = {
        name: dict(stage_attns=(name, name, 'softmax', 'softmax')) for name in ('rala', 'hydra', 'efficient', 'angular')
    }
    compared['enhanced'] = dict(
        stage_attns=('enhanced', 'enhanced', 'softmax', 'softmax'), ffn=('dwconv', 'dwconv', None, None)
    )
    # InLine's stages as released, by size; InLine Tab. 17 prints stages 1-2 for all
    _inline_base = ('inline', 'inline', ['inline'] * 2 + ['softmax'] * 16, 'softmax')
    arch_zoo = {
        **PyramidBackbone.zoo(sizes, methods),
        **PyramidBackbone.zoo(dict(tiny=sizes['tiny']), compared),
        'rala-small': dict(sizes['small'], **compared['rala']),
        'inline-tiny': dict(sizes['tiny'], stage_attns=('inline', 'inline', 'inline', 'softmax')),
        'inline-small': dict(sizes['small'], stage_attns=('inline', 'inline', 'softmax', 'softmax')),
        'inline-base': dict(sizes['base'], stage_attns=_inline_base),
        'inline-base-384': dict(sizes['base-384'], stage_attns=_inline_base),
    }

    def __init__(
        self, arch='inline-tiny', *, window_size: Union[str, int, Sequence, None] = 'trained', **kwargs
    ) -> None:
        super().__init__(arch, **kwargs)
        self.window_sizes = self._window_sizes(window_size)
        self.build_stages()

    def build_embed(self, stage: int, in_dim: int, dim: int) -> nn.Module:
        return PatchEmbed(in_dim, dim, 4, 4, norm_cfg=NORM) if stage == 0 else PatchMerging(in_dim, dim, NORM)

    def build_block(self, stage: int, index: int, spec: Any, drop_path: float) -> nn.Module:
        dim, given = self.embed_dims[stage], self.window_sizes[stage]
        mixer = get_mixer(spec)[0]
        quadratic = mixer.quadratic
        window = self.arch['window'] if quadratic else self.per_stage('linear_windows')[stage]
        grid = window  # grid of stored position tables: the trained window, also in a global block
        if isinstance(given, int):
            window = grid = given
        elif given is None and not quadratic:
            window = None
        attn = WindowAttention(
            dim,
            self.arch['num_heads'][stage],
            spec,
            window=window and (window, window),
            shift=quadratic and mixer.bias and index % 2 == 1,
            relative_bias=True,
            grid=(grid, grid),
        )
        return Block(dim, attn, self.build_ffn(stage, MLP), norm_cfg=NORM, drop_path=drop_path)

    def _window_sizes(self, window_size) -> list:
        num = len(self.depths)
        sizes = list(window_size) if isinstance(window_size, (list, tuple)) else [window_size] * num
        valid = all(size in ('trained', None) or (type(size) is int and size >= 1) for size in sizes)
        if len(sizes) != num or not valid:
            raise ValueError(
                f"window_size={window_size!r}: expected 'trained', None, an int >= 1, or a sequence of {num} of these"
            )
        return sizes
