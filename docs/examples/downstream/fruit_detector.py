# A detector of one's own on top of mmlinattn: COCO-style data with two classes, another neck, and a backbone whose
# stem and first stage stay as they were trained on ImageNet. Train it with this project's tools/train.py or with
# MMDetection's.
_base_ = __import__('mmlinattn').__name__ + '::mmdet/ravlt_t_maskrcnn_1x.py'

data_root = 'data/fruit/'
metainfo = dict(classes=('apple', 'pear'), palette=[(220, 20, 60), (119, 171, 11)])
num_classes = len(metainfo['classes'])

model = dict(
    backbone=dict(frozen_stages=1),
    # a path aggregation network in place of the feature pyramid; _delete_ drops the old neck's settings
    neck=dict(_delete_=True, type='PAFPN', in_channels=[64, 128, 256, 512], out_channels=256, num_outs=5),
    roi_head=dict(bbox_head=dict(num_classes=num_classes), mask_head=dict(num_classes=num_classes)),
)

train_dataloader = dict(
    batch_size=2,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/train.json',
        data_prefix=dict(img='images/train/'),
    ),
)
val_dataloader = dict(
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/val.json',
        data_prefix=dict(img='images/val/'),
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/val.json')
test_evaluator = val_evaluator

# the recipe is for 8 GPUs with 2 images each
optim_wrapper = dict(optimizer=dict(lr=1e-4 * 2 / 16))
