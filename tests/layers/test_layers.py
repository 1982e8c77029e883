# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every layer starts as its ``init_cfg`` says."""

import copy

import pytest
from torch import nn

from mmlinattn import attention
from mmlinattn.backbones import nextvit_blocks as nextvit
from mmlinattn.layers import MLP, Block, ConvDownsample, ConvFFN, ConvStem, DWConvFFN, PatchEmbed, PatchMerging
from mmlinattn.layers.compact import BranchedLinear

CONSTANT = dict(type='Constant', layer=['Linear', 'Conv1d', 'Conv2d', 'LayerNorm', '_BatchNorm'], val=0.25, bias=2.0)
BN, LN = dict(type='BN'), dict(type='LN')
PARTS = {
    'MLP': lambda **cfg: MLP(4, 6, **cfg),
    'ConvFFN': lambda **cfg: ConvFFN(4, 6, **cfg),
    'DWConvFFN': lambda **cfg: DWConvFFN(4, 6, **cfg),
    'ReLUMLP': lambda **cfg: nextvit.ReLUMLP(4, 6, **cfg),
    'ConvStem': lambda **cfg: ConvStem(3, 4, BN, **cfg),
    'ConvDownsample': lambda **cfg: ConvDownsample(4, 6, BN, **cfg),
    'PatchEmbed': lambda **cfg: PatchEmbed(3, 4, 4, 4, norm_cfg=LN, **cfg),
    'PatchMerging': lambda **cfg: PatchMerging(4, 6, LN, **cfg),
    'Block': lambda **cfg: Block(4, nn.Linear(4, 4), nn.Linear(4, 4), LN, **cfg),
    'BranchedLinear': lambda **cfg: BranchedLinear(4, 6, 2, dict(type='BN1d'), **cfg),
    'Attention': lambda **cfg: attention.Attention(8, 2, 'inline', **cfg),
    'GlobalAttention': lambda **cfg: attention.GlobalAttention(8, 2, 'rala', local_kernel=3, **cfg),
    'ReducedAttention': lambda **cfg: attention.ReducedAttention(8, 2, 'softmax', 2, LN, **cfg),
    'WindowAttention': lambda **cfg: attention.WindowAttention(8, 2, 'softmax', (3, 3), **cfg),
    'StripeAttention': lambda **cfg: attention.StripeAttention(8, 2, 'softmax', 2, **cfg),
    'AveragedKeysAttention': lambda **cfg: nextvit.AveragedKeysAttention(8, 2, 'softmax', 2, 'grid', BN, **cfg),
    'ConvNorm': lambda **cfg: nextvit.ConvNorm(4, 6, BN, **cfg),
    'PooledEmbed': lambda **cfg: nextvit.PooledEmbed(4, 6, BN, **cfg),
    'ConvAttention': lambda **cfg: nextvit.ConvAttention(4, 2, BN, **cfg),
    'ConvBlock': lambda **cfg: nextvit.ConvBlock(4, 6, 2, MLP(6, 6), BN, 0.0, **cfg),
    'TransformerBlock': lambda **cfg: nextvit.TransformerBlock(4, nn.Linear(4, 4), 4, 6, 2, MLP(6, 6), BN, 0.0, **cfg),
    **{name: lambda kind=kind, **cfg: kind(8, 2, **cfg) for name, kind in attention.TOKEN_MIXERS.module_dict.items()},
}


@pytest.mark.parametrize('build', PARTS.values(), ids=PARTS)
def test_parts_start_as_their_init_cfg_says(build):
    """MMEngine's ``init_cfg``, which every module of OpenMMLab takes."""
    part = build(init_cfg=copy.deepcopy(CONSTANT))
    assert part.init_cfg == CONSTANT and build().init_cfg is None
    part.init_weights()
    kinds = nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d
    for module in part.modules():
        if isinstance(module, kinds):
            assert (module.weight == 0.25).all() and (module.bias is None or (module.bias == 2).all())
