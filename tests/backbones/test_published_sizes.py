# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What a published size has that no count of parameters shows: heads, stochastic depth, windows, norms, as printed or
released; and what hosts are by default."""

import pytest
import small_hosts
import torch
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm
from torch import nn

from mmlinattn.backbones import RAVLT, LinearCSWin, LinearDeiT, LinearNextViT, LinearPVT, LinearPVTv2, LinearSwin

PVT, SWIN, SWIN_B = (1, 2, 5, 8), (3, 6, 12, 24), (4, 8, 16, 32)
# host -> size -> heads, largest rate of stochastic depth
PUBLISHED = {
    RAVLT: {  # RALA Tab. 1; the released training script
        'tiny': ((1, 2, 4, 8), 0.1),
        'small': ((1, 2, 5, 8), 0.15),
        'base': ((1, 2, 6, 8), 0.4),
        'large': ((1, 2, 7, 10), 0.55),
    },
    LinearSwin: {'tiny': (SWIN, 0.2), 'small': (SWIN, 0.3), 'base': (SWIN_B, 0.5)},
    LinearCSWin: {'tiny': ((2, 4, 8, 16), 0.2), 'small': ((2, 4, 8, 16), 0.4), 'base': (SWIN_B, 0.5)},
    LinearPVT: {'tiny': (PVT, 0.1), 'small': (PVT, 0.1), 'medium': (PVT, 0.3), 'large': (PVT, 0.3)},
    LinearPVTv2: {'b0': (PVT, 0.1), 'b1': (PVT, 0.1), 'b2': (PVT, 0.1), 'b3': (PVT, 0.3), 'b4': (PVT, 0.3)},
    LinearDeiT: {'tiny': ((3,), 0.1), 'small': ((6,), 0.1), 'base': ((12,), 0.1)},
    # of 32 channels, on three quarters of the width
    LinearNextViT: {'small': (SWIN, 0.1), 'base': (SWIN, 0.2), 'large': (SWIN, 0.2)},
}
# heads of a method: InLine's PVT as released, Tab. 15 prints PVT's own; its DeiT of Tab. 14
OWN_HEADS = {(LinearPVT, f'inline-{size}'): (2, 4, 10, 16) for size in PUBLISHED[LinearPVT]}
OWN_HEADS.update({(LinearDeiT, 'inline-tiny'): (6,), (LinearDeiT, 'inline-small'): (10,)})


@pytest.mark.parametrize(
    ('host', 'name'), [(host, name) for host in PUBLISHED for name in host.arch_zoo], ids=lambda x: str(x)
)
def test_heads_and_stochastic_depth(host, name):
    size = name.removesuffix('-384').rpartition('-')[2]
    heads, rate = PUBLISHED[host][size]
    arch = host.resolve_arch(name)
    assert (tuple(arch['num_heads']), arch['drop_path_rate']) == (OWN_HEADS.get((host, name), heads), rate)


def test_initial_layer_scales():
    """Of RAVLT, by stage, as released."""
    scales = {name: RAVLT.resolve_arch(name)['layer_scales'] for name in RAVLT.arch_zoo}
    assert scales == dict(tiny=1.0, small=1.0, base=(1.0, 1.0, 1e-6, 1e-6), large=1e-6)


def test_windows_stripes_and_reductions():
    """Of images of 224 or 384 pixels; no output at that size shows some of these."""
    pyramid = dict(sr_ratios=(8, 4, 2, 1), grids=(56, 28, 14, 7))
    pvt = dict(pyramid, mlp_ratios=(8, 8, 4, 4))
    small, large = (56, 28, 14, 7), (96, 48, 24, 12)
    published = {
        LinearSwin: (dict(window=7, linear_windows=small), dict(window=12, linear_windows=large)),  # InLine Tab. 16
        # CSWin Sec. 3.3; the last map as a whole
        LinearCSWin: (dict(stripes=(1, 2, 7, None), grids=small), dict(stripes=(1, 2, 12, None), grids=large)),
        LinearPVT: (pvt, None),
        LinearPVTv2: (pvt, None),
        LinearNextViT: (dict(pyramid, attn_every=(0, 5, 5, 5), group_dim=32), None),
    }
    for host, expected in published.items():
        for name, arch in host.arch_zoo.items():
            sides = expected[name.endswith('-384')]
            assert {key: host.resolve_arch(name)[key] for key in sides} == sides, name
            smaller = host.arch_zoo[name.removesuffix('-384')]
            assert {**arch, **sides} == {**smaller, **sides}, name  # the rest is that of 224
        assert (len([name for name in host.arch_zoo if name.endswith('-384')]) >= 3) == (expected[1] is not None)
    grids = {name: LinearDeiT.resolve_arch(name)['grid'] for name in LinearDeiT.arch_zoo}
    # InLine Tab. 14: images of 288 and 448 pixels
    assert {name: grid for name, grid in grids.items() if grid != 14} == {'inline-small': 18, 'inline-base': 28}


METHODS = dict(inline='inline', flatten='focused', hmhsa='hallucinated')  # the others are named as their attention
IN_TWO_STAGES = RAVLT, LinearSwin, LinearCSWin
# as released, the third stage in two blocks
OTHERS = {'inline-tiny': 'XXXs', 'inline-base': ['X', 'X', 'XX' + 16 * 's', 's']}


@pytest.mark.parametrize('host', PUBLISHED, ids=lambda host: host.__name__)
def test_which_stages_have_the_attention_of_the_method(host):
    """X is the method's, s softmax: of RAVLT, Swin and CSWin in some stages, of the others in all."""
    for name in host.arch_zoo:
        arch, method = host.resolve_arch(name), 'rala' if host is RAVLT else name.partition('-')[0]
        letters = {METHODS.get(method, method): 'X', **(dict(softmax='s') if method != 'softmax' else {})}
        found = []
        for entry in arch['stage_attns']:
            specs = entry if isinstance(entry, list) else [entry]
            found.append(''.join(letters[spec['type'] if isinstance(spec, dict) else spec] for spec in specs))
        expected = 'XXss' if host in IN_TWO_STAGES and method != 'softmax' else 'X' * len(arch['depths'])
        if host is LinearSwin:
            expected = OTHERS.get(name.removesuffix('-384'), expected)
        assert found == list(expected), name


