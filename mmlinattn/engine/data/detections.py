# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Compute the confusion matrix and the precision-recall curve of detections."""

import contextlib
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class Boxes(NamedTuple):
    """Boxes of one image, either annotated objects or detections.

    Attributes:
        boxes: (n, 4) x1, y1, x2, y2 in pixels.
        labels: (n,) integers.
        scores: (n,) confidence of detections. Annotated objects have 1, or 0 if evaluation ignores them (crowds).
    """

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray


def objects_of(instances: Sequence[dict]) -> Boxes:
    """Return the annotated objects of an image from ``instances`` of MMDetection's ``get_data_info``."""
    boxes = np.array([each['bbox'] for each in instances], dtype=np.float64).reshape(-1, 4)
    labels = np.array([each['bbox_label'] for each in instances], dtype=np.int64)
    return Boxes(boxes, labels, np.array([float(not each.get('ignore_flag')) for each in instances]))


def count_confusion(matrix: np.ndarray, objects: Boxes, found: Boxes) -> None:
    """Add the counts of one image to a confusion matrix, in place.

    Objects and detections of any class are paired in the order of falling IoU, down to 0.5. Detections with a score
    below 0.3, and detections that overlap only an ignored object, are left out. ``matrix`` (classes + 1, classes + 1)
    has true classes in rows and predicted ones in columns; the last row and column are background.
    """
    from torchvision.ops import box_iou

    keep = found.scores >= 0.3
    boxes, labels = found.boxes[keep], found.labels[keep]
    ious = box_iou(torch.as_tensor(objects.boxes).double(), torch.as_tensor(boxes).double()).numpy()
    is_free, is_missed = np.ones(len(labels), dtype=bool), objects.scores > 0
    same_class = objects.labels[:, None] == labels[None]  # first among equal overlaps
    pairs = zip(*np.nonzero(ious >= 0.5))
    for row, column in sorted(pairs, key=lambda at: (ious[at], same_class[at]), reverse=True):
        if is_missed[row] and is_free[column]:
            matrix[objects.labels[row], labels[column]] += 1
            is_missed[row] = is_free[column] = False
    ignored = (ious[objects.scores == 0] >= 0.5).any(axis=0)
    np.add.at(matrix[:, -1], objects.labels[is_missed], 1)
    np.add.at(matrix[-1], labels[is_free & ~ignored], 1)


def precision_over_recall(
    objects: Sequence[Boxes], found: Sequence[Boxes], num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute precision over recall of boxes at IoU 0.5 with pycocotools.

    ``objects`` are the annotated objects and ``found`` the detections, one entry per image in the same order.

    Returns:
        tuple[np.ndarray, np.ndarray]: Precisions and score thresholds at 101 recalls, each of shape (101, classes); -1
        for classes without objects.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def index(images: Sequence[Boxes], is_truth: bool) -> COCO:
        annotations: list[dict] = []
        for image, boxes in enumerate(images):
            for (x1, y1, x2, y2), label, score in zip(*(part.tolist() for part in boxes)):
                entry = dict(image_id=image, category_id=label, score=score, iscrowd=int(is_truth and not score))
                # pycocotools takes id 0 for a missed object
                entry.update(id=len(annotations) + 1, bbox=[x1, y1, x2 - x1, y2 - y1], area=(x2 - x1) * (y2 - y1))
                annotations.append(entry)
        api = COCO()
        parts = dict(images=range(len(images)), categories=range(num_classes))
        api.dataset = {key: [dict(id=i) for i in ids] for key, ids in parts.items()}
        api.dataset['annotations'] = annotations
        api.createIndex()
        return api

    with contextlib.redirect_stdout(io.StringIO()):
        evaluator = COCOeval(index(objects, True), index(found, False), 'bbox')
        evaluator.params.iouThrs = np.array([0.5])
        evaluator.params.areaRng, evaluator.params.areaRngLbl = [[0, 1e10]], ['all']
        evaluator.params.maxDets = [max([len(each.labels) for each in found] + [1])]
        evaluator.evaluate()
        evaluator.accumulate()
    return evaluator.eval['precision'][0, :, :, 0, 0], evaluator.eval['scores'][0, :, :, 0, 0]
