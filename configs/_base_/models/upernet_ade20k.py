# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# UperNet with the 150 classes of ADE20K and an auxiliary FCN head (loss weight 0.4) on stage 3.
_base_ = 'mmseg::_base_/models/upernet_r50.py'

model = dict(
    data_preprocessor=dict(size=(512, 512)),  # the training crop
    pretrained=None,
    decode_head=dict(num_classes=150),
    auxiliary_head=dict(num_classes=150),
)
