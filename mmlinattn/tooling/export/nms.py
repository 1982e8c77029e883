# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Non-maximum suppression with an output of fixed shape, exported as ``NonMaxSuppression`` in ONNX graphs."""

import torch
import torchvision
from torch import Tensor
from torch.onnx import symbolic_helper


@torch.library.custom_op('mmlinattn::nms_mask', mutates_args=())
def nms_mask(boxes: Tensor, scores: Tensor, iou_threshold: float, max_kept: int) -> Tensor:
    """Return 1 for each box that non-maximum suppression keeps, and 0 for the others.

    Unlike a list of indices, this mask has a fixed shape.

    Args:
        boxes (Tensor): (B, N, 4), corners x1, y1, x2, y2.
        scores (Tensor): (B, N); boxes with a score of 0 or less are dropped first.
        iou_threshold (float): Largest overlap (IoU) with a better box.
        max_kept (int): Number of boxes to keep per image.

    Returns:
        Tensor: (B, N), in the dtype of ``scores``.
    """
    mask = torch.zeros_like(scores)
    for row, box, score in zip(mask, boxes, scores):
        order = score.argsort(descending=True)[: score.gt(0).sum()]
        number, kept = 0, order
        # worse boxes do not suppress better ones
        while number < len(order) and (not number or len(kept) < max_kept):
            number = max(10 * max_kept, 4 * number)
            index = order[:number]
            kept = index[torchvision.ops.nms(box[index], score[index], iou_threshold)[:max_kept]]
        row[kept] = 1
    return mask


@symbolic_helper.parse_args('v', 'v', 'f', 'i')
def _symbolic(g, boxes, scores, iou_threshold, max_kept):
    def constant(value, dtype=torch.long):
        return g.op('Constant', value_t=torch.tensor(value, dtype=dtype))

    # from opset 13 on axes are inputs; the threshold of 0 drops scores of 0
    limits = constant([max_kept]), constant([iou_threshold], torch.float), constant([0.0], torch.float)
    kept = g.op('NonMaxSuppression', boxes, g.op('Unsqueeze', scores, constant([1])), *limits)
    index = g.op('Gather', kept, constant([0, 2]), axis_i=1)  # image, class, box -> image, box
    count = g.op('Slice', g.op('Shape', kept), constant([0]), constant([1]))
    ones = g.op('Expand', constant([1.0], torch.float), count)
    nothing = g.op('Mul', scores, constant(0.0, torch.float))
    return g.op('ScatterND', nothing, index, ones).setType(scores.type())


def register_onnx_symbolic(opset: int) -> None:
    """Let ``torch.onnx.export(..., dynamo=False)`` write :func:`nms_mask`."""
    torch.onnx.register_custom_op_symbolic('mmlinattn::nms_mask', _symbolic, opset)
