# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Base classes of backbones: OpenMMLab arguments, checks, stage bookkeeping, freezing, checkpoints."""

from bisect import bisect_left
from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any, Callable, NamedTuple, Optional, Union

import numpy as np
import torch
from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule, ModuleList
from torch import Tensor, nn

from ..attention import StageContext
from ..checkpoints.loading import load_pretrained
from ..forward_pass import forget_weights, prepare, recompute
from ..layers import FactorisedLinear, MapLayerNorm, build_ffn, is_batch_norm
from ..ops.tokens import clone_if_dynamic, to_image
from ..utils.building import is_pretrained
from .arch import COUNT, Arch, Spec, check_type, is_number


def describe_output(stage: int, channels: int, stride: int, module: str) -> dict:
    """Return an entry of ``feature_info``: this package's keys and timm's (``num_chs``, ``reduction``, ``module``)."""
    return dict(stage=stage, channels=channels, stride=stride, num_chs=channels, reduction=stride, module=module)


class Part(NamedTuple):
    """A module or parameter of a backbone.

    Attributes:
        name (str): Its name in the backbone.
        depth (int, optional): Number, from 1, of the block or of the last block before the part (0: none), for
            layer-wise learning rates; None stands for the largest depth.
        frozen_from (int): The smallest ``frozen_stages`` that freezes it.
        cast_group (int, optional): Number of the group whose weights autocast casts together; None is no group.
        is_built (bool): False if the arguments leave it out. Keys of a checkpoint for it are skipped.
    """

    name: str
    depth: Optional[int]
    frozen_from: int
    cast_group: Optional[int] = None
    is_built: bool = True


