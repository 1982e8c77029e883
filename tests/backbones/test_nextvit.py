# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Next-ViT: the released files, its averaged keys, its blocks, and norms that feed the next stage."""

import functools
import re

import pytest
import torch
from helpers import goldens, small_backbones
from helpers.references import attend
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm
from torch import nn

from mmlinattn.attention import GlobalAttention, Grid, StageContext
from mmlinattn.backbones import LinearNextViT
from mmlinattn.backbones.nextvit_blocks import AveragedKeysAttention, ConvBlock, PooledEmbed, ReLUMLP, TransformerBlock
from mmlinattn.checkpoints.fit import compare
from mmlinattn.checkpoints.loading import load_pretrained
from mmlinattn.checkpoints.states import backbone_state
from mmlinattn.ops import maps

ARCH = small_backbones.ARCHS['LinearNextViT']
BN = dict(type='BN', eps=1e-5)
COMPACT = dict(ARCH, ffn=dict(type='compact'), stage_attns=('hallucinated',) * 4)


@functools.cache
def file():
    return goldens.state_dict('softmax_nextvit_s')


def test_released_dense_backbones(tmp_path):
    state = {key: value for key, value in file().items() if not key.startswith('proj_head')}
    for i, dim in enumerate((96, 256, 512, 1024)):  # a norm per stage, and an unused fourth norm in the list
        for key in (f'extra_norm_list.{i}.{role}' for role in ('weight', 'bias', 'running_mean', 'running_var')):
            state[key] = goldens.weight(key, (dim,))
    torch.save({'model': state}, tmp_path / 'released.pth')
    model = LinearNextViT('softmax-small')
    report = load_pretrained(model, str(tmp_path / 'released.pth'), logger='silent')
    assert not report.missing and not report.unexpected and not report.mismatched and not report.ignored
    model.double().eval()
    x = torch.randn(1, 3, 70, 99, dtype=torch.float64)
    with torch.no_grad():
        outs = model(x)
        # stage by stage: the result of a norm is an output and the input of the next stage
        x = x.permute(0, 2, 3, 1)
        for i, out in enumerate(outs):
            x = model.patch_embeds[i](x)
            for block in model.stages[i]:
                x = block(x, StageContext.of(x))
            key = 'norm' if i == 3 else f'extra_norm_list.{i}'
            roles = 'running_mean', 'running_var', 'weight', 'bias'
            mean, var, weight, bias = (state[f'{key}.{role}'].double() for role in roles)
            x = (x - mean) / (var + 1e-5).sqrt() * weight + bias
            torch.testing.assert_close(out, x.permute(0, 3, 1, 2))


@pytest.mark.parametrize(('size', 'params', 'rate'), [('small', 31.7, 0.1), ('base', 44.8, 0.2), ('large', 57.8, 0.2)])
def test_files_of_every_size_load(size, params, rate):
    """Load files of each size. The third stage has groups of five blocks, and files count blocks across stages."""
    with torch.device('meta'):
        model = LinearNextViT(f'softmax-{size}', out_indices=(3,))
    assert model.drop_paths[-1][-1] == pytest.approx(rate)

    def shapes(state):
        return {key: value.shape for key, value in state.items() if not key.endswith('num_batches_tracked')}

    # published with their second digit cut off; a linear classifier has 1.025 M
    assert params <= sum(p.numel() for p in model.parameters()) / 1e6 + 1.025 < params + 0.1
    # the small model's keys, with its second group of the third stage repeated
    middle, state = 12, {}
    more = model.depths[2] - 10
    for key, value in file().items():
        block = re.match(r'features\.(\d+)\.', key)
        for shift in range(0, more + 1, 5) if block and middle <= int(block[1]) < middle + 5 else (more,):
            number = int(block[1]) + shift * (int(block[1]) >= middle) if block else 0
            state[re.sub(r'^features\.\d+', f'features.{number}', key)] = value
    backbone, head, dropped = backbone_state(state, 'file')
    assert shapes(compare(model, backbone).weights) == shapes(model.state_dict())
    assert set(head) == {'head.fc.weight', 'head.fc.bias'} and not dropped


