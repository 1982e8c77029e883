# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rename the keys of released PVT and PVTv2 files: InLine-PVT, FLatten-PVT, FLatten-PVTv2 and the softmax baselines."""

from . import _rules

_RULES = [
    (r'^pos_embed(\d)$', lambda match: f'position_tables.{_rules.down(match)}.weight'),
    (r'^patch_embed(\d)\.', lambda match: f'patch_embeds.{_rules.down(match)}.'),
    (r'^block(\d)\.(\d+)\.', lambda match: f'stages.{_rules.down(match)}.{match[2]}.'),
    (r'^norm(\d)\.', lambda match: f'out_norms.{_rules.down(match)}.'),
    (r'^norm\.', 'out_norms.3.'),
    *_rules.ATTENTION,
]


def matches(keys) -> bool:
    return 'patch_embed1.proj.weight' in keys


def convert(state) -> tuple:
    # FLatten-PVT carries a final norm that its forward pass never applies
    unused = {'norm.weight', 'norm.bias'} & set(state) if 'block1.0.attn.positional_encoding' in state else set()
    kept = {key: value for key, value in state.items() if key not in unused}
    backbone, head, dropped = _rules.convert(kept, _RULES)
    return _rules.joined(backbone, ('q', 'kv')), head, dropped + sorted(unused, reverse=True)
