# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The released RAVLT files: classifier and detection backbone of the RALA authors."""

import re

# 1x1 convolutions and (1, C, 1, 1) layer scales of the release act on NCHW maps; ours act on the last axis
_RULES = [
    (r'patch_embed\.proj\.(\d+)', r'patch_embeds.0.layers.\1'),
    (r'layers\.(\d+)\.blocks\.(\d+)\.gamma_([12])', r'stages.\1.\2.gamma\3'),
    (r'layers\.(\d+)\.blocks\.(\d+)\.norm([12])\.norm', r'stages.\1.\2.norm\3'),
    (r'layers\.(\d+)\.blocks\.(\d+)\.attn\.qkvo', r'stages.\1.\2.attn.qkv'),
    (r'layers\.(\d+)\.blocks\.(\d+)\.attn\.lepe', r'stages.\1.\2.attn.local'),
    (r'layers\.(\d+)\.blocks\.(\d+)\.pos\.', r'stages.\1.\2.position.'),
    (r'layers\.(\d+)\.blocks\.(\d+)\.', r'stages.\1.\2.'),
    (r'extra_norms\.(\d+)\.norm', r'out_norms.\1'),
    (r'(proj|norm)\.', r'neck.\1.'),
    (r'head\.', r'head.fc.'),
]
_FLAT = re.compile(r'(attn\.(qkv|proj)|ffn\.fc[12]|head\.fc)\.weight$|gamma[12]$')


def matches(keys) -> bool:
    return any('.attn.qkvo.' in key for key in keys)


def rename(key: str) -> str:
    down = re.match(r'layers\.(\d+)\.downsample\.(reduction|norm)\.(.*)', key)
    if down:
        return f'patch_embeds.{int(down[1]) + 1}.layers.{"norm" if down[2] == "norm" else "conv"}.{down[3]}'
    for pattern, replacement in _RULES:
        new, hits = re.subn('^' + pattern, replacement, key)
        if hits:
            return new
    return key


def convert(state: dict) -> tuple:
    backbone, head, dropped = {}, {}, []
    for key, value in state.items():
        if key.endswith('RoPE.angle'):  # derived from the head width
            dropped.append(key)
            continue
        new = rename(key)
        if _FLAT.search(new):
            value = value.flatten() if 'gamma' in new else value.flatten(1)
        (head if new.startswith(('neck.', 'head.')) else backbone)[new] = value
    return backbone, head, dropped
