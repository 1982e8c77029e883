# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The plain backbone: its outputs, blocks and what is frozen of them."""

import pytest
import small_hosts
import torch
from small_hosts import ARCHS, image, loss

from mmlinattn.checkpoints.states import fit_backbone


def test_norms_of_outputs_leave_the_tokens_of_later_blocks_alone():
    plain = small_hosts.build('LinearDeiT', 'softmax', out_norm=False, out_indices=(0, 1), out_type='raw').eval()
    normed = small_hosts.build('LinearDeiT', 'softmax', out_norm=True, out_indices=(0, 1), out_type='raw').eval()
    normed.load_state_dict(plain.state_dict(), strict=False)
    torch.nn.init.uniform_(normed.out_norm.weight, 2, 3)
    with torch.no_grad():
        for out, raw in zip(normed(x := image(1)), plain(x), strict=True):
            torch.testing.assert_close(out, normed.out_norm(raw))


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1, 2])
def test_frozen_blocks_of_deit(frozen_stages):
    model = small_hosts.build('LinearDeiT', 'focused', frozen_stages=frozen_stages)
    frozen = {name.rsplit('.', 1)[0].split('.')[0] for name, p in model.named_parameters() if not p.requires_grad}
    assert ('cls_token' in frozen) == ('patch_embeds' in frozen) == ('position_table' in frozen) == (frozen_stages >= 0)
    for i, block in enumerate(model.blocks):
        assert all(p.requires_grad != (i < frozen_stages) for p in block.parameters())
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    model.eval().train()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert [block.training for block in model.blocks] == [i >= frozen_stages for i in range(2)]


@pytest.mark.parametrize('out_type', ['raw', 'cls_token', 'featmap', 'avg_featmap'])
def test_outputs_of_deit(out_type):
    model = small_hosts.build('LinearDeiT', 'inline', out_type=out_type).eval()
    raw = small_hosts.build('LinearDeiT', 'inline', out_type='raw').eval()
    x = image()
    ((out,), (tokens,)) = model(x), raw(x)
    assert tokens.shape == (2, 1 + 4 * 6, 16)
    patches = tokens[:, 1:]
    expected = dict(
        raw=tokens,
        cls_token=tokens[:, 0],
        featmap=patches.transpose(1, 2).unflatten(2, (4, 6)),
        avg_featmap=patches.mean(dim=1),
    )
    torch.testing.assert_close(out, expected[out_type])


@pytest.mark.parametrize('out_indices', [-1, 0, (0, 1), (-2,), (-2, -1)], ids=str)
@pytest.mark.parametrize('out_norm', [True, False])
def test_out_indices_of_deit(out_indices, out_norm):
    model = small_hosts.build('LinearDeiT', 'focused', out_indices=out_indices, out_norm=out_norm).train()
    outs = model(image())
    assert len(outs) == (1 if isinstance(out_indices, int) else len(out_indices))
    loss(outs).backward()
    assert all(p.grad is not None for p in model.parameters())
    blocks = {-1: [1], 0: [0], (0, 1): [0, 1], (-2,): [0], (-2, -1): [0, 1]}[out_indices]
    assert model.feature_info == [dict(stage=i, channels=16, stride=16) for i in blocks]


def test_stochastic_depth_of_deit():
    """Linear over all blocks, those that are not built included; 0 is none, where the arch has some."""
    arch = dict(ARCHS['LinearDeiT'], depths=(5,), drop_path_rate=0.2)
    whole, last = range(5), [0.0, 0.05, 0.1, 0.15, 0.2]
    for options, expected in (
        ({}, last),
        (dict(drop_path_rate=0.4), [2 * rate for rate in last]),
        (dict(drop_path_rate=0), [0.0] * 5),
        (dict(out_indices=(0, 2)), last[:3]),
    ):
        model = small_hosts.build('LinearDeiT', 'softmax', arch=arch, **options)
        found = [getattr(model.blocks[i].drop_path, 'drop_prob', 0.0) for i in whole[: len(model.blocks)]]
        assert found == pytest.approx(expected), options


def test_deit_without_position_table_is_frozen_as_with_one():
    arch = dict(ARCHS['LinearDeiT'], absolute_position=False)
    model = small_hosts.build('LinearDeiT', 'softmax', arch=arch, frozen_stages=1).train()
    frozen = {name.split('.')[0] for name, p in model.named_parameters() if not p.requires_grad}
    assert model.position_table is None and frozen == {'patch_embeds', 'cls_token', 'blocks'}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if name.startswith(('blocks.1.', 'out_norm.'))
    }


@pytest.mark.parametrize('bias', [True, False])
def test_the_bias_of_projections_is_the_archs(bias):
    model = small_hosts.build('LinearDeiT', 'rala', arch=dict(ARCHS['LinearDeiT'], qkv_bias=bias))
    assert [block.attn.qkv.bias is not None for block in model.blocks] == [bias, bias]
    assert all(block.attn.proj.bias is not None for block in model.blocks)


def test_blocks_with_numbers_of_two_digits_are_left_out_in_silence():
    """10 and 11 are not built, as 1 is."""
    arch = dict(ARCHS['LinearDeiT'], depths=(12,))
    whole, part = (small_hosts.build('LinearDeiT', 'rala', arch=arch, out_indices=last) for last in (-1, 1))
    _, report = fit_backbone(part, whole.state_dict())
    assert report.missing == report.mismatched == report.unexpected == []
    assert {key.split('.')[1] for key in report.ignored} == {str(i) for i in range(2, 12)}
