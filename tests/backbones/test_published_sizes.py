# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What a published size has that no count of parameters shows: heads and stochastic depth, as printed or released."""

import pytest

from mmlinattn.backbones import RAVLT, LinearCSWin, LinearDeiT, LinearNextViT, LinearPVT, LinearPVTv2, LinearSwin

SWIN, SWIN_B = (3, 6, 12, 24), (4, 8, 16, 32)
PVT = (1, 2, 5, 8)
# host -> size -> heads, largest rate of stochastic depth; METHOD-SIZE where the method has its own heads
PUBLISHED = {
    RAVLT: {  # RALA Tab. 1; the released training script
        'tiny': ((1, 2, 4, 8), 0.1),
        'small': ((1, 2, 5, 8), 0.15),
        'base': ((1, 2, 6, 8), 0.4),
        'large': ((1, 2, 7, 10), 0.55),
    },
    LinearSwin: {
        'tiny': (SWIN, 0.2),
        'small': (SWIN, 0.3),
        'base': (SWIN_B, 0.5),
        'base-384': (SWIN_B, 0.5),
    },
    LinearCSWin: {
        'tiny': ((2, 4, 8, 16), 0.2),
        'small': ((2, 4, 8, 16), 0.4),
        'base': ((4, 8, 16, 32), 0.5),
        'base-384': ((4, 8, 16, 32), 0.5),
    },
    LinearPVT: {
        **{size: (PVT, rate) for size, rate in dict(tiny=0.1, small=0.1, medium=0.3, large=0.3).items()},
        # as released; InLine Tab. 15 prints PVT's own
        **{f'inline-{size}': ((2, 4, 10, 16), rate) for size, rate in dict(tiny=0.1, small=0.1, medium=0.3).items()},
        'inline-large': ((2, 4, 10, 16), 0.3),
    },
    LinearPVTv2: {size: (PVT, rate) for size, rate in dict(b0=0.1, b1=0.1, b2=0.1, b3=0.3, b4=0.3).items()},
    LinearDeiT: {
        'tiny': ((3,), 0.1),
        'small': ((6,), 0.1),
        'base': ((12,), 0.1),
        # InLine Tab. 14
        'inline-tiny': ((6,), 0.1),
        'inline-small': ((10,), 0.1),
        'inline-base': ((12,), 0.1),
    },
    LinearNextViT: {  # of 32 channels, on three quarters of the width
        'small': ((3, 6, 12, 24), 0.1),
        'base': ((3, 6, 12, 24), 0.2),
        'large': ((3, 6, 12, 24), 0.2),
    },
}


@pytest.mark.parametrize(
    ('host', 'name'), [(host, name) for host in PUBLISHED for name in host.arch_zoo], ids=lambda x: str(x)
)
def test_heads_and_stochastic_depth(host, name):
    published = PUBLISHED[host]
    size = name if name in published else name.partition('-')[2]
    arch = host.resolve_arch(name)
    assert (tuple(arch['num_heads']), arch['drop_path_rate']) == published[size]


def test_initial_layer_scales():
    """Of RAVLT, by stage, as released."""
    scales = {name: RAVLT.resolve_arch(name)['layer_scales'] for name in RAVLT.arch_zoo}
    assert scales == dict(tiny=1.0, small=1.0, base=(1.0, 1.0, 1e-6, 1e-6), large=1e-6)
