# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Invalid arguments of backbones: one line with the argument, its value and the allowed values."""

import copy

import pytest
import torch
from helpers import small_backbones
from helpers.small_backbones import ARCHS
from mmengine.registry import MODELS

DEIT, NEXT, SWIN = 'LinearDeiT', 'LinearNextViT', 'LinearSwin'


def arch(backbone, **changes):
    """Return the small arch with changed keys; the value ``...`` removes a key."""
    changed = {**copy.deepcopy(ARCHS[backbone]), **changes}
    return {key: value for key, value in changed.items() if value is not ...}


# errors of all backbones, tested with one: changes of its small arch or arguments, and words of the error
OF_ARCHS = [
    (dict(widths=3, depths=...), ["['depths', 'embed_dims', 'num_heads']", "unknown: ['widths']", "['depths']"]),
    (dict(embed_dims='4444'), ["arch: embed_dims='4444'", 'list or tuple']),
    (dict(depths=(4,) * 7), ['embed_dims, depths and num_heads', "'depths': 7"]),
    *((dict(depths=(value, 1, 2, 1)), ['arch: depths=', 'ints >= 1']) for value in (0, 1.5, True)),
    *((dict(num_heads=(n, 2, 3, 4)), [f'num_heads={n}', 'divisor of the width 8']) for n in (5, 0, 1.0)),
    *((dict(mlp_ratios=v), [f'arch: mlp_ratios={v!r}', 'numbers above 0']) for v in (0, '4', None, True, (0,) * 4)),
    *((dict(mlp_ratios=float(v)), [f'arch: mlp_ratios={v}', 'numbers above 0']) for v in ('nan', 'inf')),
    (dict(mlp_ratios=(1, 2)), ['mlp_ratios=(1, 2)', 'each of the 4']),
    (dict(ffn=(1, 2)), ['ffn=(1, 2)', 'each of the 4']),
]
OF_ARGUMENTS = [
    *((dict(arch=value), [f'arch={value!r}', SWIN, 'a dict']) for value in ('huge', None)),
    *((dict(in_channels=value), [f'in_channels={value}', 'int >= 1']) for value in (0, 3.0, True)),
    *((dict([(name, 'yes')]), [f"{name}='yes'", 'bool']) for name in ('with_cp', 'norm_eval', 'deploy', 'out_norm')),
    *((dict(frozen_stages=value), [f'frozen_stages={value}', 'int']) for value in (0.5, None, True)),
    *((dict(frozen_stages=value), [f'frozen_stages={value}', '[-1, 4]']) for value in (-2, 5)),
    *((dict(drop_path_rate=v), [f'drop_path_rate={v!r}', 'number in [0, 1)']) for v in ('0.1', -0.1, 1.0, True)),
    *((dict(out_indices=v), ['out_indices']) for v in ('0', None, [0.0], {0: 1})),
    *((dict(out_indices=v), [f'out_indices={v}', 'ascending', '[0, 3]']) for v in ((), (4,), (0, 0), (1, 0), (-5,))),
    (dict(stage_attns=('rala',) * 5), ["stage_attns=('rala', 'rala', 'rala', 'rala', 'rala')", 'each of the 4 stages']),
    (dict(stage_attns='rala'), ["stage_attns='rala'", 'each of the 4 stages']),
    (dict(stage_attns=dict(type='rala')), ["stage_attns={'type': 'rala'}", 'each of the 4 stages']),
    (dict(stage_attns=('ralla',) * 4), ['stage_attns', "'ralla'", "'rala'"]),
    (dict(stage_attns=['rala', 'rala', ['rala'], 'rala']), ['stage_attns[2] names 1', 'stage 2 has 2 blocks']),
    (dict(stage_attns=['rala', 'rala', ['rala', dict(type='ralla')], 'rala']), ["'ralla'", "'rala'"]),
]
COUNTS = {  # keys of an arch that hold numbers of tokens, pixels or patches
    'LinearPVT': dict(grids=0, sr_ratios=(8, 4, 2, 0)),
    'LinearSwin': dict(window=None, linear_windows=(7, 4, 3.5, 2)),
    'LinearCSWin': dict(stripes=(0, 2, 3, None)),
    'LinearDeiT': dict(grid=0),
}
TWO_STAGES = dict(embed_dims=(16, 32), depths=(2, 3), num_heads=(2, 2))
WINDOW = "'trained', None, an int >= 1, or a sequence of 4"
SPECIAL = [
    *((SWIN, dict(window_size=v), [f'window_size={v!r}', WINDOW]) for v in (0, 'whole', 7.5, (7, 7), (7, 7, 7, 0))),
    # softmax windows with a bias too large for memory are named before anything of their size is built
    (SWIN, dict(window_size=2**20, stage_attns=('softmax',) * 4), [f'window_size=({2**20}, {2**20})', '8192']),
    (DEIT, dict(arch=arch(DEIT, ffn=dict(type='compact', ffn='conv'))), ["'compact'", 'convolution']),
    (DEIT, dict(arch=arch(DEIT, ffn=dict(type='compact', ffn='dwconv'))), ["'compact'", 'convolution']),
    (DEIT, dict(out_type='tokens'), ["out_type='tokens'", "'raw'", "'featmap'"]),
    (DEIT, dict(out_indices=None), ['out_indices=None', 'list or tuple']),
    (DEIT, dict(arch=arch(DEIT, **TWO_STAGES), stage_attns=('softmax',) * 2), ['depths=(2, 3)', 'one entry']),
    *(('RAVLT', dict([(name, 'no')]), [f"{name}='no'", 'bool']) for name in ('rotary', 'cpe')),
    ('RAVLT', dict(norm_cfg='BN'), ["norm_cfg='BN'", 'dict']),
    ('RAVLT', dict(arch=arch('RAVLT', layer_scales='a')), ["arch: layer_scales='a'", 'numbers or None']),
    ('RAVLT', dict(arch=arch('RAVLT', mlp_ratios=0.01)), ['mlp_ratios=0.01', 'no hidden channel']),
    *((backbone, dict(norm_cfg=dict(type='LN')), ["'type': 'LN'", '(B, C, H, W)']) for backbone in ('RAVLT', NEXT)),
    ('RAVLT', dict(arch=arch('RAVLT', num_heads=(1, 2, 3, 16))), ['head_dim=2', 'multiple of 4']),
    (NEXT, dict(stage_norms='yes'), ["stage_norms='yes'", 'bool']),
    (NEXT, dict(arch=arch(NEXT, key_reduction='rows')), ["key_reduction='rows'", "'grid', 'sequence'"]),
    (NEXT, dict(arch=arch(NEXT, attn_every=(0, 1, -2, 1))), ['attn_every=(0, 1, -2, 1)', 'ints >= 0']),
    (NEXT, dict(arch=arch(NEXT, group_dim=0)), ['group_dim=0', 'int >= 1']),
    *((NEXT, dict(arch=arch(NEXT, stem_dims=v)), [f'stem_dims={v}', 'three entries']) for v in (8, (8, 4), (8,) * 4)),
    (NEXT, dict(arch=arch(NEXT, stem_dims=(8, 0, 8))), ['stem_dims=(8, 0, 8)', 'ints >= 1']),
    (NEXT, dict(arch=arch(NEXT, group_dim=3)), ['embed_dims=(8, 16, 24, 32)', 'multiples of group_dim=3']),
    (NEXT, dict(arch=arch(NEXT, group_dim=8, embed_dims=(8, 16, 24, 24))), ['group_dim=8', 'at least three times']),
    (NEXT, dict(stage_attns=(None, 'inline', ['rala', None], 'focused')), ['attention None', "'rala'"]),
]


