# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Bad input of the hosts: the argument, its value and what is allowed, before any work is lost."""

import copy

import pytest
import small_hosts
import torch
from mmengine.registry import MODELS
from small_hosts import ARCHS

HOSTS = list(ARCHS)
DEIT, NEXT = 'LinearDeiT', 'LinearNextViT'


def arch(host, **changes):
    """The small arch with some keys changed, or without those that are ``...``."""
    changed = {**copy.deepcopy(ARCHS[host]), **changes}
    return {key: value for key, value in changed.items() if value is not ...}


def first(host, key, value):
    return (value, *ARCHS[host][key][1:])


ARGUMENTS = {  # argument: what is allowed, values that are not
    'in_channels': ('int >= 1', [0, -3, 3.0, None, True]),
    'with_cp': ('bool', ['no', 1]),
    'norm_eval': ('bool', ['yes']),
    'deploy': ('bool', ['yes', 1]),
    'frozen_stages': ('int', ['1', 0.5, None, True]),
    'drop_path_rate': ('number in [0, 1)', ['0.1', -0.1, 1.0, 2, True]),
    'out_norm': ('bool', ['LN', None]),
    'out_indices': ('', ['0', None, [0.0], {0: 1}]),
}
COUNTS = {  # keys of an arch that hold numbers of tokens, pixels or patches
    'LinearPVT': dict(grids=0, sr_ratios=(8, 4, 2, 0)),
    'LinearPVTv2': dict(grids=(56, 28, 14, -7)),
    'LinearSwin': dict(window=None, linear_windows=(7, 4, 3.5, 2)),
    'LinearCSWin': dict(stripes=(0, 2, 3, None)),
    'LinearDeiT': dict(grid=0),
}


def of_archs(host):
    """Changes of the small arch, and what the error says."""
    width, stages = ARCHS[host]['embed_dims'][0], len(ARCHS[host]['depths'])
    known = "['depths', 'embed_dims', 'num_heads']"
    yield dict(widths=3, depths=...), [known, "unknown: ['widths']", "missing: ['depths']"]
    yield dict(widths=3), ["unknown: ['widths']", 'missing: []']
    for key in ('embed_dims', 'depths', 'num_heads'):
        for value in (4, '4444', None):
            yield {key: value}, [f'arch: {key}={value!r}', 'list or tuple']
        yield {key: (4,) * 7}, ['embed_dims, depths and num_heads', f"'{key}': 7"]
    for value in (0, -1, 1.5, True):
        for key in ('depths', 'embed_dims'):
            yield {key: first(host, key, value)}, [f'arch: {key}=', 'ints >= 1']
    for heads in (5, 0, -1, 1.0, True):
        yield dict(num_heads=first(host, 'num_heads', heads)), [f'num_heads={heads}', f'divide the width {width}']
    for value in (0, -1, '4', None, True, float('nan'), float('inf'), (0,) * stages):
        for key in ('mlp_ratios', 'attn_mlp_ratios') if host == NEXT else ('mlp_ratios',):
            yield {key: value}, [f'arch: {key}={value!r}', 'numbers above 0']
    by_stage = {'grids', 'sr_ratios', 'linear_windows', 'stripes', 'layer_scales'}
    defaults = MODELS.get(host).arch_defaults
    for key in ('mlp_ratios', 'ffn', *(by_stage & set(defaults))):
        for value in ((1, 2), (1,) * 5):
            yield {key: value}, [f'{key}={value}', f'each of the {stages}']
    for key, value in COUNTS.get(host, {}).items():
        yield {key: value}, [f'arch: {key}={value}', 'ints >= 1' + ' or None' * (key == 'stripes')]


def of_arguments(host):
    """Arguments, and what the error says."""
    for value in ('huge', None, 3, ('tiny',)):
        yield dict(arch=value), [f'arch={value!r}', host, 'a dict']
    for name, (allowed, values) in ARGUMENTS.items():
        for value in values:
            if not (host == DEIT and name == 'out_indices' and value is None):
                yield {name: value}, [name, repr(value).strip('[]{}'), allowed]
    stages = len(ARCHS[host]['depths'])
    outputs = stages if stages > 1 else ARCHS[host]['depths'][0]  # of a plain backbone, its blocks
    for value in (-2, outputs + 1):
        yield dict(frozen_stages=value), [f'frozen_stages={value}', f'[-1, {outputs}]']
    for value in ((), (outputs,), (0, 0), (1, 0), (-outputs - 1,)):
        yield dict(out_indices=value), [f'out_indices={value}', 'ascending', f'[0, {outputs - 1}]']
    for value in (('rala',) * (stages + 1), ('rala',) * 7, 'rala', dict(type='rala')):
        yield dict(stage_attns=value), [f'stage_attns={value!r}', f'each of the {stages} stages']
    # options of all attentions: tests/attention
    yield dict(stage_attns=('ralla',) * stages), ['stage_attns', "'ralla'", "'rala'"]
    at = stages // 2  # the third stage, or the only one, of two blocks
    for blocks, words in (
        (['rala'], [f'stage_attns[{at}] names 1 attentions', f'stage {at} has 2 blocks']),
        (['rala'] * 3, [f'stage_attns[{at}] names 3 attentions', f'stage {at} has 2 blocks']),
        (['rala', dict(type='ralla')], ["'ralla'", "'rala'"]),
    ):
        yield dict(stage_attns=['rala', 'rala', blocks, 'rala'] if stages > 1 else [blocks]), words


