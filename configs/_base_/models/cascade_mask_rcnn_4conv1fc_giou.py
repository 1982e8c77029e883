# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Cascade Mask R-CNN as Swin and its successors train it: heads of 4 convolutions and 1 linear
# layer, one box per class, and an IoU loss on the decoded boxes.
_base_ = 'mmdet::_base_/models/cascade-mask-rcnn_r50_fpn.py'

model = dict(
    roi_head=dict(
        # MMEngine replaces lists as a whole, so each of the three heads starts from upstream's.
        bbox_head=[
            dict(
                head,
                type='ConvFCBBoxHead',
                num_shared_convs=4,
                num_shared_fcs=1,
                conv_out_channels=256,
                norm_cfg=dict(type='SyncBN', requires_grad=True),
                reg_class_agnostic=False,
                reg_decoded_bbox=True,
                loss_bbox=dict(type='GIoULoss', loss_weight=10.0),
            )
            for head in _base_.model.roi_head.bbox_head
        ]
    )
)
