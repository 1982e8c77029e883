# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Detections beside the objects of a data set: confusion matrix, and precision over recall."""

import contextlib
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class Boxes(NamedTuple):
    """Boxes of an image. Objects have a score of 1, or 0 if evaluation ignores them (crowds)."""

    boxes: np.ndarray  # (n, 4) x1, y1, x2, y2 in pixels
    labels: np.ndarray  # (n,)
    scores: np.ndarray  # (n,)


def objects_of(instances: Sequence[dict]) -> Boxes:
    """Return the objects of an image from ``instances`` of MMDetection's ``get_data_info``."""
    boxes = np.array([each['bbox'] for each in instances], dtype=np.float64).reshape(-1, 4)
    labels = np.array([each['bbox_label'] for each in instances], dtype=np.int64)
    return Boxes(boxes, labels, np.array([float(not each.get('ignore_flag')) for each in instances]))


def count_confusion(
    matrix: np.ndarray, objects: Boxes, found: Boxes, score_thr: float = 0.3, iou_thr: float = 0.5
) -> None:
    """Add an image to a confusion matrix of shape (classes + 1, classes + 1), rows true, the last of each background.

    Pairs are matched by falling IoU, of any classes. Detections that match an ignored object alone are left out.
    """
    from torchvision.ops import box_iou

    keep = found.scores >= score_thr
    boxes, labels = found.boxes[keep], found.labels[keep]
    ious = box_iou(torch.as_tensor(objects.boxes).double(), torch.as_tensor(boxes).double()).numpy()
    is_free, is_missed = np.ones(len(labels), dtype=bool), objects.scores > 0
    # of the same class first, where boxes overlap alike
    same = objects.labels[:, None] == labels[None]
    rows, columns = np.nonzero(ious >= iou_thr)
    for row, column in sorted(zip(rows, columns), key=lambda at: (ious[at], same[at]), reverse=True):
        if is_missed[row] and is_free[column]:
            matrix[objects.labels[row], labels[column]] += 1
            is_missed[row] = is_free[column] = False
    ignored = (ious[objects.scores == 0] >= iou_thr).any(axis=0)
    np.add.at(matrix[:, -1], objects.labels[is_missed], 1)
    np.add.at(matrix[-1], labels[is_free & ~ignored], 1)


def precision_over_recall(
    objects: Sequence[Boxes], found: Sequence[Boxes], num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate boxes at IoU 0.5 with pycocotools.

    Args:
        objects (Sequence[Boxes]): Objects by image.
        found (Sequence[Boxes]): Detections by image.
        num_classes (int): Number of classes.

    Returns:
        tuple[np.ndarray, np.ndarray]: Precision and score at 101 recalls, of shape (101, classes); -1 for classes
        without object.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def entries(images: Sequence[Boxes]):
        for image, (boxes, labels, scores) in enumerate(images):
            for (x1, y1, x2, y2), label, score in zip(boxes.tolist(), labels.tolist(), scores.tolist()):
                size = x2 - x1, y2 - y1
                yield dict(image_id=image, category_id=label, bbox=[x1, y1, *size], area=size[0] * size[1], score=score)

    truth, results = COCO(), COCO()
    categories = [dict(id=k, name=str(k)) for k in range(num_classes)]
    for api, images, is_truth in ((truth, objects, True), (results, found, False)):
        annotations = [
            dict(entry, id=i, iscrowd=int(is_truth and not entry['score']))
            for i, entry in enumerate(entries(images), start=1)  # pycocotools takes id 0 for a missed object
        ]
        api.dataset = dict(
            images=[dict(id=i) for i in range(len(images))], annotations=annotations, categories=categories
        )
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        results.createIndex()
        evaluator = COCOeval(truth, results, 'bbox')
        evaluator.params.iouThrs = np.array([0.5])
        evaluator.params.areaRng, evaluator.params.areaRngLbl = [[0, 1e10]], ['all']
        evaluator.params.maxDets = [max([len(each.labels) for each in found] + [1])]
        evaluator.evaluate()
        evaluator.accumulate()
    return evaluator.eval['precision'][0, :, :, 0, 0], evaluator.eval['scores'][0, :, :, 0, 0]
