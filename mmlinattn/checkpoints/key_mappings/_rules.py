# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rename keys by regular expressions, and the expressions shared by several backbone architectures."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# buffers that the model computes itself
DERIVED = re.compile(r'(relative_position_index|attn_mask|RoPE\.angle)$')

# attention of InLine and FLatten models, in all backbone architectures
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
    """Return the first group of ``match`` minus one: releases count stages from 1, this project from 0."""
    return int(match[1]) - 1


def convert(state: Mapping[str, Tensor], rules: Sequence[tuple]) -> tuple[dict, dict, list]:
    """Rename the keys of a released state dict.

    Buffers that the model computes itself are dropped. The parameter ``mixer.scale`` is flattened to one axis.

    Args:
        state (dict): Weights by key.
        rules (Sequence[tuple]): Pairs (pattern, replacement) for :func:`re.sub`, all applied to each key in order.

    Returns:
        tuple[dict, dict, list]: Backbone weights, head weights (``neck.`` and ``head.``), and dropped keys.
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
    """Concatenate separate projections, such as ``attn.q`` and ``attn.kv``, to one ``attn.qkv``.

    A layer keeps its projections if one is missing or if they have different numbers of input channels.

    Args:
        state (dict): Weights by key.
        parts (Sequence[str]): Names after ``attn.``, in the order of concatenation, such as ``('q', 'kv')``.
    """
    whole: dict[str, Tensor] = {}
    for key, value in state.items():
        part = re.search(r'\.attn\.(\w+)\.', key)
        if not part or part[1] not in parts:
            whole[key] = value
            continue
        weights: list[Any] = [state.get(key.replace(part[0], f'.attn.{name}.')) for name in parts]
        if any(weight is None or weight.shape[1:] != value.shape[1:] for weight in weights):
            whole[key] = value  # reported as unexpected
        elif part[1] == parts[0]:
            whole[key.replace(part[0], '.attn.qkv.')] = torch.cat(weights)
    return whole
