# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Next-ViT: its averaged keys, its blocks, its norms."""

import goldens
import pytest
import small_hosts
import torch
from torch import nn
from twins import attend

from mmlinattn.attention import GlobalAttention, Grid, StageContext
from mmlinattn.backbones import nextvit_blocks
from mmlinattn.backbones.nextvit_blocks import AveragedKeysAttention, ConvBlock, PooledEmbed, ReLUMLP, TransformerBlock

ARCH = small_hosts.ARCHS['LinearNextViT']
BN = dict(type='BN', eps=1e-5)

# --- averaged keys ------------------------------------------------------------------------------


def patches(x, side):
    """Means of the pixels that are there, patch by patch: (B, H, W, C) -> (B, h, w, C)."""
    rows, columns = (-(-length // side) for length in x.shape[1:3])
    cells = [
        [x[:, side * i : side * i + side, side * j : side * j + side] for j in range(columns)] for i in range(rows)
    ]
    return torch.stack([torch.stack([cell.mean(dim=(1, 2)) for cell in row], dim=1) for row in cells], dim=1)


def affine(norm, x):
    """A fixed batch norm of the last axis."""
    return (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias


# as in graphs for all sizes
open_or_known = pytest.mark.parametrize('open_sizes', [False, True], ids=['known', 'open'])


@pytest.mark.parametrize('size', [(8, 8), (7, 9), (5, 13), (2, 2)], ids=str)
@pytest.mark.parametrize('reduction', ['sequence', 'grid'])
@open_or_known
def test_keys_are_those_of_averaged_tokens(size, reduction, open_sizes, monkeypatch):
    """As released: of r^2 tokens that follow each other, the rest at the end dropped. Or of patches of r x r tokens."""
    monkeypatch.setattr(nextvit_blocks, 'is_known', lambda *sizes: not open_sizes)
    attn = goldens.fill(AveragedKeysAttention(8, 2, 'hallucinated', 2, reduction, BN)).double().eval()
    x, count = torch.randn(2, *size, 8, dtype=torch.float64), size[0] * size[1] // 4
    tokens = x.flatten(1, 2)
    sequence = tokens[:, : 4 * count].unflatten(1, (count, 4)).mean(dim=2)[:, None]
    reduced = affine(attn.norm, sequence if reduction == 'sequence' else patches(x, 2))
    expected = attend(attn, tokens, Grid(*size), reduced.flatten(1, 2), Grid(*reduced.shape[1:3]))
    torch.testing.assert_close(attn(x, StageContext.of(x)), expected.unflatten(1, size))


def test_which_keys_are_averaged_how():
    """Those of quadratic attentions, where the stage reduces; hallucinated attention convolves over the keys' grid.
    Blocks without an attention may be named None."""

    def kinds(**options):
        modules = small_hosts.build('LinearNextViT', **options).modules()
        return [(m.reduction, m.ratio) for m in modules if isinstance(m, AveragedKeysAttention)]

    assert kinds() == [('grid', 3), ('grid', 2)]
    assert kinds(key_reduction='sequence') == [('sequence', 3), ('sequence', 2)]
    arch = dict(ARCH, key_reduction='sequence')
    assert kinds(arch=arch, stage_attns=(None, ['hallucinated'], [None, 'softmax'], 'softmax')) == [
        ('grid', 3),
        ('sequence', 2),
    ]
    assert kinds(stage_attns=(None, 'inline', [None, 'softmax'], 'softmax')) == [('grid', 2)]


# --- blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize('size', [(4, 6), (5, 7), (1, 1), (1, 4)], ids=str)
@open_or_known
def test_down_sampling_averages_the_pixels_that_are_there(size, open_sizes, monkeypatch):
    monkeypatch.setattr(nextvit_blocks, 'is_known', lambda *sizes: not open_sizes)
    embed = goldens.fill(PooledEmbed(3, 5, BN)).double().eval()
    x = torch.randn(2, *size, 3, dtype=torch.float64)
    expected = affine(embed.norm, patches(x, 2) @ embed.conv.weight[:, :, 0, 0].T)
    for learns in (True, False):  # without, the norm is part of the convolution
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(embed(x), expected)


def test_widths_of_attentions_are_three_quarters_in_whole_groups():
    """Rounded to the nearest, half a group up as in the release; stages without attentions keep their width."""
    arch = dict(ARCH, group_dim=8, embed_dims=(8, 24, 48, 56), num_heads=(1, 1, 1, 1))
    assert small_hosts.build('LinearNextViT', arch=arch).attn_dims == (8, 16, 40, 40)  # 18, 36 and 42


# --- norms --------------------------------------------------------------------------------------


def test_norms_by_option():
    def norms(**options):
        return list(small_hosts.build('LinearNextViT', 'rala', **options).out_norms)

    assert norms() == ['0', '1', '2', '3']
    assert norms(out_indices=(1, 2)) == ['0', '1', '2']  # a detector's pyramid may start at the second map
    assert norms(out_indices=(3,)) == ['3']  # a classifier
    assert norms(out_norm=False) == []
    assert norms(out_norm=False, stage_norms=True) == ['0', '1', '2']
    assert norms(stage_norms=False) == ['0', '1', '2', '3']
    assert norms(out_indices=(3,), stage_norms=True) == ['0', '1', '2', '3']


class Factor(nn.Module):
    """Stands for stochastic depth: each path has a factor of its own."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def test_each_branch_of_a_block_has_its_own_stochastic_depth():
    """Three quarters of a transformer block's rate for the attention, the rest for its convolution, all of it for the
    feed-forward network; convolution blocks have one rate. Then Eq. 6 with 2, 3 and 5 in place of what is dropped."""
    assert ConvBlock(8, 8, 4, ReLUMLP(8, 12), BN, 0.4).drop_path.drop_prob == 0.4
    attn, x = GlobalAttention(8, 2, 'softmax'), torch.randn(2, 3, 5, 8)
    block = goldens.fill(TransformerBlock(8, attn, 8, 12, 4, ReLUMLP(12, 6), BN, 0.4)).eval()
    paths = block.attn_drop_path, block.conv_drop_path, block.drop_path
    assert [path.drop_prob for path in paths] == pytest.approx([0.3, 0.1, 0.4])
    block.attn_drop_path, block.conv_drop_path, block.drop_path = Factor(2), Factor(3), Factor(5)
    context = StageContext.of(x)
    y = x + 2 * block.attn(affine(block.norm1, x), context)
    z = block.narrow(y)
    y = torch.cat((y, z + 3 * block.conv(z)), dim=-1)
    torch.testing.assert_close(block(x, context), y + 5 * block.ffn(affine(block.norm2, y)))
