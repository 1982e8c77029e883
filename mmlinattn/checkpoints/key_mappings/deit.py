# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rename the keys of released DeiT files: InLine-DeiT and the softmax baseline."""

import re

from . import _rules

_RULES = [
    (r'^pos_embed$', 'position_table.weight'),
    (r'^patch_embed\.', 'patch_embeds.0.'),
    (r'^norm\.', 'out_norm.'),
    *_rules.ATTENTION,
]


def matches(keys) -> bool:
    return 'pos_embed' in keys and any(re.match(r'blocks\.\d+\.attn\.qkv\.', key) for key in keys)


def convert(state) -> tuple:
    return _rules.convert(state, _RULES)