def test_what_goes_with_an_attention():
    """Castling's convolution over the sequence as released for DeiT, and what enhances EfficientViT's attention."""
    assert LinearDeiT.resolve_arch('angular-tiny')['stage_attns'] == (dict(type='angular', conv='sequence'),)
    assert LinearSwin.resolve_arch('angular-tiny')['stage_attns'][:2] == ('angular', 'angular')
    assert LinearDeiT.resolve_arch('enhanced-tiny')['ffn'] == 'dwconv'
    assert LinearSwin.resolve_arch('enhanced-tiny')['ffn'] == ('dwconv', 'dwconv', None, None)
    compact = {
        host: [n for n in host.arch_zoo if host.resolve_arch(n)['ffn'] == dict(type='compact')] for host in PUBLISHED
    }
    assert {host: names for host, names in compact.items() if names} == {
        LinearPVTv2: ['hmhsa-b1'],
        LinearDeiT: ['hmhsa-tiny', 'hmhsa-small'],
        LinearNextViT: ['hmhsa-small'],
    }
    flatten = LinearDeiT.resolve_arch('flatten-tiny')  # docs/design.md
    assert (flatten['qkv_bias'], flatten['absolute_position']) == (False, False)
    released = [LinearNextViT.resolve_arch(name)['key_reduction'] for name in LinearNextViT.arch_zoo]
    assert released == ['grid', 'sequence', 'sequence', 'sequence']


# LayerNorms of the released code: PyTorch's default but where the host sets its own, of a patch embedding and of
# reduced keys apart; batch norms have 1e-5 everywhere
EPS = {
    'RAVLT': dict(blocks=1e-6, out_norms=1e-6),
    'LinearPVT': dict(patch_embeds=1e-5, keys=1e-5, blocks=1e-6, out_norms=1e-6),
    'LinearPVTv2': dict(patch_embeds=1e-5, keys=1e-5, blocks=1e-6, out_norms=1e-6),
    'LinearSwin': dict(patch_embeds=1e-5, blocks=1e-5, out_norms=1e-5),
    'LinearCSWin': dict(patch_embeds=1e-5, blocks=1e-5, out_norms=1e-5),
    'LinearDeiT': dict(blocks=1e-6, out_norm=1e-6),
    'LinearNextViT': {},
}


@pytest.mark.parametrize('host', EPS)
def test_what_norms_add_to_the_variance(host):
    model = small_hosts.build(host, 'softmax')
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            part = 'keys' if name.endswith('attn.norm') else name.split('.')[0].replace('stages', 'blocks')
            found.setdefault(part, set()).add(module.eps)
        elif isinstance(module, _BatchNorm):
            assert module.eps == 1e-5, name
    assert found == {part: {eps} for part, eps in EPS[host].items()}


@pytest.mark.parametrize('host', PUBLISHED, ids=lambda host: host.__name__)
def test_what_hosts_are_unless_told_otherwise(host):
    """OpenMMLab's usual meaning: nothing frozen, batch norms train, nothing is computed twice, all maps are normed."""
    with torch.device('meta'):
        model = host()
    names = ('in_channels', 'frozen_stages', 'norm_eval', 'with_cp', 'deploy')
    assert {name: getattr(model, name) for name in names} == dict(
        in_channels=3, frozen_stages=-1, norm_eval=False, with_cp=False, deploy=False
    )
    assert all(p.requires_grad for p in model.parameters())
    if host is LinearDeiT:
        assert (model.out_indices, model.out_type) == ((11,), 'cls_token') and model.out_norm is not None
    else:
        assert model.out_indices == (0, 1, 2, 3) and list(model.out_norms) == ['0', '1', '2', '3']
    assert model.drop_paths[-1][-1] == pytest.approx(model.arch['drop_path_rate']) and model.drop_paths[0][0] == 0