def test_errors_of_every_backbone():
    for changes, words in OF_ARCHS:
        assert_refused(SWIN, dict(arch=arch(SWIN, **changes), stage_attns=('softmax',) * 4), words)
    for options, words in OF_ARGUMENTS:
        assert_refused(SWIN, options, words)
    for backbone, keys in COUNTS.items():
        attns = ('softmax',) * len(ARCHS[backbone]['depths'])
        for key, value in keys.items():
            words = [f'arch: {key}={value}', 'ints >= 1 or None' if key == 'stripes' else 'ints >= 1']
            assert_refused(backbone, dict(arch=arch(backbone, **{key: value}), stage_attns=attns), words)


@pytest.mark.parametrize(('backbone', 'options', 'words'), SPECIAL, ids=str)
def test_errors_of_one_backbone(backbone, options, words):
    assert_refused(backbone, options, words)


def assert_refused(backbone, options, words):
    given = copy.deepcopy(options)
    with pytest.raises(ValueError) as error:
        MODELS.build({'type': backbone, 'arch': arch(backbone), **options})
    said = str(error.value)
    assert not [word for word in words if word not in said] and '\n' not in said, (options, words, said)
    assert options == given or options != options  # NaN


@pytest.mark.parametrize('backbone', [SWIN, DEIT])
def test_wrong_images(backbone):
    model = MODELS.build(small_backbones.config(backbone)).eval()
    for shape in (1, 3, 31, 64), (1, 3, 64, 31), (1, 1, 64, 64), (1, 4, 64, 64), (3, 64, 64):
        with pytest.raises(ValueError) as error:
            model(torch.rand(shape))
        assert str(shape) in str(error.value) and '(B, 3, H, W) with H >= 32 and W >= 32' in str(error.value)
    x = torch.rand(1, 3, 32, 32)
    for own, casts, wrong in (
        (torch.float32, False, (torch.float64, torch.uint8, torch.float16)),
        (torch.float32, True, (torch.float64, torch.uint8)),
        (torch.float64, True, (torch.float32,)),
    ):
        model.to(own)
        with torch.autocast('cpu', torch.bfloat16, enabled=casts):
            for dtype in (own, *([torch.bfloat16] if casts and own == torch.float32 else [])):
                model(x.to(dtype))
            for dtype in wrong:
                with pytest.raises(ValueError, match=f'x has the type {dtype}; the model is in {own}'):
                    model(x.to(dtype))


def test_bounds_that_are_allowed():
    small_backbones.build(SWIN, 'inline', arch=arch(SWIN, mlp_ratios=(2.5,) * 4), window_size=2**20)
    narrow = arch('RAVLT', mlp_ratios=2.5, num_heads=(1, 2, 3, 16))
    for options in (dict(rotary=False), dict(out_indices=(0, 2))):
        small_backbones.build('RAVLT', 'inline', arch=narrow, **options)
