# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Options of RAVLT, windows of Swin, outputs of the plain backbone."""

import pytest
import torch
from helpers import goldens
from helpers.small_backbones import ARCHS, build, image

from mmlinattn.backbones import RAVLT

ARCH = ARCHS['RAVLT']


@pytest.mark.parametrize('options', [dict(cpe=False), dict(rotary=False), dict(local_kernel=None)], ids=str)
def test_ablations_of_the_paper_are_arguments(options):
    default, model, x = goldens.fill(RAVLT(ARCH)), RAVLT(ARCH, norm_eval=True, **options).train(), image()
    state, left = default.state_dict(), model.state_dict()
    assert any('.position.' in key for key in left) is ('cpe' not in options)
    assert any('.local.' in key for key in left) is ('local_kernel' not in options)
    assert (model.stage_context(0, torch.zeros(1, 8, 8, 8)).rotary is None) is ('rotary' in options)
    model.load_state_dict({key: state[key] for key in left})
    outs = model(x)
    sum(out.square().mean() for out in outs).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert (model.eval()(x)[-1] - default.eval()(x)[-1]).abs().max() > 1e-3


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_angles_are_no_numbers_of_half_precision(dtype):
    """Store angles in float32 or better, as bfloat16 counts only to 256."""
    table = RAVLT(ARCH).stage_context(1, torch.zeros(1, 2, 300, 16, dtype=dtype)).rotary
    assert table.dtype == torch.promote_types(dtype, torch.float32) and len(table.unique(dim=0)) == 600


def test_window_size():
    """Give linear blocks the whole map by None. Position tables have the size of the window or the trained one."""

    def built(window_size):
        attns = ('focused', 'focused', ['focused', 'softmax'], 'softmax')
        model = build('LinearSwin', window_size=window_size, stage_attns=attns)
        blocks = [block.attn for stage in model.stages for block in stage]
        return [attn.window for attn in blocks], [attn.mixer.position.grid for attn in blocks[:3]]

    trained = [(7, 7), (4, 4), (3, 3)]
    assert built('trained') == ([*trained, (3, 3), (3, 3)], trained)
    assert built(None) == ([None, None, None, (3, 3), (3, 3)], trained)
    assert built(5) == ([(5, 5)] * 5, [(5, 5)] * 3)
    expected = [(9, 9), None, (3, 3), (3, 3), (2, 2)], [(9, 9), (4, 4), (3, 3)]
    assert built((9, None, 'trained', 2)) == built([9, None, 'trained', 2]) == expected


def test_small_windows_of_swin_shift_in_every_second_block():
    arch = dict(ARCHS['LinearSwin'], depths=(2, 3, 2, 1))
    attns = ('softmax', 'hallucinated', ['inline', 'rala'], 'rala')
    model = build('LinearSwin', arch=arch, stage_attns=attns)
    shifted = [[block.attn.shift for block in stage] for stage in model.stages]
    assert shifted == [[False, True], [False, True, False], [False, False], [False]]
    biased = [[block.attn.relative_bias is not None for block in stage] for stage in model.stages]
    assert biased == [[True] * 2, [True] * 3, [False] * 2, [False]]


@pytest.mark.parametrize('out_type', ['raw', 'cls_token', 'featmap', 'avg_featmap'])
def test_outputs_of_deit(out_type):
    model, raw = (build('LinearDeiT', 'inline', out_type=kind).eval() for kind in (out_type, 'raw'))
    ((out,), (tokens,)) = model(x := image()), raw(x)
    assert tokens.shape == (2, 1 + 4 * 6, 16)
    patches = tokens[:, 1:]
    expected = dict(raw=tokens, cls_token=tokens[:, 0], avg_featmap=patches.mean(dim=1))
    expected['featmap'] = patches.transpose(1, 2).unflatten(2, (4, 6))
    torch.testing.assert_close(out, expected[out_type])


@pytest.mark.parametrize(('given', 'blocks'), [(-1, [1]), (0, [0]), ([0, 1], [0, 1]), ((-2,), [0]), ((-2, -1), [0, 1])])
def test_out_indices_of_deit(given, blocks):
    model = build('LinearDeiT', 'focused', out_indices=given)
    assert [(info['stage'], info['channels'], info['stride']) for info in model.feature_info] == [
        (i, 16, 16) for i in blocks
    ]
    assert len(model(image())) == len(blocks) and len(model.blocks) == blocks[-1] + 1


@pytest.mark.parametrize('bias', [True, False])
def test_the_bias_of_projections_is_the_archs(bias):
    model = build('LinearDeiT', 'rala', arch=dict(ARCHS['LinearDeiT'], qkv_bias=bias))
    assert [block.attn.qkv.bias is not None for block in model.blocks] == [bias, bias]
    assert all(block.attn.proj.bias is not None for block in model.blocks)
