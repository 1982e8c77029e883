# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Measure channels and strides of the feature maps of upstream backbones and necks on noise."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from mmengine.config import ConfigDict
from mmengine.registry import MODELS, init_default_scope
from mmengine.utils import to_2tuple

from ...utils.building import without_pretrained
from ...utils.errors import RunError, described, printable
from ...utils.registering import bare_name
from ..command_line import quiet
from .upstream import Unsupported, Upstream
from .zoo import FeatureMap

_MASKING = {'mask', 'masks', 'ids_restore', 'importance'}


class Measured(NamedTuple):
    """Feature maps of an upstream backbone for noise.

    Attributes:
        maps (list[FeatureMap]): Channels and stride of each output.
        size (tuple[int, int]): Height and width of the noise in pixels.
        alone (int, optional): Index of the feature map that inference returns alone, not in a tuple.
    """

    maps: list[FeatureMap]
    size: tuple[int, int]
    alone: Optional[int] = None


def measure(upstream: Upstream) -> Measured:
    """Measure channels and strides of an upstream backbone.

    Raises:
        Unsupported: The head fits this backbone only, or the backbone returns neither feature maps nor tokens.
        RunError: The backbone cannot be built or run here.
    """
    cfg = without_pretrained(upstream.network['backbone'])
    _check_supported(upstream, cfg)
    size = cfg.get('img_size') or (upstream.image_size if upstream.task == 'mmpretrain' else None) or upstream.sizes[0]
    size = tuple(to_2tuple(size))
    noise, branches = torch.rand(2, upstream.image_channels, *size), []
    with quiet(), torch.no_grad():
        try:
            backbone = _build(cfg)
            outs = backbone(noise)
            if upstream.task == 'mmseg' and torch.is_tensor(outs):  # there may be more of them in training
                backbone.train()
                branches = _maps(backbone(noise), size[0])
        except Exception as error:  # anything may be raised by a model of another project
            reason = printable(described(error))
            raise RunError(f'{upstream.base}: its own backbone does not run here: {reason}') from error
    found = _maps(outs, size[0])
    if not found:
        raise Unsupported(upstream.base, f'{cfg["type"]} returns no maps or tokens')
    alike = [i for i, branch in enumerate(branches) if branch == found[0]]
    return Measured(branches, size, alike[0]) if len(alike) == 1 and len(branches) > 1 else Measured(found, size)


def _check_supported(upstream: Upstream, backbone: dict) -> None:
    """Check that the backbone of an upstream network can be replaced.

    Raises:
        Unsupported: The head reads a class token beside each feature map. Or a classifier has no head. Or the backbone
            takes masks, for masked image modelling.
    """
    network = upstream.network
    kind = bare_name(network.get('type'))
    if backbone.get('output_cls_token'):
        raise Unsupported(upstream.base, 'its head reads a class token beside each map')
    if kind == 'ImageClassifier' and not network.get('head'):
        raise Unsupported(upstream.base, 'it has no head, so that nothing trains')
    init_default_scope(upstream.task)
    with MODELS.switch_scope_and_registry(None) as registry:  # that of the default scope
        forward = getattr(registry.get(backbone['type']), 'forward', None)
    if kind == 'SparK' or (forward and _MASKING & set(inspect.signature(forward).parameters)):
        raise Unsupported(upstream.base, f'masked image modelling hides tokens from {backbone["type"]}')


def _build(cfg: dict) -> torch.nn.Module:
    module = MODELS.build(ConfigDict(cfg))  # some read their settings as attributes
    module.eval()  # upstream may override train() without returning the module
    return module


def run_necks(necks: Sequence[dict], maps: Sequence[FeatureMap], size: tuple[int, int]) -> Optional[list[FeatureMap]]:
    """Return the outputs of necks in sequence for noise like ``maps`` of images of ``size`` (height, width); None if
    they fail or return no feature maps."""
    sides = [[-(-side // out.stride) for side in size] if out.stride else [] for out in maps]
    outs: Any = tuple(torch.rand(2, out.channels, *each) for out, each in zip(maps, sides))
    with quiet(), torch.no_grad():
        try:
            for neck in necks:
                outs = _build(without_pretrained(neck))(outs)
        except Exception:  # a neck of another project raises anything
            return None
    return _maps(outs, size[0]) or None


def _maps(outs: Any, side: int) -> list[FeatureMap]:
    """Return channels and stride of each output of a backbone for images of height ``side`` in pixels. Vectors and
    tokens have the stride None. The result is [] if an output is no tensor of two to four dimensions."""
    found = []
    for out in outs if isinstance(outs, (list, tuple)) else [outs]:
        if isinstance(out, (list, tuple)) and out:
            out = out[0]  # a feature map and its class token
        if not isinstance(out, torch.Tensor) or out.dim() not in (2, 3, 4):
            return []
        stride = max(1, round(side / out.shape[2])) if out.dim() == 4 else None
        found.append(FeatureMap(out.shape[1] if stride else out.shape[-1], stride))
    return found
