# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Detectors with their heads as graphs: MMDetection's own detections at other sizes and batches, or an error."""

import pytest
import torch
from helpers.graphs import metadata_of
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmlinattn.tooling.export import FORMATS, Sizes, export_model
from mmlinattn.tooling.export.detectors import detector_graph
from mmlinattn.tooling.export.models import detection_deviation
from mmlinattn.tooling.export.onnx_nodes import nms_mask
from mmlinattn.utils.errors import RunError

pytest.importorskip('mmdet')

from helpers import small_detectors
from helpers.small_detectors import FAMILIES

SHAPES = [(1, 160, 192), (2, 130, 251)]
INF = float('inf')


def check(graph, model, shapes=SHAPES, tolerance=2e-3):
    """Compare the outputs of a graph with all detections of upstream's ``predict``, in order; the remaining rows are
    padding."""
    for batch, *size in shapes:
        images = torch.randn(batch, 3, *size)
        boxes, scores, labels, *masks = graph(images)
        for i, truth in enumerate(small_detectors.predict(model, images)):
            number = len(truth)
            assert number > 5
            near = (boxes[i][:number] - truth.bboxes).abs().amax(1) <= tolerance
            # rounding may move one box of a cascade to another level
            assert near.all() if tolerance == 0 else near.double().mean() >= 0.9
            torch.testing.assert_close(scores[i][:number], truth.scores, rtol=0, atol=1e-5)
            assert torch.equal(labels[i][:number], truth.labels)
            assert not scores[i][number:].any() and not boxes[i][number:].any() and (labels[i][number:] == -1).all()
            if masks:
                share = (paste(masks[0][i], boxes[i], size)[:number] == truth.masks).double().mean((1, 2))
                assert share.min() > 0.98


def paste(masks, boxes, size):
    """Resize masks to their boxes on the image, as docs/deploy.md does."""
    from mmdet.models.roi_heads.mask_heads.fcn_mask_head import _do_paste_mask

    return _do_paste_mask(masks[:, None], boxes, *size, skip_empty=False)[0] >= 0.5


@pytest.mark.parametrize('family', FAMILIES)
@torch.no_grad()
def test_selection_of_fixed_shape_gives_upstreams_detections(family):
    torch.manual_seed(1)
    model = small_detectors.build(family)
    check(detector_graph(model, divisor=32), model, SHAPES[1:], tolerance=0)


SLOW = [('CascadeRCNN', 'onnx'), ('MaskRCNN', 'openvino')]


