# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# The released file has a final norm, unused by the released model.
_base_ = './inline_pvt_t_in1k.py'

model = dict(backbone=dict(arch='flatten-tiny'))
