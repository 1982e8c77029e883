# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Confusion matrix and precision over recall of boxes."""

import numpy as np
import pytest

from mmlinattn.engine.data.detections import Boxes, count_confusion, objects_of, precision_over_recall

# an object of class 0, one of class 1, a crowd of class 1
OBJECTS = objects_of([
    dict(bbox=[0, 0, 10, 10], bbox_label=0, ignore_flag=0),
    dict(bbox=[20, 20, 30, 30], bbox_label=1, ignore_flag=0),
    dict(bbox=[50, 50, 90, 90], bbox_label=1, ignore_flag=1),
])  # fmt: skip


def found(*entries):
    boxes = np.array([entry[0] for entry in entries], float).reshape(-1, 4)
    return Boxes(boxes, np.array([e[1] for e in entries], int), np.array([e[2] for e in entries], float))


@pytest.mark.parametrize(
    ('entries', 'cells'),
    [
        ([], {(0, 2): 1, (1, 2): 1}),
        ([([0, 0, 10, 9], 0, 0.9), ([20, 20, 30, 31], 1, 0.9)], {(0, 0): 1, (1, 1): 1}),
        ([([0, 0, 10, 9], 1, 0.9)], {(0, 1): 1, (1, 2): 1}),  # another class
        ([([0, 0, 10, 9], 0, 0.2)], {(0, 2): 1, (1, 2): 1}),  # a low score
        ([([0, 0, 10, 4], 0, 0.9)], {(0, 2): 1, (2, 0): 1, (1, 2): 1}),  # beside the object
        # the second box of an object is a false one; of two that overlap alike, that of its class counts
        ([([0, 0, 10, 10], 1, 0.9), ([0, 0, 10, 10], 0, 0.8)], {(0, 0): 1, (2, 1): 1, (1, 2): 1}),
        ([([50, 50, 90, 90], 0, 0.9)], {(0, 2): 1, (1, 2): 1}),  # a crowd is neither missed nor false
    ],
)
def test_confusion_of_boxes(entries, cells):
    matrix, expected = np.zeros((3, 3)), np.zeros((3, 3))
    for cell, count in cells.items():
        expected[cell] = count
    count_confusion(matrix, OBJECTS, found(*entries))
    np.testing.assert_array_equal(matrix, expected)


def test_precision_over_recall():
    """Two objects of class 0: found, not found, with a false box between them in score. Class 1: all. Class 2: none."""
    first = objects_of([dict(bbox=[0, 0, 10, 10], bbox_label=0), dict(bbox=[40, 40, 50, 50], bbox_label=0)])
    boxes = found(([0, 0, 10, 10], 0, 0.9), ([70, 70, 80, 80], 0, 0.8), ([40, 40, 50, 50], 0, 0.7))
    second = objects_of([dict(bbox=[0, 0, 10, 10], bbox_label=1)])
    precision, scores = precision_over_recall([first, second], [boxes, found(([0, 0, 10, 10], 1, 0.6))], 3)
    assert precision.shape == scores.shape == (101, 3)
    np.testing.assert_allclose(precision[[0, 50, 51, 100], 0], [1, 1, 2 / 3, 2 / 3])
    np.testing.assert_allclose(scores[[50, 51], 0], [0.9, 0.7])
    np.testing.assert_allclose(precision[:, 1:], [[1, -1]] * 101)
    assert (precision_over_recall([first], [found()], 3)[0][:, 0] == 0).all()
