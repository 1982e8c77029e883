# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Renaming by rules, and the rules that several hosts share."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# derived buffers
DERIVED = re.compile(r'(relative_position_index|attn_mask|RoPE\.angle)$')

# InLine's and FLatten's attention, in all hosts
ATTENTION = [
    (r'attn\.residual\.0\.', 'attn.mixer.residual.fc1.'),
    (r'attn\.residual\.2\.', 'attn.mixer.residual.fc2.'),
    (r'attn\.positional_encoding$', 'attn.mixer.position.weight'),
    (r'attn\.scale$', 'attn.mixer.scale'),
    (r'attn\.dwc\.', 'attn.mixer.local.'),
    (r'attn\.relative_position_bias_table$', 'attn.relative_bias.table'),
    (r'\.mlp\.dwconv\.dwconv\.', '.ffn.dwconv.'),
    (r'\.mlp\.', '.ffn.'),
    (r'^head\.', 'head.fc.'),
]


def down(match: 're.Match') -> int:
    """Return the first group, counted from 1 in the release, counted from 0."""
    return int(match[1]) - 1


def convert(state: Mapping[str, Tensor], rules: Sequence[tuple]) -> tuple[dict, dict, list]:
    """Apply every rule, (pattern, replacement) as :func:`re.sub` takes them, in order to every key.

    Returns:
        tuple[dict, dict, list]: Backbone, head (``neck.`` and ``head.``), dropped keys.
    """
    backbone: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    dropped = []
    for key, value in state.items():
        if DERIVED.search(key):
            dropped.append(key)
            continue
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        if key.endswith('mixer.scale'):
            value = value.flatten()
        (head if key.startswith(('neck.', 'head.')) else backbone)[key] = value
    return backbone, head, dropped


def joined(state: Mapping[str, Tensor], parts: Sequence[str]) -> dict[str, Tensor]:
    """Concatenate projections such as ``attn.q`` and ``attn.kv`` to ``attn.qkv``.

    Args:
        state (dict): Weights.
        parts (Sequence[str]): Names of the projections. Incomplete ones, or of several widths, stay as they are.
    """
    whole: dict[str, Tensor] = {}
    for key, value in state.items():
        part = re.search(r'\.attn\.(\w+)\.', key)
        keys = [key.replace(part[0], f'.attn.{name}.') for name in parts] if part and part[1] in parts else []
        if not keys or len({state[name].shape[1:] if name in state else None for name in keys}) > 1:
            whole[key] = value  # reported as unexpected
        elif part and part[1] == parts[0]:
            whole[key.replace(part[0], '.attn.qkv.')] = torch.cat([state[name] for name in keys])
    return whole
