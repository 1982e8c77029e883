# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Small models of all hosts, for the tests of their shared promises."""

import copy

import torch
from mmengine.registry import MODELS

import mmlinattn  # noqa: F401  registers the hosts
from helpers import goldens
from mmlinattn.attention import TOKEN_MIXERS

EVERY_ATTN = tuple(sorted(TOKEN_MIXERS.module_dict))
_PYRAMID = dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 2, 1), num_heads=(1, 2, 3, 4))
ARCHS = {
    'RAVLT': _PYRAMID,
    # small tables and windows, so that images of 64 pixels resize, pad and shift
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
# all attentions in two models a host, hallucinated attention in two blocks of a stage for shifted windows
MIXES = (
    ('hydra', 'angular', ['hallucinated', 'hallucinated'], 'enhanced'),
    ('hallucinated', 'efficient', ['enhanced', 'hydra'], 'angular'),
    ('inline', 'focused', ['softmax', 'rala'], 'softmax'),
)
PLAIN_MIXES = (['hallucinated', 'angular'],), (['hydra', 'efficient'],), (['inline', 'focused'],)
PYRAMIDS = [host for host in ARCHS if host != 'LinearDeiT']


def config(host, attn=None, **options):
    """Return the config of a small model with ``attn`` in all stages."""
    options = {'arch': copy.deepcopy(ARCHS[host]), **options}
    if attn is not None:
        options.setdefault('stage_attns', (attn,) * len(ARCHS[host]['depths']))
    if host == 'LinearDeiT':
        options = {'out_type': 'featmap', **options}
    return dict(type=host, **options)


def mixes(host):
    """Return ``stage_attns`` with all attentions between them."""
    return PLAIN_MIXES if host == 'LinearDeiT' else MIXES


def build(host, attn=None, **options):
    """:func:`config` with weights that hide no term."""
    return goldens.fill(MODELS.build(config(host, attn, **options)))


def image(batch=2, height=64, width=96, channels=3):
    return torch.randn(batch, channels, height, width)


def loss(outs):
    return sum(out.float().square().mean() for out in outs)
