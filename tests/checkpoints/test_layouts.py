# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import goldens
import pytest
import torch
from checkpoint_helpers import ARCH

from mmlinattn.backbones import RAVLT
from mmlinattn.checkpoints.layouts import LAYOUTS, find_layout
from mmlinattn.checkpoints.states import backbone_state


def test_a_released_file_is_of_one_layout_and_others_are_of_none():
    found = set()
    for case in goldens.cases():
        keys = frozenset(goldens.info(case)['state'])
        (layout,) = [layout for layout in LAYOUTS if layout.matches(keys)]
        found.add(layout)
    assert found == set(LAYOUTS)
    assert find_layout(RAVLT(ARCH).state_dict()) is None
    assert find_layout(['patch_embed.proj.weight', 'norm.weight']) is None


# keys of released files, with shapes, in the names of this project: of the backbone, of the head, or dropped
RELEASED = {
    'ravlt': {
        'patch_embed.proj.10.running_mean': ('patch_embeds.0.layers.10.running_mean', (4,)),
        'layers.0.RoPE.angle': (None, (2,)),
        'layers.0.blocks.1.gamma_1': ('stages.0.1.gamma1', (1, 4, 1, 1), (4,)),
        'layers.0.blocks.1.gamma_2': ('stages.0.1.gamma2', (1, 4, 1, 1), (4,)),
        'layers.0.blocks.1.norm1.norm.weight': ('stages.0.1.norm1.weight', (4,)),
        'layers.0.blocks.1.norm2.norm.bias': ('stages.0.1.norm2.bias', (4,)),
        'layers.2.blocks.11.attn.qkvo.weight': ('stages.2.11.attn.qkv.weight', (16, 4, 1, 1), (16, 4)),
        'layers.2.blocks.11.attn.qkvo.bias': ('stages.2.11.attn.qkv.bias', (16,)),
        'layers.2.blocks.11.attn.proj.weight': ('stages.2.11.attn.proj.weight', (4, 4, 1, 1), (4, 4)),
        'layers.2.blocks.11.attn.lepe.weight': ('stages.2.11.attn.local.weight', (4, 1, 5, 5)),
        'layers.2.blocks.11.ffn.fc1.weight': ('stages.2.11.ffn.fc1.weight', (8, 4, 1, 1), (8, 4)),
        'layers.2.blocks.11.ffn.fc2.weight': ('stages.2.11.ffn.fc2.weight', (4, 8, 1, 1), (4, 8)),
        'layers.2.blocks.11.ffn.dwconv.weight': ('stages.2.11.ffn.dwconv.weight', (8, 1, 3, 3)),
        'layers.2.blocks.11.pos.weight': ('stages.2.11.position.weight', (4, 1, 3, 3)),
        'layers.2.downsample.reduction.weight': ('patch_embeds.3.layers.conv.weight', (8, 4, 3, 3)),
        'layers.0.downsample.norm.running_var': ('patch_embeds.1.layers.norm.running_var', (8,)),
        'extra_norms.2.norm.weight': ('out_norms.2.weight', (4,)),
        'proj.weight': ('neck.proj.weight', (16, 4, 1, 1)),
        'norm.num_batches_tracked': ('neck.norm.num_batches_tracked', ()),
        'head.weight': ('head.fc.weight', (10, 16, 1, 1), (10, 16)),
        'head.bias': ('head.fc.bias', (10,)),
    },
    'deit': {
        'pos_embed': ('position_table.weight', (1, 5, 4)),
        'cls_token': ('cls_token', (1, 1, 4)),
        'patch_embed.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 2, 2)),
        'blocks.0.attn.qkv.weight': ('blocks.0.attn.qkv.weight', (12, 4)),
        'blocks.0.attn.residual.0.weight': ('blocks.0.attn.mixer.residual.fc1.weight', (4, 2, 1)),
        'blocks.0.attn.residual.2.bias': ('blocks.0.attn.mixer.residual.fc2.bias', (36,)),
        'blocks.0.mlp.fc1.weight': ('blocks.0.ffn.fc1.weight', (8, 4)),
        'norm.bias': ('out_norm.bias', (4,)),
        'head.weight': ('head.fc.weight', (10, 4)),
        'mystery': ('mystery', (1,)),
    },
    'swin': {
        'patch_embed.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 4, 4)),
        'patch_embed.norm.bias': ('patch_embeds.0.norm.bias', (4,)),
        'layers.2.blocks.17.attn.qkv.weight': ('stages.2.17.attn.qkv.weight', (12, 4)),
        'layers.0.blocks.1.attn.relative_position_bias_table': ('stages.0.1.attn.relative_bias.table', (9, 2)),
        'layers.0.blocks.1.attn.relative_position_index': (None, (4, 4)),
        'layers.0.blocks.1.attn_mask': (None, (4, 4, 4)),
        'layers.0.blocks.1.attn.positional_encoding': ('stages.0.1.attn.mixer.position.weight', (1, 4, 4)),
        'layers.0.blocks.1.attn.scale': ('stages.0.1.attn.mixer.scale', (1, 1, 4), (4,)),
        'layers.0.blocks.1.attn.dwc.weight': ('stages.0.1.attn.mixer.local.weight', (2, 1, 5, 5)),
        'layers.0.downsample.reduction.weight': ('patch_embeds.1.reduction.weight', (8, 16)),
        'layers.2.downsample.norm.weight': ('patch_embeds.3.norm.weight', (8,)),
        'norm.weight': ('out_norms.3.weight', (4,)),
        'norm1.weight': ('out_norms.1.weight', (4,)),  # of a dense backbone
        'head.bias': ('head.fc.bias', (10,)),
    },
    'pvt': {
        'patch_embed1.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 4, 4)),
        'pos_embed4': ('position_tables.3.weight', (1, 5, 4)),
        'block3.26.attn.q.weight': ('stages.2.26.attn.qkv.weight', (4, 4), (12, 4)),
        'block3.26.attn.kv.weight': (..., (8, 4)),
        'block2.3.mlp.dwconv.dwconv.weight': ('stages.1.3.ffn.dwconv.weight', (8, 1, 3, 3)),
        'block2.3.norm1.weight': ('stages.1.3.norm1.weight', (4,)),
        'norm1.bias': ('out_norms.0.bias', (4,)),
        'norm4.bias': ('out_norms.3.bias', (4,)),
        'norm.weight': ('out_norms.3.weight', (4,)),
        'head.weight': ('head.fc.weight', (10, 4)),
    },
    'pvt of FLatten': {
        'patch_embed1.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 4, 4)),
        'block1.0.attn.positional_encoding': ('stages.0.0.attn.mixer.position.weight', (1, 4, 4)),
        'norm.weight': (None, (4,)),  # which the release has and does not use
        'norm.bias': (None, (4,)),
    },
    'pvt of which a part is gone': {
        'patch_embed1.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 4, 4)),
        'block1.0.attn.q.weight': ('stages.0.0.attn.q.weight', (4, 4)),  # to be listed as unexpected
        'block2.0.attn.kv.weight': ('stages.1.0.attn.kv.weight', (8, 4)),
    },
    'cswin': {
        'stage1_conv_embed.0.weight': ('patch_embeds.0.proj.weight', (4, 3, 7, 7)),
        'stage1_conv_embed.2.weight': ('patch_embeds.0.norm.weight', (4,)),
        'merge2.conv.weight': ('patch_embeds.2.proj.weight', (8, 4, 3, 3)),
        'merge3.norm.bias': ('patch_embeds.3.norm.bias', (8,)),
        'stage1.0.qkv.weight': ('stages.0.0.attn.qkv.weight', (12, 4)),
        'stage3.31.qkv.weight': ('stages.2.31.attn.qkv.weight', (12, 4)),
        'stage3.31.norm1.weight': ('stages.2.31.norm1.weight', (4,)),
        'stage4.1.proj.bias': ('stages.3.1.attn.proj.bias', (4,)),
        'stage1.0.attns.0.get_v.weight': ('stages.0.0.attn.branches.0.local.weight', (2, 1, 3, 3)),
        'stage1.0.attns.1.get_v.weight': ('stages.0.0.attn.branches.1.local.weight', (2, 1, 3, 3)),
        'stage1.1.attns.0.get_v.weight': ('stages.0.1.attn.local.weight', (4, 1, 3, 3)),  # each block by itself
        'stage4.0.attns.0.get_v.weight': ('stages.3.0.attn.local.weight', (4, 1, 3, 3)),
        'stage1.0.mlp.fc2.weight': ('stages.0.0.ffn.fc2.weight', (4, 8)),
        'norm.weight': ('out_norms.3.weight', (4,)),
        'head.weight': ('head.fc.weight', (10, 4)),
    },
    'nextvit': {
        'stem.0.conv.weight': ('patch_embeds.0.0.0.conv.weight', (4, 3, 3, 3)),
        'features.0.patch_embed.conv.weight': ('patch_embeds.0.1.conv.weight', (4, 4, 1, 1)),
        'features.0.mhca.group_conv3x3.weight': ('stages.0.0.conv.conv.conv.weight', (4, 4, 3, 3)),
        'features.0.mhca.norm.bias': ('stages.0.0.conv.conv.norm.bias', (4,)),
        'features.0.mhca.projection.weight': ('stages.0.0.conv.proj.weight', (4, 4, 1, 1), (4, 4)),
        'features.1.mlp.conv1.weight': ('stages.0.1.ffn.fc1.weight', (8, 4, 1, 1), (8, 4)),
        'features.2.patch_embed.conv.weight': ('patch_embeds.1.conv.weight', (8, 4, 1, 1)),
        'features.2.patch_embed.norm.weight': ('patch_embeds.1.norm.weight', (8,)),
        'features.3.patch_embed.conv.weight': ('stages.1.1.embed.conv.weight', (6, 8, 1, 1)),
        'features.3.projection.conv.weight': ('stages.1.1.narrow.conv.weight', (2, 6, 1, 1)),
        'features.3.e_mhsa.q.weight': ('stages.1.1.attn.qkv.weight', (6, 6), (18, 6)),
        'features.3.e_mhsa.k.weight': (..., (6, 6)),
        'features.3.e_mhsa.v.weight': (..., (6, 6)),
        'features.4.patch_embed.conv.weight': ('stages.1.2.embed.conv.weight', (8, 6, 1, 1)),  # back to that width
        'extra_norm_list.1.weight': ('out_norms.1.weight', (8,)),
        'extra_norm_list.3.weight': (None, (8,)),
        'norm.weight': ('out_norms.3.weight', (8,)),
        'proj_head.0.weight': ('head.fc.weight', (10, 8)),
    },
    'nextvit of which a part is gone': {
        'stem.0.conv.weight': ('patch_embeds.0.0.0.conv.weight', (4, 3, 3, 3)),
        'features.0.patch_embed.conv.weight': ('patch_embeds.0.1.conv.weight', (4, 4, 1, 1)),
        'features.0.mhca.group_conv3x3.weight': ('stages.0.0.conv.conv.conv.weight', (4, 4, 3, 3)),
        'features.0.e_mhsa.q.weight': ('stages.0.0.attn.q.weight', (4, 4)),  # to be listed as unexpected
        'features.0.e_mhsa.k.weight': ('stages.0.0.attn.k.weight', (4, 4)),
        'features.0.e_mhsa.k.bias': ('stages.0.0.attn.k.bias', (4,)),
        'features.0.e_mhsa.v.bias': ('stages.0.0.attn.v.bias', (4,)),
    },
    'nextvit without its last norm': {
        'stem.3.conv.weight': ('patch_embeds.0.0.3.conv.weight', (4, 3, 3, 3)),
        'stem.0.conv.weight': ('patch_embeds.0.0.0.conv.weight', (4, 3, 3, 3)),
        'features.0.patch_embed.conv.weight': ('patch_embeds.0.1.conv.weight', (4, 4, 1, 1)),
        'features.0.mhca.group_conv3x3.weight': ('stages.0.0.conv.conv.conv.weight', (4, 4, 3, 3)),
        'extra_norm_list.3.weight': ('out_norms.3.weight', (8,)),
    },
}


@pytest.mark.parametrize('layout', RELEASED)
def test_names_and_shapes_of_released_files(layout):
    rows = RELEASED[layout]
    state = {key: torch.rand(row[1]) for key, row in rows.items()}
    assert find_layout(state).__name__.endswith(f'.{layout.split()[0]}')
    backbone, head, dropped = backbone_state(state, 'x')
    assert dropped == [key for key, row in rows.items() if row[0] is None]
    expected = {row[0]: row[-1] for row in rows.values() if isinstance(row[0], str)}
    assert {key: tuple(value.shape) for key, value in {**backbone, **head}.items()} == expected
    assert set(head) == {key for key in expected if key.startswith(('neck.', 'head.'))}
    for key, row in rows.items():
        if isinstance(row[0], str):  # the first of joined ones begins the whole, and the others follow
            name, start = row[0], 0
        elif row[0] is None:
            continue
        value, end = {**backbone, **head}[name].flatten(), start + state[key].numel()
        assert torch.equal(value[start:end], state[key].flatten())
        start = end