@pytest.mark.parametrize(
    ('family', 'form'), [('FCOS', 'onnx'), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_files_hold_heads_of_detectors(family, form, tmp_path):
    """Compare at several sizes, down to the smallest. A low threshold finds boxes in noise."""
    for package in FORMATS[form].needs:
        pytest.importorskip(package)
    torch.manual_seed(1)
    model, path = small_detectors.build(family), tmp_path / f'graph{FORMATS[form].suffix}'
    cfg = Config(dict(model=dict(data_preprocessor=small_detectors.PREPROCESSOR)))
    export = export_model(model, cfg, path, form, Sizes(2, 96, 128, dynamic=True))
    assert len(export.errors) == 3 and max(export.errors.values()) < 1e-4
    graph = FORMATS[form].load(path)
    check(graph, model, [*SHAPES, (1, 32, 40)])
    meta, has_masks = metadata_of(form, path), 'mask_head' in FAMILIES[family].get('roi_head', ())
    assert meta['outputs'] == ['boxes', 'scores', 'labels', 'masks'][: 3 + has_masks]
    assert (meta['pad_size_divisor'], meta['score_threshold']) == (1, 0.05)
    assert meta['mask_threshold'] == (0.5 if has_masks else None)


def test_a_static_file_takes_its_shape_alone(tmp_path):
    pytest.importorskip('onnxruntime')
    model, cfg, path = small_detectors.build('RetinaNet'), Config(dict(model={})), tmp_path / 'graph.onnx'
    model.bbox_head.test_cfg.score_thr = 0.999  # no box of noise reaches it
    export_model(model, cfg, path, 'onnx', Sizes(1, 64, 96))
    graph = FORMATS['onnx'].load(path)
    boxes, scores, labels = graph(torch.randn(1, 3, 64, 96))
    assert boxes.shape == (1, 20, 4) and not boxes.any() and not scores.any() and (labels == -1).all()
    with pytest.raises(Exception, match='(?i)dimension'):
        graph(torch.randn(1, 3, 96, 96))


def test_the_neck_alone(tmp_path):
    model, cfg = small_detectors.build('FasterRCNN'), Config(dict(model={}))
    for form, options in (('openvino', dict(neck=True)), ('torchscript', {})):
        if form == 'openvino':
            pytest.importorskip('openvino')
        path = tmp_path / f'graph{FORMATS[form].suffix}'
        export = export_model(model, cfg, path, form, Sizes(1, 64, 96), **options)
        assert export.metadata['outputs'] == [f'feat{i}' for i in range(5)]


# --- unsupported ------------------------------------------------------------------------------------------------------


def altered(family, **changes):
    model = small_detectors.build(family)
    for path, value in changes.items():
        *parents, name = path.split('__')
        part = model
        for parent in parents:
            part = getattr(part, parent)
        setattr(part, name, value)
    return model


ANCHORS = FAMILIES['ATSS']['bbox_head']['anchor_generator']
GFL = dict(type='GFLHead', num_classes=3, in_channels=8, anchor_generator=ANCHORS)
SOFT = ConfigDict(nms_pre=60, max_per_img=20, score_thr=0.05, nms=dict(type='soft_nms', iou_threshold=0.5))


@pytest.mark.parametrize(
    ('model', 'part'),
    [
        (lambda: altered('RetinaNet', bbox_head__test_cfg=SOFT), 'RetinaHead'),
        (lambda: altered('RetinaNet', bbox_head__test_cfg__nms_pre=-1), 'RetinaHead'),
        (lambda: altered('FasterRCNN', roi_head__test_cfg=SOFT), 'StandardRoIHead'),
        (lambda: altered('FasterRCNN', roi_head__bbox_head=nn.Identity()), 'Identity'),
        (lambda: altered('FCOS', bbox_head=MODELS.build(GFL)), 'GFLHead'),
        (lambda: altered('MaskRCNN', roi_head__mask_head=nn.Identity()), 'Identity'),
        (lambda: altered('FasterRCNN', roi_head=nn.Identity()), 'Identity'),
        (lambda: nn.ModuleDict(dict(bbox_head=None, mask_head=nn.Identity())), 'ModuleDict'),  # as SOLO
    ],
)
def test_heads_without_a_writer_are_refused_by_name(model, part):
    init_default_scope('mmdet')
    with pytest.raises(RunError, match=rf'^there is no ONNX writer for {part} as it is configured\. MMDeploy.*--neck'):
        detector_graph(model())


# --- comparison of detections -----------------------------------------------------------------------------------------


def detections(number=20, images=2):
    corners = torch.rand(images, number, 2) * 100
    boxes = torch.cat((corners, corners + 20), dim=-1)
    scores = torch.rand(images, number).sort(descending=True).values + 0.1
    return [boxes, scores, torch.arange(number).expand(images, -1) % 3, torch.rand(images, number, 4, 4)]


def test_detections_may_change_order_but_not_values():
    expected = detections()
    assert detection_deviation(expected, expected) == 0
    order = torch.arange(20)
    order[[3, 4]] = order[[4, 3]]
    swapped = [part[:, order] for part in expected]
    assert detection_deviation(swapped, expected) == 0
    missing = [part.clone() for part in expected]
    for count, is_found in ((2, False), (3, True)):  # one in ten may be missing
        missing[0][:, -count:], missing[1][:, -count:], missing[2][:, -count:] = 0, 0, -1
        assert (detection_deviation(missing, expected) > 0.1) == is_found
    for i, change in enumerate((0.5, 0.01, 1, 0.01)):
        other = [part.clone() for part in expected]
        other[i] += change
        assert detection_deviation(other, expected) > 2e-3, i


def test_no_detections_and_detections_that_are_none():
    none = [torch.zeros(1, 3, 4), torch.zeros(1, 3), torch.full((1, 3), -1)]
    some = [torch.ones(1, 3, 4), torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.long)]
    assert detection_deviation(none, none) == 0
    assert detection_deviation(some, none) == INF and detection_deviation(none, some) > 0.1
    assert detection_deviation(some, [part[:, :2] for part in some]) == INF
    assert detection_deviation([some[0] * INF * 0, *some[1:]], some) == INF


def test_suppression_keeps_the_best_of_overlapping_boxes(tmp_path):
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 10, 10], [20, 0, 30, 10], [0, 0, 10, 4], [50, 50, 60, 60]])[None]
    scores = torch.tensor([[0.8, 0.9, 0.3, 0.7, 0.0]])
    assert nms_mask(boxes, scores, 0.5, 5).tolist() == [[0, 1, 1, 1, 0]]
    assert nms_mask(boxes, scores, 0.5, 2).tolist() == [[0, 1, 0, 1, 0]]
    many, falling = torch.cat((boxes[:, :1].expand(1, 99, 4), boxes[:, 2:3]), 1), torch.linspace(1, 0.1, 100)[None]
    assert nms_mask(many, falling, 0.5, 2)[0].nonzero().tolist() == [[0], [99]]  # behind 98 that are suppressed
    pytest.importorskip('onnxruntime')
    model, path = nn.Identity(), tmp_path / 'a.onnx'
    model.forward = lambda boxes: nms_mask(boxes, scores, 0.5, 5)
    FORMATS['onnx'].write(model, boxes, path, None, dict(outputs=['boxes']))
    assert FORMATS['onnx'].load(path)(boxes)[0].tolist() == [[0, 1, 1, 1, 0]]