class Backbone(Arch, BaseModule):
    """Base class of all backbones.

    Subclasses fill :attr:`arch_zoo` (published sizes) and :attr:`arch_defaults` (shared by all sizes). Every arch may
    name a feed-forward network under ``ffn``, one for all stages or one for each, see
    :func:`~mmlinattn.layers.build_ffn`.

    Args:
        arch (str | dict): A name of :attr:`arch_zoo`, or a dict with ``embed_dims``, ``depths``, ``num_heads`` (one
            entry per stage) and keys of :attr:`arch_defaults`.
        in_channels (int): Channels of the input image.
        frozen_stages (int): -1 freezes nothing, 0 the stem, i the stem and stages 1 to i.
        norm_eval (bool): Keep batch norms in eval mode in training, so that running statistics do not change.
        with_cp (bool): Recompute blocks in the backward pass to save memory.
        drop_path_rate (float, optional): Largest stochastic depth rate, linear over depth; None takes the arch's.
        stage_attns (Sequence, optional): One attention per stage: a registered name, ``dict(type=name, **options)``,
            or a list of these with one entry per block. None takes the arch's.
        deploy (bool): Build the model as :meth:`switch_to_deploy` leaves it, to load a merged checkpoint.
        init_cfg (dict, optional): MMEngine's initialisation. ``dict(type='Pretrained', checkpoint=...)`` takes released
            files, own checkpoints and ``mmlinattn://NAME``.

    Raises:
        ValueError: For an unknown ``arch`` or attention, or a wrong number of ``stage_attns``. Also for
            depths, widths, windows, grids, stripes or reductions below 1, and ratios not above 0. Also for a number of
            heads that does not divide the width, a ``drop_path_rate`` outside of [0, 1), and arguments of other types.
    """

    out_norm_cfg = dict(type='LN', eps=1e-6)
    undecayed: tuple[str, ...] = ()  # ends of the names of weights without weight decay, besides norms and biases
    init_cfg: Any
    built_depths: tuple[int, ...]  # number of blocks of each stage that is built
    default_init_cfg = [
        dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
        dict(type='Constant', layer=['LayerNorm', '_BatchNorm'], val=1.0, bias=0.0),
    ]

    def __init__(
        self,
        arch: Spec,
        in_channels: int = 3,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        drop_path_rate: Optional[float] = None,
        stage_attns: Optional[Sequence] = None,
        deploy: bool = False,
        init_cfg=None,
    ) -> None:
        super().__init__(init_cfg or deepcopy(self.default_init_cfg))
        self.arch = self.resolve_arch(arch)
        if not COUNT.allows(in_channels):
            raise ValueError(f'in_channels={in_channels!r}: expected an int >= 1')
        self.in_channels = in_channels
        self.frozen_stages = check_type('frozen_stages', frozen_stages, int)
        self.norm_eval = check_type('norm_eval', norm_eval, bool)
        self.with_cp = check_type('with_cp', with_cp, bool)
        self.deploy = check_type('deploy', deploy, bool)
        self.depths: tuple[int, ...] = tuple(self.arch['depths'])
        self.embed_dims: tuple[int, ...] = tuple(self.arch['embed_dims'])
        self._check_sizes()
        self.block_attns = self._block_attns(self.arch['stage_attns'] if stage_attns is None else stage_attns)
        for dim, heads in zip(self.attn_dims, self.arch['num_heads']):
            if type(heads) is not int or heads < 1 or dim % heads:
                raise ValueError(f'num_heads={heads}: expected a divisor of the width {dim} (arch {self.arch})')
        rate = self.arch['drop_path_rate'] if drop_path_rate is None else drop_path_rate
        if not is_number(rate) or not 0 <= rate < 1:
            raise ValueError(f'drop_path_rate={rate!r}: expected a number in [0, 1)')
        rates = iter(np.linspace(0, rate, sum(self.depths)).tolist())
        self.drop_paths: list[list[float]] = [list(islice(rates, depth)) for depth in self.depths]

    def build_ffn(self, stage: int, default: type):
        """Build the feed-forward network of a block: the one that the arch names under ``ffn``, or ``default``."""
        dim, ratio = self.embed_dims[stage], self.per_stage('mlp_ratios')[stage]
        hidden = int(dim * ratio)
        if hidden < 1:
            raise ValueError(f'arch: mlp_ratios={ratio} of the width {dim} is no hidden channel')
        return build_ffn(self.per_stage('ffn')[stage], default, dim, hidden)

    def check_input(self, x: Tensor) -> None:
        if x.dim() != 4 or x.shape[1] != self.in_channels or x.shape[2] < 32 or x.shape[3] < 32:
            raise ValueError(
                f'x has the shape {tuple(x.shape)}; allowed is (B, {self.in_channels}, H, W) with H >= 32 and W >= 32'
            )

    def __prepare_scriptable__(self):
        """Raise for ``torch.jit.script``, which calls this method before it compiles anything.

        Raises:
            NotImplementedError: Always. Without this method, the message would depend on the backbone.
        """
        raise NotImplementedError(
            f'torch.jit.script does not take {type(self).__name__}; torch.jit.trace and torch.export do, and their '
            'graphs serve every size (docs/deploy.md)'
        )

    def parts(self) -> list[Part]:
        """Return the parts of the backbone (:class:`Part`) in the order of the forward pass.

        Parts that the arguments leave out, such as stages after the last of ``out_indices``, have ``is_built=False``.
        """
        raise NotImplementedError

    def part_of(self, key: str) -> Optional[Part]:
        """Return the :class:`Part` (module or parameter) that holds the state dict key ``key``, or None."""
        return next((part for part in self.parts() if f'{key}.'.startswith(f'{part.name}.')), None)

    def cast_groups(self) -> list[list[nn.Module]]:
        """Return groups of modules whose weights are cast to autocast's dtype in one operation."""
        groups: dict[int, list[nn.Module]] = {}
        for part in self.parts():
            if part.is_built and part.cast_group is not None:
                groups.setdefault(part.cast_group, []).append(self.get_submodule(part.name))
        return list(groups.values())

    def ignorable_keys(self, key: str) -> bool:
        """Return True for a checkpoint's key that this model leaves out by its arguments: stages or blocks after the
        last output, and norms of feature maps that are not returned."""
        part = self.part_of(key)
        return part is not None and not part.is_built

    def freeze(self) -> None:
        """Freeze the parts of ``frozen_stages``: eval mode, no gradients."""
        for part in self.parts() if self.frozen_stages >= 0 else ():
            if part.is_built and part.frozen_from <= self.frozen_stages:
                frozen = attrgetter(part.name)(self)
                frozen.requires_grad_(False)
                if isinstance(frozen, nn.Module):
                    frozen.eval()

    @torch.no_grad()
    def switch_to_deploy(self) -> 'Backbone':
        """Merge the parallel branches of compact FFNs into single linear layers for inference, in place.

        Returns:
            Backbone: The model itself, in eval mode. Its ``state_dict`` loads into a model built with ``deploy=True``.

        Raises:
            ValueError: For a branch that cannot be merged, before anything is changed.
        """
        # merge all layers before the first is replaced, so that an error leaves the model as it was
        merged = [(module, module.merged()) for module in self.modules() if isinstance(module, FactorisedLinear)]
        for module, factors in merged:
            module.down, module.up = factors
        return self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, context = prepare(self, x)
        with context:
            return self.features(x)

    def features(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for images ``x``."""
        raise NotImplementedError

    def forward_intermediates(
        self,
        x: Tensor,
        indices: Union[int, Sequence[int], None] = None,
        norm: Optional[bool] = None,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> Union[list[Tensor], tuple[Tensor, list[Tensor]]]:
        """Return feature maps by timm's interface.

        Args:
            x (Tensor): (B, in_channels, H, W).
            indices (int | Sequence[int], optional): Entries of ``feature_info``; an int n selects the last n, None
                all. Negative entries count from the end.
            norm (bool, optional): Has to equal the model's ``out_norm``; None accepts either.
            stop_early (bool): Ignored: the model has no stages after the last output.
            output_fmt (str): ``'NCHW'``.
            intermediates_only (bool): Return the selected feature maps without the last output.

        Returns:
            list[Tensor] | tuple[Tensor, list[Tensor]]: Selected maps (B, C_i, H_i, W_i) in ascending order, with the
            model's last output before them.

        Raises:
            ValueError: For an index out of range, another layout, a ``norm`` other than the model's, or an ``out_type``
                other than ``'featmap'``.
        """
        info: Any = self.feature_info
        count = len(info)
        given = count if indices is None else indices
        entries = list(range(-given, 0)) if type(given) is int else list(given)  # type: ignore[arg-type]
        if not entries or not all(type(i) is int and -count <= i < count for i in entries):
            raise ValueError(f'indices={indices!r}: expected 1 to {count}, or entries in [-{count}, {count})')
        if output_fmt != 'NCHW':
            raise ValueError(f"output_fmt={output_fmt!r}: expected 'NCHW'")
        if norm is not None and norm != bool(self.out_norm):
            raise ValueError(f'norm={norm!r}: expected {bool(self.out_norm)}. Build the model with out_norm={norm!r}')
        if getattr(self, 'out_type', 'featmap') != 'featmap':
            raise ValueError(f"out_type={self.out_type!r}: expected 'featmap' for forward_intermediates")
        outs = self(x)
        maps = [outs[i] for i in sorted({i % count for i in entries})]
        return maps if intermediates_only else (outs[-1], maps)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Set ``with_cp``, under the name that timm uses."""
        self.with_cp = enable

    def no_weight_decay(self) -> set[str]:
        """Return the names of tables and tokens that the release exempts from weight decay, besides norms and biases.

        timm and :class:`~mmlinattn.engine.optimizers.MergedOptimWrapperConstructor` read this method.
        """
        return {name for name, _ in self.named_parameters() if name.endswith(self.undecayed)}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Return the function from a parameter's name to its layer number, for timm's layer-wise learning rate decay.

        Args:
            coarse (bool): Number stages instead of blocks.
        """
        ends = list(accumulate(self.built_depths, initial=0))

        def layer_of(name: str) -> int:
            depth = self.get_layer_depth(name)[0]
            return bisect_left(ends, depth) if coarse else depth

        return layer_of

    def train(self, mode: bool = True):
        super().train(mode)
        forget_weights(self)  # layers may have been replaced or compiled since
        self.freeze()
        if mode and self.norm_eval:
            for module in self.modules():
                if is_batch_norm(module):
                    module.eval()
        return self

    def init_weights(self) -> None:
        configs = self.init_cfg if isinstance(self.init_cfg, (list, tuple)) else [self.init_cfg]
        pretrained = [cfg for cfg in configs if is_pretrained(cfg)]
        if self.is_init or not pretrained:
            super().init_weights()
            return
        # MMEngine's Pretrained initialiser cannot load released files. Weights that the checkpoint lacks start as in
        # training from scratch.
        others = [cfg for cfg in configs if not is_pretrained(cfg)]
        given, self.init_cfg = self.init_cfg, deepcopy(others or self.default_init_cfg)
        super().init_weights()
        self.init_cfg = given
        for cfg in pretrained:
            options = {key: value for key, value in cfg.items() if key != 'type'}
            unknown = sorted(options.keys() - {'checkpoint', 'prefix', 'map_location'})
            if unknown:
                raise ValueError(f'init_cfg={dict(cfg)} has {unknown}; allowed are checkpoint, prefix, map_location')
            load_pretrained(self, **{'checkpoint': None, **options})

    def finish_init(self) -> None:
        """Apply ``frozen_stages`` and ``deploy``; subclasses call it at the end of ``__init__``."""
        self.freeze()
        if self.deploy:
            self.switch_to_deploy()

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Return the depth of a parameter between image and head, for layer-wise learning rate decay.

        The stem has depth 0, block i (counted over all stages from 0) depth i + 1. Down-sampling and norms between
        stages have the depth of the last block before them, as in MMPretrain's Swin. Output norms and parameters
        outside of the backbone have the largest depth.

        Args:
            param_name (str): Name of the parameter.
            prefix (str): Prefix of this backbone's parameters, e.g. ``'backbone.'``.

        Returns:
            tuple[int, int]: The depth, and the number of depths: blocks + 2.

        Raises:
            ValueError: The backbone has no such part.
        """
        num_layers = sum(self.built_depths) + 2
        if not param_name.startswith(prefix):
            return num_layers - 1, num_layers
        part = self.part_of(param_name[len(prefix) :])
        if part is None:
            raise ValueError(f'param_name={param_name!r} is no parameter of a stage of {type(self).__name__}')
        return (num_layers - 1 if part.depth is None else part.depth), num_layers


def build_output_norm(norm_cfg: dict, dim: int) -> nn.Module:
    """Build a norm of (B, C, H, W) feature maps; ``'LN'`` gives a LayerNorm over the channels."""
    options = dict(norm_cfg)
    return MapLayerNorm(dim, **options) if options.pop('type') == 'LN' else build_norm_layer(norm_cfg, dim)[1]


class PyramidBackbone(Backbone):
    """Base class of backbones with feature maps of strides 4, 8, 16, ..., one for each stage.

    A subclass defines the input layer of a stage (:meth:`build_embed`) and its blocks (:meth:`build_block`). Its
    ``__init__`` ends with :meth:`build_stages`. A subclass that fills ``self.patch_embeds`` and ``self.stages`` itself
    calls :meth:`finish_init` instead.

    Args:
        arch, in_channels, frozen_stages, norm_eval, with_cp, drop_path_rate, stage_attns, deploy, init_cfg: See
            :class:`Backbone`.
        out_indices (Sequence[int]): Stages to return, ascending. Stages after the last one are not built.
        out_norm (bool): Apply a LayerNorm to each output; False returns raw stage outputs.

    Raises:
        ValueError: As :class:`Backbone`, and for ``out_indices`` or ``frozen_stages`` out of range.

    Attributes:
        feature_info (list[dict]): ``stage``, ``channels`` and ``stride`` of each output, and timm's keys.

    Shape: (B, in_channels, H, W) with H, W >= 32 -> tuple of (B, C_i, ceil(H / 4 / 2^i), ceil(W / 4 / 2^i)).
    """

    num_extra_tokens = 0  # number of class tokens, an attribute of MMPretrain's ViT that tools read
    norms_feed_on = False  # True if the norm at the end of a stage also feeds the next stage
    stage_inputs: tuple[str, ...] = ('patch_embeds',)  # module lists of layers before the blocks, one entry per stage

    def __init__(
        self, arch: Spec, *, out_indices: Sequence[int] = (0, 1, 2, 3), out_norm: bool = True, **kwargs
    ) -> None:
        super().__init__(arch, **kwargs)
        self.out_indices = self._check_outputs(out_indices, len(self.depths))
        self.num_stages = self.out_indices[-1] + 1
        self.built_depths = self.depths[: self.num_stages]
        self.out_norm = check_type('out_norm', out_norm, bool)
        self.patch_embeds = ModuleList()
        self.stages = ModuleList()

    def build_embed(self, stage: int, in_dim: int, dim: int) -> nn.Module:
        """Build the input layer of a stage: image or feature map (B, H, W, in_dim) -> (B, h, w, dim), coarser."""
        raise NotImplementedError

    def build_block(self, stage: int, index: int, spec: Any, drop_path: float) -> nn.Module:
        """Build block ``index`` of a stage, with the attention ``spec``."""
        raise NotImplementedError

    def build_stages(self) -> None:
        """Build the stages up to the last output; subclasses call it at the end of ``__init__``."""
        widths = (self.in_channels, *self.embed_dims)
        for i in range(self.num_stages):
            self.patch_embeds.append(self.build_embed(i, *widths[i : i + 2]))
            blocks = enumerate(zip(self.block_attns[i], self.drop_paths[i]))
            self.stages.append(ModuleList(self.build_block(i, j, spec, rate) for j, (spec, rate) in blocks))
        self.finish_init()

    def finish_init(self) -> None:
        normed = set(self.out_indices) if self.out_norm else set()
        if self.norms_feed_on:
            normed |= set(range(self.num_stages - 1))
        self.out_norms = nn.ModuleDict(
            {str(i): build_output_norm(self.out_norm_cfg, self.embed_dims[i]) for i in sorted(normed)}
        )
        super().finish_init()

    @property
    def feature_info(self) -> list[dict]:
        modules = {i: f'stages.{i}.{self.depths[i] - 1}' for i in self.out_indices}
        if self.out_norm:
            modules.update({int(i): f'out_norms.{i}' for i in self.out_norms})
        return [describe_output(i, self.embed_dims[i], 4 * 2**i, modules[i]) for i in self.out_indices]

    def embed(self, stage: int, x: Tensor) -> Tensor:
        """Return the map that enters the blocks of a stage, from the output ``x`` of the stage before or the image."""
        return self.patch_embeds[stage](x)

    def stage_context(self, stage: int, x: Tensor) -> StageContext:
        """Return the context of a stage for the feature map (B, H, W, C) at the input of its blocks.

        It holds the size and the windows of the feature map. Subclasses may add a rotary position encoding.
        """
        return StageContext.of(x)

    def features(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.permute(0, 2, 3, 1).contiguous()
        outs, norms = [], dict(self.out_norms.items())
        for i, blocks in enumerate(self.stages):
            x = self.embed(i, x)
            stage = self.stage_context(i, x)
            for block in blocks:
                x = recompute(block, x, stage) if self.with_cp else block(x, stage)
            raw = to_image(x)
            out = norms[str(i)](raw) if str(i) in norms else raw
            if i in self.out_indices:
                outs.append(clone_if_dynamic(out if self.out_norm else raw).contiguous())
            if self.norms_feed_on:
                x = out.permute(0, 2, 3, 1)
        return tuple(outs)

    def parts(self) -> list[Part]:
        parts, before = [], 0
        for i, depth in enumerate(self.depths):
            is_built, feeds_on = i < self.num_stages, self.norms_feed_on and i < self.num_stages - 1
            parts += [Part(f'{name}.{i}', before, i + 1 if i else 0, i, is_built) for name in self.stage_inputs]
            parts += [Part(f'stages.{i}.{j}', before + j + 1, i + 1, i, is_built) for j in range(depth)]
            before += depth
            parts.append(Part(f'out_norms.{i}', before if feeds_on else None, i + 1, None, str(i) in self.out_norms))
        return parts