def patches(x, side):
    """Average a map over patches cropped at its border: (B, H, W, C) -> (B, h, w, C)."""
    rows, columns = (-(-length // side) for length in x.shape[1:3])
    means = [
        [x[:, side * i : side * (i + 1), side * j : side * (j + 1)].mean(dim=(1, 2)) for j in range(columns)]
        for i in range(rows)
    ]
    return torch.stack([torch.stack(row, dim=1) for row in means], dim=1)


def affine(norm, x):
    return (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias


# as in graphs for all sizes
static_or_dynamic = pytest.mark.parametrize('is_dynamic', [False, True], ids=['static', 'dynamic'])


@pytest.mark.parametrize('size', [(8, 8), (7, 9), (5, 13), (2, 2)], ids=str)
@pytest.mark.parametrize('reduction', ['sequence', 'grid'])
@static_or_dynamic
def test_keys_are_those_of_averaged_tokens(size, reduction, is_dynamic, monkeypatch):
    """Average r^2 consecutive tokens and drop the remainder, as the release does, or patches of r x r tokens."""
    monkeypatch.setattr(maps, 'is_known', lambda *sizes: not is_dynamic)
    attn = goldens.fill(AveragedKeysAttention(8, 2, 'hallucinated', 2, reduction, BN)).double().eval()
    x, count = torch.randn(2, *size, 8, dtype=torch.float64), size[0] * size[1] // 4
    tokens = x.flatten(1, 2)
    sequence = tokens[:, : 4 * count].unflatten(1, (count, 4)).mean(dim=2)[:, None]
    reduced = affine(attn.norm, sequence if reduction == 'sequence' else patches(x, 2))
    expected = attend(attn, tokens, Grid(*size), reduced.flatten(1, 2), Grid(*reduced.shape[1:3]))
    torch.testing.assert_close(attn(x, StageContext.of(x)), expected.unflatten(1, size))
    attn.q = nn.Sequential(attn.q)  # as adapters do
    torch.testing.assert_close(attn(x, StageContext.of(x)), expected.unflatten(1, size))


def test_averages_of_keys():
    def kinds(**options):
        modules = small_backbones.build('LinearNextViT', **options).modules()
        return [(m.reduction, m.ratio) for m in modules if isinstance(m, AveragedKeysAttention)]

    assert kinds() == [('grid', 3), ('grid', 2)]
    arch = dict(ARCH, key_reduction='sequence')
    assert kinds(arch=arch) == [('sequence', 3), ('sequence', 2)]
    mixed = (None, ['hallucinated'], [None, 'softmax'], 'softmax')
    assert kinds(arch=arch, stage_attns=mixed) == [('grid', 3), ('sequence', 2)]
    assert kinds(stage_attns=(None, 'inline', [None, 'softmax'], 'softmax')) == [('grid', 2)]


@pytest.mark.parametrize('size', [(4, 6), (5, 7), (1, 1), (1, 4)], ids=str)
@static_or_dynamic
def test_down_sampling_averages_the_pixels_that_are_there(size, is_dynamic, monkeypatch):
    monkeypatch.setattr(maps, 'is_known', lambda *sizes: not is_dynamic)
    embed = goldens.fill(PooledEmbed(3, 5, BN)).double().eval()
    x = torch.randn(2, *size, 3, dtype=torch.float64)
    expected = affine(embed.norm, patches(x, 2) @ embed.conv.weight[:, :, 0, 0].T)
    for learns in (True, False):  # without, the norm is part of the convolution
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(embed(x), expected)


def test_channels_of_attentions_are_three_quarters_in_whole_groups():
    arch = dict(ARCH, group_dim=8, embed_dims=(8, 24, 48, 56), num_heads=(1, 1, 1, 1))
    assert small_backbones.build('LinearNextViT', arch=arch).attn_dims == (8, 16, 40, 40)  # 18, 36 and 42


def test_norms_by_option():
    def norms(**options):
        return list(small_backbones.build('LinearNextViT', 'rala', **options).out_norms)

    assert norms() == ['0', '1', '2', '3']
    assert norms(out_indices=(1, 2)) == ['0', '1', '2']  # a detector's pyramid may start at the second map
    assert norms(out_indices=(3,)) == ['3']  # a classifier
    assert norms(out_norm=False) == []
    assert norms(out_norm=False, stage_norms=True) == ['0', '1', '2']
    assert norms(out_indices=(1, 2), stage_norms=False) == ['1', '2']
    assert norms(out_indices=(3,), stage_norms=True) == ['0', '1', '2', '3']


def test_norm_cfg_is_of_all_norms():
    fixed, sync = dict(type='BN', eps=1e-3, momentum=0.2), dict(type='SyncBN')
    mixed = dict(COMPACT, ffn=dict(type='compact', norm_cfg=sync))
    found = []
    for arch, norm_cfg in ((COMPACT, fixed), (COMPACT, sync), (mixed, fixed)):
        model = small_backbones.build('LinearNextViT', arch=arch, norm_cfg=norm_cfg)
        norms = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        found.append({('.fc2.' in name, module._get_name(), module.eps, module.momentum) for name, module in norms})
    assert fixed == dict(type='BN', eps=1e-3, momentum=0.2)
    maps, branches = (False, 'BatchNorm2d', 1e-3, 0.2), (True, 'BatchNorm1d', 1e-3, 0.2)
    synced = [(is_branch, 'SyncBatchNorm', 1e-5, 0.1) for is_branch in (False, True)]
    assert found == [{maps, branches}, set(synced), {maps, synced[1]}]


def test_each_branch_of_a_block_has_its_own_stochastic_depth():
    """Drop by 3/4, 1/4 and the whole rate. Then compare Eq. 6 with factors 2, 3 and 5 in place of dropping."""
    assert ConvBlock(8, 8, 4, ReLUMLP(8, 12), BN, 0.4).drop_path.drop_prob == 0.4
    attn, x = GlobalAttention(8, 2, 'softmax'), torch.randn(2, 3, 5, 8)
    block = goldens.fill(TransformerBlock(8, attn, 8, 12, 4, ReLUMLP(12, 6), BN, 0.4)).eval()
    paths = block.attn_drop_path, block.conv_drop_path, block.drop_path
    assert [path.drop_prob for path in paths] == pytest.approx([0.3, 0.1, 0.4])
    for path, factor in zip(paths, (2, 3, 5)):
        path.register_forward_hook(lambda module, args, out, factor=factor: factor * out)
    context = StageContext.of(x)
    y = x + 2 * block.attn(affine(block.norm1, x), context)
    z = block.narrow(y)
    y = torch.cat((y, z + 3 * block.conv(z)), dim=-1)
    torch.testing.assert_close(block(x, context), y + 5 * block.ffn(affine(block.norm2, y)))
