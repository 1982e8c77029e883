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


# What golden cases, whose keys all fit (``configs/test_goldens.py``), do not have: dense backbones, other ages. Keys
# of released files, with shapes, in the names of this project: of the backbone, of the head, or dropped.
RELEASED = {
    'swin': {
        'patch_embed.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 4, 4)),
        'layers.0.blocks.1.attn.relative_position_index': (None, (4, 4)),
        'layers.0.blocks.1.attn_mask': (None, (4, 4, 4)),
        'layers.2.blocks.17.attn.qkv.weight': ('stages.2.17.attn.qkv.weight', (12, 4)),
        'layers.0.downsample.norm.weight': ('patch_embeds.1.norm.weight', (8,)),
        'norm.weight': ('out_norms.3.weight', (4,)),
        'norm1.weight': ('out_norms.1.weight', (4,)),  # of a dense backbone
        'head.bias': ('head.fc.bias', (10,)),
    },
    'pvt': {
        'patch_embed1.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 4, 4)),
        'pos_embed4': ('position_tables.3.weight', (1, 5, 4)),
        'block3.26.attn.q.weight': ('stages.2.26.attn.qkv.weight', (4, 4), (12, 4)),
        'block3.26.attn.kv.weight': (..., (8, 4)),
        'norm1.bias': ('out_norms.0.bias', (4,)),
        'norm4.bias': ('out_norms.3.bias', (4,)),
        'norm.weight': ('out_norms.3.weight', (4,)),
        'head.weight': ('head.fc.weight', (10, 4)),
    },
    'pvt of which a part is gone': {
        'patch_embed1.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 4, 4)),
        'block1.0.attn.q.weight': ('stages.0.0.attn.q.weight', (4, 4)),  # to be listed as unexpected
        'block2.0.attn.kv.weight': ('stages.1.0.attn.kv.weight', (8, 4)),
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
