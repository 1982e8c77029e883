# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Bad input of the hosts: the argument, its value and what is allowed, before any work is lost."""

import copy
import re

import pytest
import small_hosts
import torch
from mmengine.registry import MODELS
from small_hosts import ARCHS, PYRAMIDS

from mmlinattn.backbones import LinearCSWin, LinearDeiT, LinearSwin


@pytest.mark.parametrize('shape', [(1, 3, 31, 64), (1, 3, 64, 31), (1, 4, 64, 64), (3, 64, 64)], ids=str)
@pytest.mark.parametrize('host', ARCHS)
def test_wrong_images(host, shape):
    with pytest.raises(ValueError) as error:
        small_hosts.build(host)(torch.rand(shape))
    assert str(shape) in str(error.value) and '(B, 3, H, W) with H >= 32 and W >= 32' in str(error.value)


@pytest.mark.parametrize('host', ARCHS)
def test_unknown_arch_lists_the_known_ones(host):
    with pytest.raises(ValueError, match=rf"arch='huge' of {host} has to be one of \['.*softmax-.*'\] or a dict"):
        small_hosts.build(host, arch='huge')


@pytest.mark.parametrize('host', ARCHS)
def test_unknown_and_missing_keys_of_an_arch(host):
    arch = dict(ARCHS[host], widths=3)
    del arch['depths']
    with pytest.raises(ValueError, match=r"unknown: \['widths'\], missing: \['depths'\]"):
        small_hosts.build(host, arch=arch)


@pytest.mark.parametrize('host', PYRAMIDS)
def test_lists_of_an_arch_have_one_entry_a_stage(host):
    keys = [key for key in ('grids', 'sr_ratios', 'linear_windows', 'stripes') if key in ARCHS[host]]
    for key in ['mlp_ratios', *keys]:
        for few_or_many in ((1, 2), (1,) * 5):
            message = re.escape(f'{key}={few_or_many} has to have one entry for each of the 4 stages')
            with pytest.raises(ValueError, match=message):
                small_hosts.build(host, arch=dict(ARCHS[host], **{key: few_or_many}))


@pytest.mark.parametrize('host', ARCHS)
@pytest.mark.parametrize('heads', [5, 0, -1, 1.0, True])
def test_heads_that_do_not_divide_the_width(host, heads):
    arch = dict(ARCHS[host])
    arch['num_heads'] = (heads, *arch['num_heads'][1:])
    width = arch['embed_dims'][0]
    with pytest.raises(ValueError, match=rf'num_heads={heads} has to divide the width {width}'):
        small_hosts.build(host, 'inline', arch=arch)


@pytest.mark.parametrize('host', ARCHS)
def test_unknown_attention(host):
    with pytest.raises(ValueError, match=r"unknown attention 'inlime'; known are .*'inline'"):
        small_hosts.build(host, 'inlime')
    with pytest.raises(ValueError, match='one entry for each of the'):
        small_hosts.build(host, stage_attns=('inline',) * 7)


@pytest.mark.parametrize('host', ARCHS)
def test_options_of_an_attention(host):
    with pytest.raises(ValueError, match=r"kernel='elu' has to be one of \['identity'"):
        small_hosts.build(host, dict(type='inline', kernel='elu'))
    with pytest.raises(ValueError, match=r'power=64 \(focusing factor\) has to lie in \[1, 32\]'):
        small_hosts.build(host, dict(type='focused', power=64))


@pytest.mark.parametrize('host', ARCHS)
def test_out_indices_and_frozen_stages_out_of_range(host):
    for options in (dict(out_indices=(7,)), dict(out_indices=()), dict(out_indices=(1, 0)), dict(frozen_stages=9)):
        ((key, value),) = options.items()
        with pytest.raises(ValueError, match=re.escape(f'{key}={value}')):
            small_hosts.build(host, **options)


