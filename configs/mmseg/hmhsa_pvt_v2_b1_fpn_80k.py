# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# No row of the paper: the recipe is PVT's.
_base_ = './flatten_pvt_v2_b1_fpn_80k.py'

model = dict(backbone=dict(arch='hmhsa-b1'))
