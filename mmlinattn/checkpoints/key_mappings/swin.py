# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rename the keys of released Swin files: InLine-Swin, FLatten-Swin and the softmax baseline."""

from . import _rules

_RULES = [
    (r'^patch_embed\.', 'patch_embeds.0.'),
    (r'^layers\.(\d+)\.blocks\.(\d+)\.', r'stages.\1.\2.'),
    (r'^layers\.(\d+)\.downsample\.', lambda match: f'patch_embeds.{int(match[1]) + 1}.'),
    (r'^norm\.', 'out_norms.3.'),
    (r'^norm(\d)\.', r'out_norms.\1.'),
    *_rules.ATTENTION,
]


def matches(keys) -> bool:
    return 'patch_embed.proj.weight' in keys and any('.attn.qkv.' in key and key.startswith('layers.') for key in keys)


def convert(state) -> tuple:
    return _rules.convert(state, _RULES)
