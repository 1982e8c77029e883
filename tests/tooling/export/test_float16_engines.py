# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Exported graphs in float16: every intermediate result is rounded to it, as in engines with half-precision kernels."""

import functools

import pytest
import torch
from helpers import graphs, small_backbones
from helpers.attentions import LINEAR
from torch.export import Dim

LARGEST = 1344  # pixels; the first stage has 112,896 tokens


class Rounded(torch.fx.Interpreter):
    """Interpreter of a float32 graph that rounds to float16 after each operator."""

    def run_node(self, node):
        return torch.utils._pytree.tree_map(round_to_half, super().run_node(node))


def round_to_half(x):
    if isinstance(x, float):
        return torch.tensor(x).half().item()
    return x.half().float() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x


def error_of_rounding(graph, *inputs):
    """Return the largest relative error of an output."""
    with torch.no_grad():
        found, exact = Rounded(graph).run(*inputs), graph(*inputs)
    errors = [(ours - theirs).norm() / theirs.norm() for ours, theirs in zip(found, exact)]
    return torch.stack(errors).max().item()


class Op(torch.nn.Module):
    def __init__(self, name, heads):
        super().__init__()
        self.call = functools.partial(LINEAR[name], num_heads=heads)

    def forward(self, *inputs):
        return (self.call(*inputs[:3], mask=inputs[3] if inputs[3:] else None),)


@pytest.mark.parametrize('masked', [False, True], ids=['', 'masked'])
@pytest.mark.parametrize('name', [name for name in LINEAR if 'rotary' not in name])  # its rows are 100,000 tokens long
def test_attentions(name, masked):
    """Sum 100,000 tokens of mean 1.2, which exceeds 65504; 1 / 100,000 is subnormal in float16."""

    def inputs(count):
        q, k, v = (1.2 + torch.randn(3, 1, count, 8)).unbind()
        mask = torch.rand(1, count) > 0.2
        return (q, k, v * mask[..., None], mask) if masked else (q, k, v)

    tokens = Dim('tokens', min=4)
    shapes = (tuple({1: tokens} for _ in inputs(4)),)
    graph = torch.export.export(Op(name, 2), inputs(64), dynamic_shapes=shapes).module()
    assert error_of_rounding(graph, *inputs((LARGEST // 4) ** 2)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize('backbone', graphs.BACKBONES)
def test_backbones(backbone):
    attns = small_backbones.mixes(backbone)[0]
    model = small_backbones.build(backbone, stage_attns=attns).eval()
    shapes = ({2: Dim('height', min=65, max=2048), 3: Dim('width', min=65, max=2048)},)
    graph = torch.export.export(model, (graphs.image((1, 128, 160)),), dynamic_shapes=shapes).module()
    # Hydra's result, rather than a step to it, is a sum over tokens: 66,950 of 112,896 tokens with these weights
    size = LARGEST // 2 if attns[0] == 'hydra' else LARGEST
    assert error_of_rounding(graph, graphs.image((1, size, size))) < 0.02
