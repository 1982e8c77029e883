# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Written configs with another backbone train."""

import ast
from types import SimpleNamespace

import pytest
import torch
from helpers.config_helpers import without_gradient
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mmlinattn.tooling.swapping import Unsupported, swap_backbone
from mmlinattn.tooling.swapping.dummy_inputs import batch_for
from mmlinattn.tooling.swapping.swap import _inherited_settings
from mmlinattn.utils.building import build_model
from mmlinattn.utils.errors import RunError
from mmlinattn.utils.registering import bare_name

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)


@pytest.fixture
def swap(tmp_path):
    def run(upstream, backbone, **kwargs):
        out = tmp_path / 'made' / 'swapped.py'
        swapped = swap_backbone(upstream, backbone, out, **kwargs)
        assert swapped.result.without_gradient == ()
        return swapped, Config.fromfile(out)

    return run


@pytest.mark.parametrize(
    ('given', 'kept'),
    [
        (dict(type='RAVLT', with_cp=True, frozen_stages=0, norm_eval=True), 'with_cp norm_eval frozen_stages'),
        (dict(type='RAVLT', with_cp=False, frozen_stages=-1), ''),
        (dict(type='LinearDeiT', frozen_stages=4), ''),
        (dict(type='mmdet.ResNet', with_cp=True, frozen_stages=1, norm_eval=True), 'with_cp'),
        (dict(type='Unknown', frozen_stages=1), ''),
    ],
)
def test_settings_of_memory_and_freezing_are_kept(given, kept):
    assert _inherited_settings(given, 4) == {key: given[key] for key in kept.split()}


@pytest.mark.parametrize('has_masks', [False, True])
def test_dummy_objects_have_masks_if_the_data_has_them(has_masks):
    """Assigners read masks that are there."""
    source = SimpleNamespace(task='mmdet', image_channels=3, has_masks=has_masks)
    batch = batch_for(SimpleNamespace(data_preprocessor=None), source, {}, (32, 48))
    assert {'masks' in sample.gt_instances for sample in batch['data_samples']} == {has_masks}


@pytest.mark.parametrize('task', ['mmdet', 'mmseg'])
def test_dummy_images_have_the_channels_of_the_model(task):
    source = SimpleNamespace(task=task, image_channels=4, has_masks=False)
    model = SimpleNamespace(data_preprocessor=None)
    assert {image.shape for image in batch_for(model, source, {}, (32, 48))['inputs']} == {(4, 32, 48)}


CLASSIFIER = """
default_scope = 'mmpretrain'
data_preprocessor = dict(mean=[127.0] * 3, std=[60.0] * 3, to_rgb=True)
train_dataloader = dict(dataset=dict(pipeline=[dict(type='RandomCrop', crop_size=32)]))
model = dict(type='ImageClassifier', backbone=dict(type='ResNet_CIFAR', depth=18, num_stages=4, out_indices=(3,), {}),
             neck=dict(type='GlobalAveragePooling'), pretrained='whole.pth',
             head=dict(type='LinearClsHead', num_classes=5, in_channels=512, loss=dict(type='{}')))
load_from = 'whole.pth'
optim_wrapper = dict(type='AmpOptimWrapper', loss_scale='dynamic', optimizer=dict(type='SGD', lr=0.1))
"""


@pytest.mark.parametrize('name, keep, optimizer', [("it's mine.py", False, 'AdamW'), ('plain.py', True, 'SGD')])
def test_a_config_of_ones_own(tmp_path, swap, name, keep, optimizer):
    path = tmp_path / name
    path.write_text(CLASSIFIER.format('frozen_stages=4', 'CrossEntropyLoss'))
    swapped, cfg = swap(str(path), 'flatten_pvt_v2_b0', keep_optimizer=keep)
    assert cfg.model.backbone.type == 'LinearPVTv2' and cfg.model.backbone.out_indices == (3,)
    assert cfg.model.backbone.init_cfg.checkpoint == 'mmlinattn://flatten_pvt_v2_b0'
    assert cfg.model.head.in_channels == 256 and cfg.model.head.num_classes == 5
    assert cfg.data_preprocessor.mean == [123.675, 116.28, 103.53]
    assert cfg.model.pretrained is None and cfg.load_from is None
    assert any('frozen_stages=4' in remark for remark in swapped.remarks)
    assert cfg.optim_wrapper.optimizer.type == optimizer
    assert "load_from: 'whole.pth' -> None" in swapped.changes
    swap(str(path), 'flatten_pvt_v2_b0')  # its own file is written again
    with (tmp_path / 'made' / 'swapped.py').open('a') as file:
        file.write('work_dir = "mine"\n')
    with pytest.raises(RunError, match='swapped.py. exists and is not by tools/swap_backbone.py, or was edited'):
        swap(str(path), 'flatten_pvt_v2_b0')


