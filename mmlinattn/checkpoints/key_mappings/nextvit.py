# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rename the keys of released Next-ViT files: classifiers, and detection and segmentation backbones."""

import re

from . import _rules

# 1x1 convolutions without a norm become linear layers
_RULES = [
    (r'\.mhca\.group_conv3x3\.', '.conv.conv.conv.'),
    (r'\.mhca\.norm\.', '.conv.conv.norm.'),
    (r'\.mhca\.projection\.', '.conv.proj.'),
    (r'\.projection\.(conv|norm)\.', r'.narrow.\1.'),
    (r'\.mlp\.conv([12])\.', r'.ffn.fc\1.'),
    (r'\.e_mhsa\.', '.attn.'),
    (r'^proj_head\.0\.', 'head.fc.'),
    (r'^norm\.', 'out_norms.3.'),
    (r'^extra_norm_list\.', 'out_norms.'),
]
_FLAT = re.compile(r'(conv\.proj|ffn\.fc[12])\.weight$')


def matches(keys) -> bool:
    return 'stem.0.conv.weight' in keys and any('.mhca.group_conv3x3.' in key for key in keys)


def convert(state) -> tuple:
    # the release normalises the last stage by `norm`, and never uses its `extra_norm_list.3`
    unused = [key for key in state if key.startswith('extra_norm_list.3.') and 'norm.weight' in state]
    renamed = {key: value for key, value in _by_stage(state).items() if key not in unused}
    backbone, head, dropped = _rules.convert(renamed, _RULES)
    backbone = _rules.joined(backbone, 'qkv')
    for key in filter(_FLAT.search, backbone):
        backbone[key] = backbone[key].flatten(1)
    return backbone, head, dropped + unused


def _by_stage(state) -> dict:
    """Rename ``stem`` and ``features.N`` to our stages. A block with more channels than before starts a stage."""
    names, stage, index, channels = {}, -1, 0, 0
    blocks = {int(key.split('.')[1]) for key in state if key.startswith('features.')}
    for block in sorted(blocks):
        entry = state.get(f'features.{block}.patch_embed.conv.weight')
        embed = f'stages.{stage}.{index}.embed'
        if entry is not None and len(entry) > channels:
            stage, index, channels = stage + 1, 0, len(entry)
            embed = 'patch_embeds.0.1' if stage == 0 else f'patch_embeds.{stage}'
        names[f'features.{block}.patch_embed.'] = f'{embed}.'
        names[f'features.{block}.'] = f'stages.{stage}.{index}.'
        index += 1
    renamed = {}
    for key, value in state.items():
        start = re.match(r'features\.\d+\.(patch_embed\.)?', key)
        if start:
            key = names[start[0]] + key[start.end() :]
        renamed[re.sub(r'^stem\.', 'patch_embeds.0.0.', key)] = value
    return renamed
