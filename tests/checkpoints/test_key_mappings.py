# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
from helpers import goldens
from helpers.checkpoint_helpers import ARCH

from mmlinattn.backbones import RAVLT
from mmlinattn.checkpoints.key_mappings import KEY_MAPPINGS, find_key_mapping
from mmlinattn.checkpoints.states import backbone_state


def test_every_released_file_matches_one_key_mapping():
    found = set()
    for case in goldens.cases():
        keys = frozenset(goldens.info(case)['state'])
        (mapping,) = [mapping for mapping in KEY_MAPPINGS if mapping.matches(keys)]
        found.add(mapping)
    assert found == set(KEY_MAPPINGS)
    deit = [key for key in goldens.info('inline_deit_t')['state'] if key != 'blocks.0.attn.qkv.weight']
    assert find_key_mapping(deit).__name__.endswith('.deit')
    assert find_key_mapping(RAVLT(ARCH).state_dict()) is None
    assert find_key_mapping(['patch_embed.proj.weight', 'norm.weight']) is None


# Released keys under our names, None if dropped, of files that are no golden cases: dense backbones, older files,
# incomplete ones. Golden cases fit as a whole (``backbones/test_backbones_parity.py``).
RELEASED = {
    'swin': {
        'patch_embed.proj.weight': 'patch_embeds.0.proj.weight',
        'layers.0.blocks.1.attn.relative_position_index': None,
        'layers.0.blocks.1.attn_mask': None,
        'layers.2.blocks.17.attn.qkv.weight': 'stages.2.17.attn.qkv.weight',
        'norm1.weight': 'out_norms.1.weight',  # of a dense backbone
    },
    'pvt': {
        'patch_embed1.proj.weight': 'patch_embeds.0.proj.weight',
        'block1.0.attn.q.weight': 'stages.0.0.attn.q.weight',  # to be listed as unexpected
        'block2.0.attn.kv.weight': 'stages.1.0.attn.kv.weight',
        'block2.1.attn.q.weight': 'stages.1.1.attn.q.weight',  # q has other channels
        'block2.1.attn.kv.weight': 'stages.1.1.attn.kv.weight',
        'norm4.bias': 'out_norms.3.bias',
        'norm.weight': 'out_norms.3.weight',
    },
    'pvt, FLatten': {
        'patch_embed1.proj.weight': 'patch_embeds.0.proj.weight',
        'block1.0.attn.positional_encoding': 'stages.0.0.attn.mixer.position.weight',
        'norm.weight': None,  # the forward pass of its release never applies it
        'norm.bias': None,
    },
    'nextvit': {
        'stem.0.conv.weight': 'patch_embeds.0.0.0.conv.weight',
        'features.0.patch_embed.conv.weight': 'patch_embeds.0.1.conv.weight',
        'features.0.mhca.group_conv3x3.weight': 'stages.0.0.conv.conv.conv.weight',
        'extra_norm_list.3.weight': 'out_norms.3.weight',  # of a file without `norm`
        'proj_head.0.weight': 'head.fc.weight',
    },
}


@pytest.mark.parametrize('family', RELEASED)
def test_names_of_released_files(family):
    names = RELEASED[family]
    state = {key: torch.rand(4, 3 if key == 'block2.1.attn.q.weight' else 2) for key in names}
    assert find_key_mapping(state).__name__.endswith(f'.{family.partition(",")[0]}')
    backbone, head, dropped = backbone_state(state, 'x')
    assert dropped == [key for key, name in names.items() if name is None]
    found, expected = {**backbone, **head}, {name: state[key] for key, name in names.items() if name}
    assert found.keys() == expected.keys() and all(torch.equal(found[key], value) for key, value in expected.items())
    assert set(head) == {key for key in expected if key.startswith('head.')}
