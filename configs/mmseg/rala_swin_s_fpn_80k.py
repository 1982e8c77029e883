# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# No row of the paper: the recipe is that of RAVLT's rows, on Swin.
_base_ = './rala_swin_t_fpn_80k.py'

model = dict(backbone=dict(arch='rala-small'))
