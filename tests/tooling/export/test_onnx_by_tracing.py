# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``torch.onnx.export(..., dynamo=False, dynamic_axes=...)``, by which MMDeploy exports: right at other sizes and
batches."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmlinattn.tooling.export import ExportableModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'backbones'))

import small_hosts  # noqa: E402

ort = pytest.importorskip('onnxruntime')
AXES = {0: 'batch', 2: 'height', 3: 'width'}
CASES = [(host, stage_attns) for host in small_hosts.ARCHS for stage_attns in small_hosts.mixes(host)]


def flat(out):
    return [out] if isinstance(out, torch.Tensor) else [tensor for part in out for tensor in flat(part)]


def check(model, file):
    model.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        options = dict(input_names=['image'], dynamic_axes=dict(image=AXES), opset_version=17)
        torch.onnx.export(model, (small_hosts.image(1, 64, 96),), file, dynamo=False, **options)
        session = ort.InferenceSession(file, providers=['CPUExecutionProvider'])
        for size in ((1, 64, 96), (2, 64, 96), (1, 97, 65), (2, 80, 131)):
            image = small_hosts.image(*size)
            outs = session.run(None, dict(image=image.numpy()))
            for out, expected in zip(outs, flat(model(image)), strict=True):
                torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(('host', 'stage_attns'), CASES, ids=str)
def test_graphs_of_a_tracer_hold_at_other_sizes(host, stage_attns, tmp_path):
    check(small_hosts.build(host, stage_attns=stage_attns), str(tmp_path / 'model.onnx'))


class Maps(nn.Module):
    """What a detector computes before boxes are chosen, for which runtimes and MMDeploy have parts of their own."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, image):
        features = self.model.extract_feat(image)
        return features, self.model.bbox_head(features)


def dense(kind, **head):
    return dict(type=kind, num_classes=3, loss_decode=dict(type='CrossEntropyLoss'), channels=16, **head)


ANCHORS = dict(type='AnchorGenerator', ratios=[1.0], scales=[8], strides=[8, 16, 32, 64, 128])
HEADS = dict(
    RetinaNet=dict(type='RetinaHead', num_classes=3, in_channels=16, feat_channels=16, anchor_generator=ANCHORS),
    RPN=dict(type='RPNHead', in_channels=16, feat_channels=16, anchor_generator=ANCHORS),
    FPNHead=dense('FPNHead', in_channels=[16] * 4, in_index=[0, 1, 2, 3], feature_strides=[4, 8, 16, 32]),
    UPerHead=dense('UPerHead', in_channels=[16] * 4, in_index=[0, 1, 2, 3], pool_scales=(1, 2, 3, 6)),
)


@pytest.mark.parametrize('kind, host', list(zip(HEADS, ['RAVLT', 'LinearSwin'] * 2)))
def test_whole_models_hold_at_other_sizes(kind, host, tmp_path):
    """Upsampling and pools of MMSegmentation's heads would hold at one: :class:`ExportableModel` replaces them."""
    is_detector = not kind.endswith('Head')
    scope = 'mmdet' if is_detector else 'mmseg'
    pytest.importorskip(scope)
    init_default_scope(scope)
    neck = dict(type='FPN', in_channels=[8, 16, 24, 32], out_channels=16, num_outs=4)
    if is_detector:
        neck.update(num_outs=5, start_level=1, add_extra_convs='on_output' if kind == 'RetinaNet' else False)
    backbone = small_hosts.config(host, drop_path_rate=0.0)
    key = dict(RetinaNet='bbox_head', RPN='rpn_head').get(kind, 'decode_head')
    config = dict(type=kind if is_detector else 'EncoderDecoder', backbone=backbone, neck=neck, **{key: HEADS[kind]})
    if kind == 'RPN':
        config.update(train_cfg=dict(rpn={}), test_cfg=dict(rpn={}))
    torch.manual_seed(0)
    model = MODELS.build(config)
    check(Maps(model) if is_detector else ExportableModel(model), str(tmp_path / 'model.onnx'))
