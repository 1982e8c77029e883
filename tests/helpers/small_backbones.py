# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Small models of all backbones with all registered attentions."""

import copy
import itertools

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn

import mmlinattn  # noqa: F401  registers the backbones
from helpers import goldens
from mmlinattn.attention import TOKEN_MIXERS


def every_attention():
    """Return the names of the registered attentions, quadratic ones last."""
    return tuple(sorted(TOKEN_MIXERS.module_dict, key=lambda name: (TOKEN_MIXERS.get(name).quadratic, name)))


EVERY_ATTN = every_attention()
_PYRAMID = dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 2, 1), num_heads=(1, 2, 3, 4))
ARCHS = {
    'RAVLT': _PYRAMID,
    # small tables and windows: images of 64 pixels resize the first, and pad and shift the second
    'LinearPVT': dict(_PYRAMID, grids=(10, 5, 3, 2)),
    'LinearPVTv2': dict(_PYRAMID, grids=(10, 5, 3, 2)),
    'LinearSwin': dict(_PYRAMID, window=3, linear_windows=(7, 4, 3, 2)),
    'LinearCSWin': dict(_PYRAMID, num_heads=(2, 2, 2, 4), grids=(10, 5, 3, 2), stripes=(1, 2, 3, None)),
    # convolution blocks in the first and third stage; some keys are averages of fewer tokens
    'LinearNextViT': dict(
        _PYRAMID, attn_every=(0, 1, 2, 1), grids=(10, 5, 3, 2), sr_ratios=(4, 3, 2, 1), group_dim=2, stem_dims=(8, 4, 6)
    ),
    'LinearDeiT': dict(embed_dims=(16,), depths=(2,), num_heads=(2,), grid=3),
}
PYRAMIDS = [backbone for backbone in ARCHS if backbone != 'LinearDeiT']


def config(backbone, attn=None, **options):
    """Return the config of a small model with ``attn`` in all stages."""
    options = {'arch': copy.deepcopy(ARCHS[backbone]), **options}
    if attn is not None:
        options.setdefault('stage_attns', (attn,) * len(ARCHS[backbone]['depths']))
    if backbone == 'LinearDeiT':
        options = {'out_type': 'featmap', **options}
    return dict(type=backbone, **options)


def mixes(backbone):
    """Return ``stage_attns`` of models that cover all registered attentions: three per pyramid, two per ``LinearDeiT``.

    Quadratic ones are in two blocks of a stage, as the second has shifted windows. No attention is in the first stage
    alone, as Next-ViT has convolution blocks there.
    """
    names = every_attention()
    if backbone == 'LinearDeiT':
        return tuple(([first, second],) for first, second in zip(names[::2], (*names[1::2], names[0])))
    count = -(-len(names) // 3)
    twice, others = names[-count:], itertools.cycle(names[:-count])
    seconds = list(itertools.islice(others, count))
    return tuple((last, second, [name] * 2, last) for name, second, last in zip(twice, seconds, others))


def every_mix():
    """Yield all mixes as ``(backbone, stage_attns)``. One mix per backbone is fast; together they cover all."""
    for number, backbone in enumerate(ARCHS):
        for i, attns in enumerate(mixes(backbone)):
            marks = [] if i == number % len(mixes(backbone)) else [pytest.mark.slow]
            yield pytest.param(backbone, attns, id=f'{backbone}-{i}', marks=marks)


def build(backbone, attn=None, **options):
    """Build the model of :func:`config` with the weights of :func:`goldens.fill`."""
    return goldens.fill(MODELS.build(config(backbone, attn, **options)))


class Adapter(nn.Module):
    """Adapter with the base layer's ``weight`` and ``bias`` as properties, as LoRA of PEFT."""

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def __init__(self, base, delta):
        super().__init__()
        self.base, self.delta = base, delta

    def forward(self, x):
        return self.base(x) + self.delta(x)


def image(batch=2, height=64, width=96, channels=3):
    return torch.randn(batch, channels, height, width)


def loss(outs):
    return sum(out.float().square().mean() for out in outs)


def blocks_of(model):
    return list(model.blocks) if hasattr(model, 'blocks') else [block for stage in model.stages for block in stage]


def relative_error(found, expected):
    """Return the largest norm of a difference of two tensors, relative to the norm of the expected one."""
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    pairs = [(one.double(), other.double()) for one, other in zip(found, expected)]
    return max(((one - other).norm() / other.norm().clamp(min=1e-6)).item() for one, other in pairs)
