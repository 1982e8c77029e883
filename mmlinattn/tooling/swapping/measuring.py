# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Channels and strides of the maps of upstream backbones and necks, measured on noise."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from mmengine.config import ConfigDict
from mmengine.registry import MODELS, init_default_scope

from ...utils.building import without_pretrained
from ...utils.errors import RunError, described, printable
from ...utils.registering import bare_name
from ..command_line import quiet
from .upstream import Unsupported, Upstream, listed
from .zoo import FeatureMap

_MASKING = {'mask', 'masks', 'ids_restore', 'importance'}


class Measured(NamedTuple):
    """Feature maps that an upstream backbone returns for noise of the given size (height, width)."""

    maps: list[FeatureMap]
    size: tuple[int, int]
    alone: Optional[int] = None  # position of the only map that it returns in inference, not in a tuple


def measure(upstream: Upstream) -> Measured:
    """Measure channels and strides of an upstream backbone.

    Raises:
        Unsupported: The network is one of masked image modelling, or the backbone gives neither maps nor tokens.
        RunError: The backbone cannot be built or run here.
    """
    network = upstream.network
    cfg, kind = without_pretrained(network['backbone']), bare_name(network.get('type'))
    if cfg.get('output_cls_token'):
        raise Unsupported(upstream.base, 'its head reads a class token beside each map')
    if kind == 'ImageClassifier' and not network.get('head'):
        raise Unsupported(upstream.base, 'it has no head, so that nothing trains')
    init_default_scope(upstream.task)
    with MODELS.switch_scope_and_registry(None) as registry:  # that of the default scope
        forward = getattr(registry.get(cfg['type']), 'forward', None)
    if kind == 'SparK' or (forward and _MASKING & set(inspect.signature(forward).parameters)):
        raise Unsupported(upstream.base, f'masked image modelling hides tokens from {cfg["type"]}')
    size = cfg.get('img_size') or (upstream.image_size if upstream.task == 'mmpretrain' else None) or upstream.sizes[0]
    size = (size, size) if isinstance(size, int) else tuple(size)
    noise, branches, backbone = torch.rand(2, upstream.image_channels, *size), [], None
    with quiet(), torch.no_grad():
        try:
            backbone = _build(cfg)
            outs = backbone(noise)
            if upstream.task == 'mmseg' and torch.is_tensor(outs):  # segmentors may return more maps in training
                backbone.train()
                branches = _maps(backbone(noise), size[0])
        except Exception as error:  # anything may be raised by a model of another project
            channels = [neck.get('in_channels') for neck in listed(network.get('neck'))[:1]]
            if backbone is None and channels and isinstance(channels[0], (list, tuple)) and len(channels[0]) <= 4:
                # its package is missing (timm): the neck names its maps, the last one of stride 32
                return Measured([FeatureMap(dim, 32 >> i) for i, dim in enumerate(channels[0][::-1])][::-1], size)
            raise RunError(
                f'{upstream.base}: its own backbone does not run here: {printable(described(error))}'
            ) from error
    found = _maps(outs, size[0])
    if not found:
        raise Unsupported(upstream.base, f'{cfg["type"]} returns no maps or tokens')
    alike = [i for i, branch in enumerate(branches) if branch == found[0]]
    return Measured(branches, size, alike[0]) if len(alike) == 1 and len(branches) > 1 else Measured(found, size)


def _build(cfg: dict) -> torch.nn.Module:
    module = MODELS.build(ConfigDict(cfg))  # some read their settings as attributes
    module.eval()  # upstream may override train() without returning the module
    return module


def run_necks(necks: Sequence[dict], maps: Sequence[FeatureMap], size: tuple[int, int]) -> Optional[list[FeatureMap]]:
    """Return the outputs of necks in sequence for the maps of an image ``size``; None if they do not run on such maps
    or give something else."""
    shapes = [(2, out.channels, *([-(-side // out.stride) for side in size] if out.stride else [])) for out in maps]
    outs: Any = tuple(map(torch.rand, shapes))
    with quiet(), torch.no_grad():
        try:
            for neck in necks:
                outs = _build(without_pretrained(neck))(outs)
        except Exception:  # a neck of another project raises anything
            return None
    return _maps(outs, size[0]) or None


def _maps(outs: Any, side: int) -> list[FeatureMap]:
    found = []
    for out in outs if isinstance(outs, (list, tuple)) else [outs]:
        if isinstance(out, (list, tuple)) and out:
            out = out[0]  # a map and its class token
        if not isinstance(out, torch.Tensor) or out.dim() not in (2, 3, 4):
            return []
        stride = max(1, round(side / out.shape[2])) if out.dim() == 4 else None
        found.append(FeatureMap(out.shape[1] if stride else out.shape[-1], stride))
    return found
