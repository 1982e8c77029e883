# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rewrite linear layers of ONNX graphs."""

from collections import Counter
from typing import Any, Optional

import numpy as np


def split_products(model: Any) -> None:
    """Split the weights of linear layers instead of their results: one product for each of q, k and v.

    ONNX Runtime copies a tensor to split it along its last axis.

    Args:
        model (onnx.ModelProto): Changed in place: ``Split(Add(MatMul(x, weight), bias))`` of (B, N, C) tokens.
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
