# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Released PVT and PVTv2 files: InLine-PVT, FLatten-PVT, FLatten-PVTv2 and the softmax baselines."""

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
    unused = [
        key for key in ('norm.weight', 'norm.bias') if key in state and 'block1.0.attn.positional_encoding' in state
    ]
    backbone, head, dropped = _rules.convert({k: v for k, v in state.items() if k not in unused}, _RULES)
    dropped += unused
    return _rules.join_qkv(backbone), head, dropped
