# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write non-maximum suppression of fixed shape to ONNX graphs, and rewrite their linear layers."""

from collections import Counter
from typing import Any, Optional

import numpy as np
import torch
import torchvision
from torch import Tensor
from torch.onnx import symbolic_helper


@torch.library.custom_op('mmlinattn::nms_mask', mutates_args=())
def nms_mask(boxes: Tensor, scores: Tensor, iou_threshold: float, max_kept: int) -> Tensor:
    """Return 1 for each box that non-maximum suppression keeps, and 0 for the others: (B, N), in the dtype of scores.

    Args:
        boxes (Tensor): (B, N, 4), corners x1, y1, x2, y2.
        scores (Tensor): (B, N); boxes with a score of 0 or less are dropped first.
        iou_threshold (float): Largest overlap (IoU) with a better box.
        max_kept (int): Number of boxes to keep per image.
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


def split_products(model: Any) -> None:
    """Split the weights of linear layers instead of their results, in place: one product for each of q, k and v.

    ONNX Runtime would copy ``Split(Add(MatMul(x, weight), bias))`` of (B, N, C) tokens, along the last axis.
    """
    from onnx import helper, numpy_helper
    from onnxscript.optimizer import remove_unused_nodes

    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants |= {
        node.output[0]: node.attribute[0].t
        for node in graph.node
        if node.op_type == 'Constant' and node.attribute[0].name == 'value'
    }
    uses = Counter([out.name for out in graph.output] + [name for node in graph.node for name in node.input])
    makers = {name: node for node in graph.node for name in node.output if uses[name] == 1}
    nodes = []
    for node in graph.node:
        layer = _linear_layer(node, makers, constants)
        if layer is None:
            nodes.append(node)
            continue
        x, *arrays = layer
        ends = np.cumsum(numpy_helper.to_array(constants[node.input[1]]))[:-1]
        weights, biases = (np.split(numpy_helper.to_array(array), ends, axis=-1) for array in arrays)
        for out, weight, bias in zip(node.output, weights, biases):
            names = [f'{out}.weight', f'{out}.bias']
            graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(weight), names[0]))
            graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(bias), names[1]))
            nodes.append(helper.make_node('MatMul', [x, names[0]], [f'{out}.product']))
            nodes.append(helper.make_node('Add', [f'{out}.product', names[1]], [out]))
    del graph.node[:]
    graph.node.extend(nodes)
    remove_unused_nodes(model)


def _linear_layer(split: Any, makers: dict, constants: dict) -> Optional[tuple]:
    """Return input name, weight (C, C') and bias (C',) of the linear layer before a ``Split`` node; None for others."""
    if split.op_type != 'Split' or len(split.input) < 2 or split.input[1] not in constants:
        return None
    axes = [attribute.i for attribute in split.attribute if attribute.name == 'axis']
    add = makers.get(split.input[0])
    if add is None or add.op_type != 'Add' or axes not in ([2], [-1]):
        return None
    for product, bias in (add.input, reversed(add.input)):
        matmul = makers.get(product)
        if matmul is None or matmul.op_type != 'MatMul' or not {matmul.input[1], bias} <= constants.keys():
            continue
        layer = constants[matmul.input[1]], constants[bias]
        if [len(array.dims) for array in layer] == [2, 1]:
            return matmul.input[0], *layer
    return None
