# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Overlaps and NMS of rotated boxes beside OpenCV's intersection and areas known in closed form."""

import cv2
import numpy as np
import pytest
import torch
from helpers.cases import uniform
from mmcv import ops

PI = torch.pi


def boxes(seed, count):
    made = uniform(seed, count, 5) * torch.tensor([60.0, 60, 50, 20, 2 * PI]) + torch.tensor([0.0, 0, 2, 2, -PI])
    made[::3, 4] = 0
    return made


def intersection(a, b):
    a, b = (((x, y), (w, h), np.degrees(angle)) for x, y, w, h, angle in (a.tolist(), b.tolist()))
    points = cv2.rotatedRectangleIntersection(a, b)[1]
    return 0.0 if points is None else cv2.contourArea(cv2.convexHull(points))


@pytest.mark.parametrize('mode', ['iou', 'iof'])
@pytest.mark.parametrize('clockwise', [True, False])
def test_overlaps_are_those_of_opencv(mode, clockwise, ext, monkeypatch):
    monkeypatch.setattr(ext, 'ROTATED_PAIRS', 50)
    a, b = boxes(1, 24), boxes(2, 17)
    common = torch.tensor([[intersection(x, y) for y in b] for x in a])
    areas = [(x[:, 2] * x[:, 3]) for x in (a, b)]
    expected = common / (areas[0][:, None] + (areas[1] - common if mode == 'iou' else 0))
    turn = torch.tensor([1.0, 1, 1, 1, 1 if clockwise else -1])
    found = ops.box_iou_rotated(a * turn, b * turn, mode, clockwise=clockwise)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    aligned = ops.box_iou_rotated(a[:17] * turn, b * turn, mode, aligned=True, clockwise=clockwise)
    torch.testing.assert_close(aligned, found[:17].diagonal())
    assert 50 < (found > 0).sum() < found.numel()


@pytest.mark.parametrize(
    ('a', 'b', 'overlap'),
    [
        ((500, 300, 40, 20, 0.7), (500, 300, 40, 20, 0.7), 1),
        ((500, 300, 40, 20, 0.7), (500, 300, 20, 40, 0.7 + PI / 2), 1),
        ((0, 0, 1, 1, 0), (0, 0, 1, 1, PI / 4), 0.5**0.5),  # a regular octagon
        ((0, 0, 4, 2, 0.3), (0, 0, 2, 1, 0.3), 0.25),
        ((0, 0, 2, 2, 0), (2, 0, 2, 2, 0), 0),
        ((0, 0, 2, 2, 0), (0, 0, 0, 2, 1), 0),
    ],
)
def test_overlaps_in_closed_form(a, b, overlap):
    a, b = torch.tensor([a]), torch.tensor([b])
    for first, second in ((a, b), (b, a)):
        found = ops.box_iou_rotated(first.float(), second.float())
        torch.testing.assert_close(found, torch.tensor([[float(overlap)]]), rtol=0, atol=1e-6)


def test_no_boxes():
    assert ops.box_iou_rotated(boxes(1, 3), boxes(1, 0)).shape == (3, 0)
    assert ops.box_iou_rotated(boxes(1, 0), boxes(1, 3)).shape == (0, 3)


@pytest.mark.parametrize('labels', [None, torch.arange(60.0) % 2])
def test_nms_keeps_the_best_of_overlapping_boxes(labels):
    dets, scores = boxes(5, 60), uniform(6, 60)
    overlaps, left, expected = ops.box_iou_rotated(dets, dets), scores.argsort(descending=True).tolist(), []
    while left:
        best, *left = left
        expected.append(best)
        left = [i for i in left if overlaps[best, i] < 0.3]
    found, kept = ops.nms_rotated(dets, scores, 0.3, labels)
    assert kept.tolist() == expected and 5 < len(kept) < 55
    assert torch.equal(found, torch.cat((dets, scores[:, None]), dim=1)[kept])
