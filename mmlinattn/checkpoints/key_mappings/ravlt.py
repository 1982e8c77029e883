# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rename the keys of released RAVLT files: classifier and detection backbone of the RALA authors."""

import re

from . import _rules

_RULES = [
    (r'^norm\.', 'neck.norm.'),
    (r'^proj\.', 'neck.proj.'),
    (r'^head\.', 'head.fc.'),
    (r'^patch_embed\.proj\.', 'patch_embeds.0.layers.'),
    (r'^extra_norms\.(\d+)\.norm\.', r'out_norms.\1.'),
    (r'^layers\.(\d+)\.downsample\.', lambda match: f'patch_embeds.{int(match[1]) + 1}.layers.'),
    (r'^(patch_embeds\.\d\.layers)\.reduction\.', r'\1.conv.'),
    (r'^layers\.(\d+)\.blocks\.(\d+)\.', r'stages.\1.\2.'),
    (r'\.gamma_([12])$', r'.gamma\1'),
    (r'\.norm([12])\.norm\.', r'.norm\1.'),
    (r'\.attn\.qkvo\.', '.attn.qkv.'),
    (r'\.attn\.lepe\.', '.attn.local.'),
    (r'\.pos\.', '.position.'),
]
# the release has 1x1 convolutions and (1, C, 1, 1) layer scales for NCHW maps; ours are linear layers and (C,) scales
_FLAT = re.compile(r'(attn\.(qkv|proj)|ffn\.fc[12]|head\.fc)\.weight$|gamma[12]$')


def matches(keys) -> bool:
    return any('.attn.qkvo.' in key for key in keys)


def convert(state) -> tuple:
    backbone, head, dropped = _rules.convert(state, _RULES)
    for part in (backbone, head):
        for key in filter(_FLAT.search, part):
            part[key] = part[key].flatten(0 if 'gamma' in key else 1)
    return backbone, head, dropped