@pytest.mark.parametrize('host', ARCHS)
def test_bounds_of_frozen_stages_and_outputs(host):
    """Stages of pyramids, blocks of a plain backbone."""
    depths = ARCHS[host]['depths']
    count = len(depths) if host in PYRAMIDS else depths[0]
    for value in (-2, count + 1):
        with pytest.raises(ValueError) as error:
            small_hosts.build(host, frozen_stages=value)
        assert str(error.value) == f'frozen_stages={value} has to lie in [-1, {count}]'
    for indices in ((count,), (0, 0), (1, 0)):
        with pytest.raises(ValueError) as error:
            small_hosts.build(host, out_indices=indices)
        said = f'have to be ascending and lie in [0, {count - 1}]'
        assert str(error.value) == f'out_indices={indices} {said}'
    with pytest.raises(ValueError) as error:  # also of blocks, which may be counted from the last to the first
        small_hosts.build(host, out_indices=(-count - 1,))
    assert str(error.value) == f'out_indices={(-count - 1,)} {said}'
    frozen = small_hosts.build(host, frozen_stages=count, out_norm=False).train()
    assert [name for name, parameter in frozen.named_parameters() if parameter.requires_grad] == []


@pytest.mark.parametrize('window_size', [0, -7, 'whole', 7.5, (7, 7), (7,) * 5, (7, 7, 7, 0), (7, 7, 7, 'x')], ids=str)
def test_window_sizes_of_another_form(window_size):
    with pytest.raises(ValueError) as error:
        small_hosts.build('LinearSwin', window_size=window_size)
    message = str(error.value)
    assert repr(window_size) in message
    assert "has to be 'trained', None, an int >= 1, or a sequence of 4 of these" in message


@pytest.mark.parametrize(
    ('host', 'key', 'value'),
    [
        ('LinearPVT', 'grids', 0),
        ('LinearPVT', 'sr_ratios', (8, 4, 2, 0)),
        ('LinearPVTv2', 'grids', (56, 28, 14, -7)),
        ('LinearSwin', 'window', 0),
        ('LinearSwin', 'window', None),
        ('LinearSwin', 'linear_windows', (7, 4, 3.5, 2)),
        ('LinearCSWin', 'stripes', (0, 2, 3, None)),
        ('LinearDeiT', 'grid', 0),
    ],
)
def test_sizes_of_an_arch_that_hold_no_token(host, key, value):
    message = rf'arch: {key}={re.escape(str(value))} has to consist of ints >= 1{" or None" * (key == "stripes")}$'
    with pytest.raises(ValueError, match=message):
        small_hosts.build(host, arch=dict(ARCHS[host], **{key: value}))


def test_stripes_need_an_even_number_of_heads():
    with pytest.raises(ValueError, match='num_heads=3 has to be even'):
        LinearCSWin(dict(ARCHS['LinearCSWin'], num_heads=(2, 2, 3, 4)), stage_attns=('softmax',) * 4)


def test_unknown_out_type():
    with pytest.raises(ValueError, match=r"out_type='tokens' has to be one of \('raw', 'cls_token', 'featmap'"):
        LinearDeiT(out_type='tokens')


@pytest.mark.parametrize(('window_size', 'tokens'), [(91, 8281), (2**20, 2**40)])
def test_softmax_windows_whose_bias_would_not_fit_in_memory(window_size, tokens):
    """Named before anything of their size is built; stages of other attentions take such windows."""
    window = rf'window_size=\({window_size}, {window_size}\): a window .*'
    message = rf'{window} may have 8192 tokens at most .* not {tokens};'
    with pytest.raises(ValueError, match=message):
        small_hosts.build('LinearSwin', 'softmax', window_size=window_size)
    with pytest.raises(ValueError, match=message):
        small_hosts.build('LinearSwin', 'softmax', arch=dict(ARCHS['LinearSwin'], window=window_size))
    small_hosts.build('LinearSwin', 'rala', window_size=window_size)


