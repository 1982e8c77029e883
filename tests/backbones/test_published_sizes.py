# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What a published size has that no count of parameters shows: heads, stochastic depth, windows, attentions, as printed
or released. Norms: test_hosts_parity.py."""

import pytest
import torch

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
    with torch.device('meta'):
        model = host(name, out_indices=(0,))
    assert tuple(model.arch['num_heads']) == OWN_HEADS.get((host, name), heads)
    assert model.drop_paths[0][0] == 0 and model.drop_paths[-1][-1] == pytest.approx(rate)


def test_initial_layer_scales():
    """Of RAVLT, by stage, as released."""
    scales = {name: RAVLT.resolve_arch(name)['layer_scales'] for name in RAVLT.arch_zoo}
    assert scales == dict(tiny=1.0, small=1.0, base=(1.0, 1.0, 1e-6, 1e-6), large=1e-6)


@pytest.mark.parametrize('host', [LinearSwin, LinearCSWin])
def test_windows_and_stripes(host):
    """Of images of 224 or 384 pixels (InLine Tab. 16, CSWin Sec. 3.3): no weight and no output at 224 shows all of
    them. The last map of CSWin is one window."""
    for name, arch in host.arch_zoo.items():
        side, small = (12, name.removesuffix('-384')) if name.endswith('-384') else (7, name)
        own = dict(window=side, linear_windows=(8 * side, 4 * side, 2 * side, side))
        if host is LinearCSWin:
            own = dict(stripes=(1, 2, side, None), grids=own['linear_windows'])
        assert {key: host.resolve_arch(name)[key] for key in own} == own, name
        assert {**arch, **own} == {**host.arch_zoo[small], **own}, name  # the rest is that of 224


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
    if host is LinearDeiT:  # Castling's convolution over the sequence, as released for DeiT; as many weights as 3x3
        assert host.resolve_arch('angular-tiny')['stage_attns'] == (dict(type='angular', conv='sequence'),)
