# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Semantic FPN with the 150 classes of ADE20K.
_base_ = 'mmseg::_base_/models/fpn_r50.py'

model = dict(
    data_preprocessor=dict(size=(512, 512)),  # the training crop
    pretrained=None,
    decode_head=dict(num_classes=150),
)
