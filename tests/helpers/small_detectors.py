# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Small detectors of each family with weights that find boxes in noise, and upstream's own predictions."""

import torch
from mmdet.structures import DetDataSample
from mmengine.config import ConfigDict
from mmengine.registry import MODELS, init_default_scope
from torch.nn import functional as F

CLASSES, CHANNELS = 3, 8
BACKBONE = dict(
    type='RAVLT', arch=dict(embed_dims=(8, 16, 24, 32), depths=(1,) * 4, num_heads=(1, 1, 2, 4)), drop_path_rate=0.0
)
PREPROCESSOR = dict(type='DetDataPreprocessor', pad_size_divisor=32)
NMS = dict(type='nms', iou_threshold=0.5)
ANCHORS = dict(type='AnchorGenerator', scales=[8], ratios=[0.5, 1.0, 2.0], strides=[4, 8, 16, 32, 64])
CODER = dict(type='DeltaXYWHBBoxCoder')
ROI = dict(
    type='SingleRoIExtractor',
    roi_layer=dict(type='RoIAlign', output_size=7, sampling_ratio=0),
    out_channels=CHANNELS,
    featmap_strides=[4, 8, 16, 32],
)
BOX_HEAD = dict(
    type='Shared2FCBBoxHead', in_channels=CHANNELS, fc_out_channels=16, num_classes=CLASSES, bbox_coder=CODER
)
MASK_HEAD = dict(type='FCNMaskHead', num_convs=1, in_channels=CHANNELS, conv_out_channels=CHANNELS, num_classes=CLASSES)
DENSE = dict(nms_pre=60, min_bbox_size=0, score_thr=0.05, nms=NMS, max_per_img=20)
RCNN = dict(score_thr=0.05, nms=NMS, max_per_img=20, mask_thr_binary=0.5)


def dense(kind, head, **neck):
    if head['type'] != 'RetinaHead':
        head = dict(head, norm_cfg=dict(type='GN', num_groups=4))
    head = dict(head, num_classes=CLASSES, in_channels=CHANNELS, feat_channels=CHANNELS, stacked_convs=1)
    fpn = dict(type='FPN', in_channels=[16, 24, 32], out_channels=CHANNELS, num_outs=5, start_level=0, **neck)
    backbone = dict(BACKBONE, out_indices=(1, 2, 3))
    return dict(type=kind, backbone=backbone, neck=fpn, bbox_head=head, test_cfg=DENSE)


def two_stage(kind, roi_head):
    roi_head = dict(roi_head, bbox_roi_extractor=ROI)
    if 'mask_head' in roi_head:
        roi_head['mask_roi_extractor'] = dict(ROI, roi_layer=dict(ROI['roi_layer'], output_size=14))
    rpn_head = dict(
        type='RPNHead', in_channels=CHANNELS, feat_channels=CHANNELS, anchor_generator=ANCHORS, bbox_coder=CODER
    )
    return dict(
        type=kind,
        backbone=BACKBONE,
        train_cfg=None,
        neck=dict(type='FPN', in_channels=[8, 16, 24, 32], out_channels=CHANNELS, num_outs=5),
        rpn_head=rpn_head,
        roi_head=roi_head,
        test_cfg=dict(
            rpn=dict(nms_pre=60, max_per_img=50, nms=dict(NMS, iou_threshold=0.7), min_bbox_size=0), rcnn=RCNN
        ),
    )


STAGE = dict(BOX_HEAD, reg_class_agnostic=True)
FAMILIES = dict(
    RetinaNet=dense(
        'RetinaNet',
        dict(
            type='RetinaHead',
            anchor_generator=dict(
                ANCHORS, octave_base_scale=4, scales_per_octave=2, scales=None, strides=[8, 16, 32, 64, 128]
            ),
        ),
        add_extra_convs='on_input',
    ),
    FCOS=dense('FCOS', dict(type='FCOSHead', centerness_on_reg=True), add_extra_convs='on_output'),
    ATSS=dense(
        'ATSS', dict(type='ATSSHead', anchor_generator=dict(ANCHORS, ratios=[1.0], strides=[8, 16, 32, 64, 128]))
    ),
    FasterRCNN=two_stage('FasterRCNN', dict(type='StandardRoIHead', bbox_head=BOX_HEAD)),
    MaskRCNN=two_stage('MaskRCNN', dict(type='StandardRoIHead', bbox_head=BOX_HEAD, mask_head=MASK_HEAD)),
    CascadeRCNN=two_stage(
        'CascadeRCNN',
        dict(
            type='CascadeRoIHead',
            num_stages=2,
            stage_loss_weights=[1, 1],
            bbox_head=[STAGE, BOX_HEAD],
            mask_head=MASK_HEAD,
        ),
    ),
)


def build(family):
    """Build a detector in eval mode with scores from 0 to 1 and boxes of several shapes."""
    init_default_scope('mmdet')
    torch.manual_seed(0)
    model = MODELS.build(ConfigDict(FAMILIES[family], data_preprocessor=PREPROCESSOR)).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and 'backbone' not in name:
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
        if weight.dim() == 1 and ('cls.' in name or 'conv_cls' in name):
            weight.zero_()
    return model


def predict(model, images):
    height, width = images.shape[2:]
    info = dict(img_shape=(height, width), ori_shape=(height, width), scale_factor=(1.0, 1.0))
    padded = F.pad(images, (0, -width % 32, 0, -height % 32))
    samples = model.predict(padded, [DetDataSample(metainfo=info) for _ in images], rescale=False)
    return [sample.pred_instances for sample in samples]
