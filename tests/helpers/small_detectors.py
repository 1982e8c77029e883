# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Upstream's detectors with a small backbone and few channels, and their predictions."""

import torch
from mmdet.structures import DetDataSample
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope
from torch.nn import functional as F

ARCH = dict(embed_dims=(8, 16, 24, 32), depths=(1,) * 4, num_heads=(1, 1, 2, 4))
PREPROCESSOR = dict(type='DetDataPreprocessor', pad_size_divisor=32)
# numbers in configs and their replacements: channels, classes, boxes
SMALLER = {256: 8, 1024: 16, 80: 3, 1000: 60, 100: 20}
GROUPS = dict(norm_cfg=dict(type='GN', num_groups=4))
UPSTREAM = dict(
    RetinaNet='_base_/models/retinanet_r50_fpn',
    FCOS='fcos/fcos_r50-caffe_fpn_gn-head_1x_coco',
    ATSS='atss/atss_r50_fpn_1x_coco',
    FasterRCNN='_base_/models/faster-rcnn_r50_fpn',
    MaskRCNN='_base_/models/mask-rcnn_r50_fpn',
    CascadeRCNN='_base_/models/cascade-mask-rcnn_r50_fpn',
)


def smaller(node):
    """Replace the numbers of :data:`SMALLER` in a config, and reduce the stacked convolutions of heads to one."""
    if isinstance(node, dict):
        return {key: 1 if key in ('stacked_convs', 'num_convs') else smaller(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [smaller(item) for item in node]
    return SMALLER.get(node, node) if type(node) is int else node


def small(name):
    model = smaller(Config.fromstring(f"_base_ = 'mmdet::{name}.py'", '.py').model.to_dict())
    model.update(backbone=dict(type='RAVLT', arch=ARCH, drop_path_rate=0.0), train_cfg=None)
    model['neck']['in_channels'] = list(ARCH['embed_dims'])
    if model['type'] in ('FCOS', 'ATSS'):
        model['bbox_head'].update(GROUPS, **dict(centerness_on_reg=True) if model['type'] == 'FCOS' else {})
    return model


FAMILIES = {family: small(name) for family, name in UPSTREAM.items()}


def build(family):
    """Build the small detector ``family``, a key of :data:`FAMILIES` such as ``'MaskRCNN'``, in eval mode.

    Random weights of large variance give predictions of different scores and boxes.
    """
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
    """Return upstream's predictions for images (B, 3, H, W), padded to multiples of 32."""
    height, width = images.shape[2:]
    info = dict(img_shape=(height, width), ori_shape=(height, width), scale_factor=(1.0, 1.0))
    padded = F.pad(images, (0, -width % 32, 0, -height % 32))
    samples = model.predict(padded, [DetDataSample(metainfo=info) for _ in images], rescale=False)
    return [sample.pred_instances for sample in samples]