WINDOW = "'trained', None, an int >= 1, or a sequence of 4"
SPECIAL = [
    *(
        ('LinearSwin', dict(window_size=value), [f'window_size={value!r}', WINDOW])
        for value in (0, -7, 'whole', 7.5, True, (7, 7), (7,) * 5, (7, 7, 7, 0), (7, 7, 7, 'x'))
    ),
    # softmax windows whose bias would not fit in memory are named before anything of their size is built
    ('LinearSwin', dict(window_size=2**20, stage_attns=('softmax',) * 4), [f'window_size=({2**20}, {2**20})', '8192']),
    (DEIT, dict(out_type='tokens'), ["out_type='tokens'", "'raw'", "'featmap'"]),
    (DEIT, dict(out_indices=None), ['out_indices=None', 'list or tuple']),
    (
        DEIT,
        dict(arch=dict(embed_dims=(16, 32), depths=(2, 3), num_heads=(2, 2), grid=3), stage_attns=('softmax',) * 2),
        ['depths=(2, 3)', 'one entry'],
    ),
    ('RAVLT', dict(out_indices=3), ['out_indices=3', 'list or tuple']),
    ('RAVLT', dict(norm_cfg=dict(type='LN')), ["norm_cfg={'type': 'LN'}", '(B, C, H, W)']),
    ('RAVLT', dict(arch=arch('RAVLT', num_heads=(1, 2, 3, 16))), ['head_dim=2', 'multiple of 4']),
    (NEXT, dict(stage_norms='yes'), ["stage_norms='yes'", 'bool']),
    (NEXT, dict(key_reduction='rows'), ["key_reduction='rows'", "'grid', 'sequence'"]),
    *(
        (NEXT, dict(arch=arch(NEXT, **changes)), words)
        for changes, words in (
            (dict(attn_every=(0, 1, -2, 1)), ['attn_every=(0, 1, -2, 1)', 'ints >= 0']),
            (dict(group_dim=0), ['group_dim=0', 'int >= 1']),
            *((dict(stem_dims=value), [f'stem_dims={value}', 'three entries']) for value in (8, (8, 4), (8,) * 4)),
            (dict(stem_dims=(8, 0, 8)), ['stem_dims=(8, 0, 8)', 'ints >= 1']),
            (dict(group_dim=3), ['embed_dims=(8, 16, 24, 32)', 'multiples of group_dim=3']),
            (dict(group_dim=8, embed_dims=(8, 8, 8, 8)), ['group_dim=8', 'at least three times']),
            (dict(group_dim=8, embed_dims=(8, 16, 24, 24)), ['group_dim=8', 'at least three times']),
        )
    ),
    (
        NEXT,
        dict(stage_attns=('softmax', 'hallucinated', 'softmax', 'softmax'), key_reduction='sequence'),
        ["'hallucinated'", "'grid'"],
    ),
    (NEXT, dict(stage_attns=(None, 'inline', ['rala', None], 'focused')), ['attention None', "'rala'"]),
]


@pytest.mark.parametrize('host', HOSTS)
def test_what_every_host_refuses(host):
    attns = ('softmax',) * len(ARCHS[host]['depths'])
    for changes, words in of_archs(host):
        assert_refused(host, dict(arch=arch(host, **changes), stage_attns=attns), words)
    for options, words in of_arguments(host):
        assert_refused(host, options, words)


@pytest.mark.parametrize(('host', 'options', 'words'), SPECIAL, ids=str)
def test_what_a_host_refuses(host, options, words):
    assert_refused(host, options, words)


def assert_refused(host, options, words):
    given = copy.deepcopy(options)
    with pytest.raises(ValueError) as error:
        MODELS.build({'type': host, 'arch': arch(host), **options})
    said = str(error.value)
    assert not [word for word in words if word not in said] and '\n' not in said, (options, words, said)
    assert options == given or options != options  # NaN


@pytest.mark.parametrize('host', HOSTS)
def test_wrong_images(host):
    model = MODELS.build(small_hosts.config(host)).eval()
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


@pytest.mark.parametrize('host', HOSTS)
def test_bounds_that_are_allowed(host):
    """A ratio that is a fraction, also of each stage; windows of a linear attention of any size; heads too narrow for
    a rotation that there is none of, or of stages that are not built."""
    ratios = (2.5,) * len(ARCHS[host]['depths'])
    options = dict(LinearSwin=[dict(window_size=2**20)], RAVLT=[dict(rotary=False), dict(out_indices=(0, 2))])
    changes = dict(num_heads=(1, 2, 3, 16)) if host == 'RAVLT' else {}
    for given in options.get(host, [{}]):
        small_hosts.build(host, 'inline', arch=arch(host, mlp_ratios=ratios, **changes), **given)