def test_upstreams_own_errors_are_reported(tmp_path):
    path = tmp_path / 'mine.py'
    path.write_text(CLASSIFIER.format('frozen_stages=-1', 'NoSuchLoss'))
    with pytest.raises(RunError, match='does not run here with its own backbone either: it cannot be built') as error:
        swap_backbone(str(path), 'flatten_pvt_v2_b0', tmp_path / 'out.py')
    assert not isinstance(error.value, Unsupported) and '\n' not in str(error.value)


FAMILIES = """
# maps that a neck skips are not returned: parameters of the first one's norm would get no gradient
mmdet::retinanet/retinanet_r50_fpn_1x_coco.py ravlt_t
    backbone.out_indices = (1, 2, 3); neck.in_channels = [128, 256, 512]; neck.start_level = 0
# branches in training, one of them in inference
mmseg::ddrnet/ddrnet_23-slim_in1k-pre_2xb6-120k_cityscapes-1024x1024.py ravlt_t
    neck.out_channels = [64, 128]; neck.inference_output = 1; backbone.out_indices = (1, 3)
# a plain backbone in a network for pyramids
mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py inline_deit_t
    neck.type = 'SimpleFeaturePyramid'; backbone.out_type = 'featmap'
# heads that read tokens
mmpretrain::vision_transformer/vit-base-p16_32xb128-mae_in1k.py ravlt_t
    neck.type = 'GlobalAveragePooling'; head.in_channels = 512
mmpretrain::deit/deit-tiny_4xb256_in1k.py inline_deit_t
    neck = None; backbone.out_type = 'cls_token'
# the backbone is the first entry of a list
mmpretrain::arcface/resnet50-arcface_8xb32_inshop.py ravlt_t
    image_encoder.0.type = 'RAVLT'; image_encoder.0.out_indices = (3,); head.in_channels = 512
# a prediction stops as upstream's; maps of fixed channels
mmdet::ssd/ssd300_coco.py ravlt_t
    neck.0.type = 'MapAdapter'
# grey images, and a backbone that holds the classifier
mmpretrain::lenet/lenet5_mnist.py flatten_pvt_v2_b0
    backbone.in_channels = 1; backbone.init_cfg = None; head.in_channels = 256; head.num_classes = 10
"""


def families():
    """Yield (upstream config, backbone, settings of the written model) from pairs of lines."""
    lines = [line for line in FAMILIES.strip().splitlines() if not line.startswith('#')]
    for names, settings in zip(lines[::2], lines[1::2]):
        yield pytest.param(*names.split(), [each.split(' = ') for each in settings.strip().split('; ')], id=names)


@pytest.mark.slow
@pytest.mark.parametrize('upstream, backbone, expected', list(families()))
def test_families(swap, upstream, backbone, expected):
    _, cfg = swap(upstream, backbone)
    for key, value in expected:
        found = cfg.model
        for part in key.split('.'):
            found = found[int(part)] if part.isdigit() else found.get(part)
        assert found == ast.literal_eval(value), key
    init_default_scope(cfg.default_scope)
    cfg.model.setdefault('data_preprocessor', cfg.get('data_preprocessor'))
    with torch.device('meta'):
        MODELS.build(cfg.model)  # as it stands in the file, with the weights that it names


PURE = """
from mmengine.config import read_base
from mmpretrain.models import GlobalAveragePooling, ImageClassifier, LinearClsHead, ResNet_CIFAR
from torch.nn import CrossEntropyLoss
from torch.optim import SGD

with read_base():
    from .scope import *

model = dict(
    type=ImageClassifier, backbone=dict(type=ResNet_CIFAR, depth=18, num_stages=4, out_indices=(3,)),
    neck=dict(type=GlobalAveragePooling), head=dict(type=LinearClsHead, num_classes=5, in_channels=512))
optim_wrapper = dict(optimizer=dict(type=SGD, lr=0.1))
"""


def test_a_pure_python_config(tmp_path, swap):
    (tmp_path / 'pure.py').write_text(PURE)
    (tmp_path / 'scope.py').write_text(
        "default_scope = 'mmpretrain'\ndata_preprocessor = dict(mean=[127.0] * 3, std=[60.0] * 3)\nother = 5\n"
    )
    swapped, cfg = swap(str(tmp_path / 'pure.py'), 'ravlt_t')
    assert (bare_name(cfg.model.type), cfg.model.backbone.type, cfg.other) == ('ImageClassifier', 'RAVLT', 5)
    assert cfg.model.head.in_channels == 512 and cfg.optim_wrapper.optimizer.type == 'AdamW'
    assert 'neck' in cfg.model and cfg.data_preprocessor.mean == [123.675, 116.28, 103.53]
    assert 'backbone: ResNet_CIFAR -> RAVLT tiny' in swapped.changes
    assert 'optim_wrapper.optimizer: SGD lr=0.1 -> AdamW lr=0.001 weight_decay=0.05' in swapped.changes
    assert without_gradient(build_model(cfg), cfg) == []
