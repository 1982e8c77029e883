# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rename the keys of released CSWin files: InLine-CSWin, FLatten-CSWin and the softmax baseline."""

from . import _rules

_RULES = [
    (r'^stage1_conv_embed\.0\.', 'patch_embeds.0.proj.'),
    (r'^stage1_conv_embed\.2\.', 'patch_embeds.0.norm.'),
    (r'^merge(\d)\.conv\.', r'patch_embeds.\1.proj.'),
    (r'^merge(\d)\.norm\.', r'patch_embeds.\1.norm.'),
    (r'^stage(\d)\.(\d+)\.(qkv|proj)\.', lambda match: f'stages.{_rules.down(match)}.{match[2]}.attn.{match[3]}.'),
    (r'^stage(\d)\.(\d+)\.', lambda match: f'stages.{_rules.down(match)}.{match[2]}.'),
    (r'\.get_v\.', '.local.'),
    (r'^norm\.', 'out_norms.3.'),
]


def matches(keys) -> bool:
    return 'stage1_conv_embed.0.weight' in keys


def convert(state) -> tuple:
    two = {key.split('.attns.')[0] for key in state if '.attns.1.' in key}
    # a block with two branches (vertical and horizontal stripes) keeps the branch number; a single branch becomes
    # `attn`
    renamed = {
        key.replace('.attns.', '.attn.branches.')
        if key.split('.attns.')[0] in two
        else key.replace('.attns.0.', '.attn.'): value
        for key, value in state.items()
    }
    return _rules.convert(renamed, [*_RULES, *_rules.ATTENTION])
