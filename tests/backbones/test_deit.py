# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The plain backbone: forms of its output, and blocks counted from the end."""

import pytest
import torch
from small_hosts import ARCHS, build, image


@pytest.mark.parametrize('out_type', ['raw', 'cls_token', 'featmap', 'avg_featmap'])
def test_outputs_of_deit(out_type):
    model, raw = (build('LinearDeiT', 'inline', out_type=kind).eval() for kind in (out_type, 'raw'))
    ((out,), (tokens,)) = model(x := image()), raw(x)
    assert tokens.shape == (2, 1 + 4 * 6, 16)
    patches = tokens[:, 1:]
    expected = dict(
        raw=tokens,
        cls_token=tokens[:, 0],
        featmap=patches.transpose(1, 2).unflatten(2, (4, 6)),
        avg_featmap=patches.mean(dim=1),
    )
    torch.testing.assert_close(out, expected[out_type])


@pytest.mark.parametrize(('given', 'blocks'), [(-1, [1]), (0, [0]), ([0, 1], [0, 1]), ((-2,), [0]), ((-2, -1), [0, 1])])
def test_out_indices_of_deit(given, blocks):
    model = build('LinearDeiT', 'focused', out_indices=given)
    assert model.feature_info == [dict(stage=i, channels=16, stride=16) for i in blocks]
    assert len(model(image())) == len(blocks) and len(model.blocks) == blocks[-1] + 1


@pytest.mark.parametrize('bias', [True, False])
def test_the_bias_of_projections_is_the_archs(bias):
    model = build('LinearDeiT', 'rala', arch=dict(ARCHS['LinearDeiT'], qkv_bias=bias))
    assert [block.attn.qkv.bias is not None for block in model.blocks] == [bias, bias]
    assert all(block.attn.proj.bias is not None for block in model.blocks)