def test_a_boolean_is_no_window():
    with pytest.raises(ValueError, match='window_size=True'):
        LinearSwin(ARCHS['LinearSwin'], window_size=True)


WRONG = {
    'in_channels': [0, -3, 3.0, None, True],
    'with_cp': ['no', 1],
    'norm_eval': ['yes'],
    'deploy': ['yes', 1],
    'frozen_stages': ['1', 0.5, None, True],
    'drop_path_rate': ['0.1', -0.1, 1.0, True],
    'out_indices': ['0', None, [0.0], {0: 1}],
    'out_norm': ['LN', None],
}


@pytest.mark.parametrize('host', [*ARCHS, 'RAVLT'])
@pytest.mark.parametrize('name', WRONG)
def test_arguments_of_other_types_and_values(host, name):
    arch = 'tiny' if host == 'RAVLT' else ARCHS[host]
    for value in WRONG[name]:
        with pytest.raises(ValueError) as error:
            MODELS.build(dict(type=host, arch=arch, **{name: value}))
        assert str(error.value).startswith(name) and repr(value).strip('[]{}') in str(error.value), value


@pytest.mark.parametrize('value', [0, -1, '4', None, True, float('nan'), float('inf'), (4, 4, 0, 4)], ids=str)
@pytest.mark.parametrize('host', [*ARCHS, 'RAVLT'])
def test_ratios_of_hidden_widths_are_numbers_above_0(host, value):
    arch = dict(embed_dims=(8,) * 4, depths=(1,) * 4, num_heads=(1,) * 4) if host == 'RAVLT' else ARCHS[host]
    value = value[2:3] if isinstance(value, tuple) and host == 'LinearDeiT' else value
    for key in ('mlp_ratios', 'attn_mlp_ratios') if host == 'LinearNextViT' else ('mlp_ratios',):
        with pytest.raises(ValueError) as error:
            MODELS.build(dict(type=host, arch=dict(arch, **{key: value})))
        assert str(error.value) == f'arch: {key}={value!r} has to consist of numbers above 0'


def test_deit_is_of_one_stage():
    arch = dict(embed_dims=(16, 32), depths=(2, 3), num_heads=(2, 2), grid=3)
    with pytest.raises(ValueError) as error:
        LinearDeiT(arch, stage_attns=('softmax', 'softmax'))
    assert str(error.value) == 'arch: depths=(2, 3) of LinearDeiT has to have one entry, the blocks'
    lists = dict(ARCHS['LinearDeiT'], grid=(3,), mlp_ratios=[2.5])
    (block, _) = LinearDeiT(lists, stage_attns=('focused',)).blocks
    assert block.ffn.fc1.out_features == 40 and block.attn.mixer.position.grid == (3, 3)


@pytest.mark.parametrize(
    ('host', 'options', 'said'),
    [
        ('RAVLT', dict(with_cp='no'), "with_cp='no' has to be of type bool"),
        ('RAVLT', dict(frozen_stages=True), 'frozen_stages=True has to be of type int'),
        ('RAVLT', dict(out_indices='0'), "out_indices='0' has to be of type list or tuple"),
        ('RAVLT', dict(in_channels=0), 'in_channels=0 has to be an int >= 1'),
        ('RAVLT', dict(drop_path_rate='0.1'), "drop_path_rate='0.1' has to be a number in [0, 1)"),
        ('LinearDeiT', dict(out_indices=None), 'out_indices=None has to be of type list or tuple'),
        ('LinearDeiT', dict(out_norm='LN'), "out_norm='LN' has to be of type bool"),
        ('LinearNextViT', dict(stage_norms='yes'), "stage_norms='yes' has to be of type bool"),
        (
            'LinearNextViT',
            dict(arch=dict(ARCHS['LinearNextViT'], stem_dims=8)),
            'arch: stem_dims=8 has to have three entries',
        ),
        *(
            (
                'LinearNextViT',
                dict(arch=dict(ARCHS['LinearNextViT'], stem_dims=dims)),
                f'arch: stem_dims={dims} has to have three entries',
            )
            for dims in ((8, 8), (8,) * 4)
        ),
        (
            'LinearDeiT',
            dict(arch=dict(ARCHS['LinearDeiT'], mlp_ratios=(4, 4))),
            'arch: mlp_ratios=(4, 4) has to have one entry for each of the 1 stages',
        ),
    ],
)
def test_what_is_said_of_arguments(host, options, said):
    arch = 'tiny' if host == 'RAVLT' else ARCHS[host]
    with pytest.raises(ValueError) as error:
        MODELS.build(dict(dict(type=host, arch=arch), **options))
    assert str(error.value) == said


