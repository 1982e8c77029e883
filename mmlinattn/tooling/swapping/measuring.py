# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Channels and strides of the maps that a backbone gives, and a neck makes of maps: found by running it on noise."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from mmengine.config import ConfigDict
from mmengine.registry import MODELS, init_default_scope

from ...utils.building import without_pretrained
from ...utils.errors import RunError, described, printable
from ..command_line import quiet
from .upstream import NoPlace, Upstream
from .zoo import FeatureMap


class Measured(NamedTuple):
    """The outputs of an upstream backbone for noise of a height and width."""

    maps: list[FeatureMap]
    size: tuple[int, int]
    alone: Optional[int] = None  # position of the only map that it returns in inference, not in a tuple


def measure(upstream: Upstream) -> Measured:
    """Channels and stride of what the upstream backbone returns.

    Raises:
        NoPlace: It is one of masked image modelling, or gives neither maps nor tokens.
        RunError: It cannot be built or run here.
    """
    network = upstream.network(upstream.model)
    cfg = without_pretrained(network['backbone'])
    if cfg.get('output_cls_token'):
        raise NoPlace(f'{upstream.base} has no place for a pyramid: its head reads a class token beside each map')
    if upstream.task == 'mmpretrain' and network.get('type') == 'ImageClassifier' and not network.get('head'):
        raise NoPlace(f'{upstream.base} has no place for another backbone: it has no head, so that nothing trains')
    init_default_scope(upstream.task)
    with MODELS.switch_scope_and_registry(None) as registry:  # that of the default scope
        kind = registry.get(cfg['type'])
    hidden = {'mask', 'masks', 'ids_restore', 'importance'}
    if network.get('type') == 'SparK' or (kind and hidden & set(inspect.signature(kind.forward).parameters)):
        raise NoPlace(
            f'{upstream.base} has no place for a pyramid: masked image modelling hides tokens from {cfg["type"]}'
        )
    given = cfg.get('img_size') or (upstream.image_size if upstream.task == 'mmpretrain' else None)
    size = (given, given) if isinstance(given, int) else tuple(given) if given else upstream.sizes[0]
    noise = torch.rand(2, upstream.image_channels, *size)
    with quiet(), torch.no_grad():
        try:
            backbone = _built(cfg)
        except Exception as error:  # anything may be raised by a model of another project
            guessed = _guess(network)
            if guessed:
                return Measured(guessed, size)
            raise RunError(
                f'the backbone of {upstream.base} cannot be built here: {printable(described(error))}'
            ) from error
        try:
            outs = backbone(noise)
            backbone.train()  # segmentors' may return more than one map then
            branches = _maps(backbone(noise), size[0]) if upstream.task == 'mmseg' and torch.is_tensor(outs) else []
        except Exception as error:
            raise RunError(
                f'the backbone of {upstream.base} does not run here: {printable(described(error))}'
            ) from error
    found = _maps(outs, size[0])
    if not found:
        raise NoPlace(f'{upstream.base} has no place for a pyramid: {cfg["type"]} returns no maps or tokens')
    alike = [i for i, branch in enumerate(branches) if branch == found[0]]
    return Measured(branches, size, alike[0]) if len(alike) == 1 and len(branches) > 1 else Measured(found, size)


def _built(cfg: dict) -> torch.nn.Module:
    module = MODELS.build(ConfigDict(cfg))  # some read their settings as attributes
    module.eval()  # which does not return the module where upstream overrides train()
    return module


def through(necks: Sequence[dict], maps: Sequence[FeatureMap], size: tuple[int, int]) -> Optional[list[FeatureMap]]:
    """The outputs of necks in sequence for the maps of an image ``size``; None where they do not run on such maps, or
    give something else."""
    shapes = [(2, out.channels, *([-(-side // out.stride) for side in size] if out.stride else [])) for out in maps]
    outs: Any = tuple(map(torch.rand, shapes))
    with quiet(), torch.no_grad():
        try:
            for neck in necks:
                outs = _built(without_pretrained(neck))(outs)
        except Exception:  # that it does not run is the answer
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


def _guess(network: dict) -> list[FeatureMap]:
    """Maps of a backbone that cannot be built (its package is missing), from what the neck reads: up to stride 32."""
    neck = network.get('neck')
    neck = neck[0] if isinstance(neck, (list, tuple)) and neck else neck
    channels = neck.get('in_channels') if isinstance(neck, dict) else None
    if not isinstance(channels, (list, tuple)) or not 1 <= len(channels) <= 4:
        return []
    return [FeatureMap(dim, 32 // 2 ** (len(channels) - 1 - i)) for i, dim in enumerate(channels)]