@pytest.mark.parametrize('host', [*ARCHS, 'RAVLT'])
@pytest.mark.parametrize('arch', [None, 3, ('tiny',)])
def test_an_arch_is_a_name_or_a_dict(host, arch):
    with pytest.raises(ValueError, match=rf'arch=.* of {host} has to be one of \['):
        MODELS.build(dict(type=host, arch=arch))


@pytest.mark.parametrize('host', ARCHS)
@pytest.mark.parametrize('key', ['depths', 'embed_dims'])
@pytest.mark.parametrize('value', [0, -1, 1.5, True])
def test_depths_and_widths_are_counts(host, key, value):
    arch = copy.deepcopy(ARCHS[host])
    arch[key] = (value, *arch[key][1:])
    with pytest.raises(ValueError, match=rf'arch: {key}=.* has to consist of ints >= 1|num_heads=.* has to divide'):
        MODELS.build(dict(type=host, arch=arch))


def test_one_out_index_is_no_sequence_but_for_deit():
    with pytest.raises(ValueError, match='out_indices=3 has to be of type list or tuple'):
        MODELS.build(dict(type='RAVLT', arch='tiny', out_indices=3))


def test_a_stem_normalises_maps():
    with pytest.raises(ValueError, match=r"norm_cfg=\{'type': 'LN'\} has to be a norm of \(B, C, H, W\) maps"):
        MODELS.build(dict(type='RAVLT', arch='tiny', norm_cfg=dict(type='LN')))


@pytest.mark.parametrize('host', [*ARCHS, 'RAVLT'])
def test_images_of_another_type(host):
    arch = dict(embed_dims=(8,) * 4, depths=(1,) * 4, num_heads=(1,) * 4) if host == 'RAVLT' else ARCHS[host]
    model = MODELS.build(dict(type=host, arch=arch)).eval()
    x = torch.rand(1, 3, 32, 32)
    for wrong in (x.double(), (255 * x).byte(), x.half()):
        with pytest.raises(ValueError, match=f'x has the type {wrong.dtype}; the model is in torch.float32'):
            model(wrong)
    with torch.autocast('cpu', torch.bfloat16):
        model(x), model(x.bfloat16())
        for wrong in (x.double(), (255 * x).byte()):
            with pytest.raises(ValueError, match=f'x has the type {wrong.dtype}; the model is in torch.float32'):
                model(wrong)
        model.double()(x.double())
        with pytest.raises(ValueError, match='x has the type torch.float32; the model is in torch.float64'):
            model(x)
    model(x.double())


@pytest.mark.parametrize('key', ['embed_dims', 'depths', 'num_heads'])
def test_lists_of_an_arch_have_one_length(key):
    arch = dict(ARCHS['LinearPVT'])
    arch[key] = arch[key][:3]
    lengths = {name: 3 if name == key else 4 for name in ('depths', 'embed_dims', 'num_heads')}
    with pytest.raises(ValueError) as error:
        MODELS.build(dict(type='LinearPVT', arch=arch))
    assert str(error.value) == f'arch of LinearPVT: embed_dims, depths and num_heads differ in length: {lengths}'
