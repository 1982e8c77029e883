# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What attentions are unless told otherwise: the released forms."""

from mmlinattn.attention import AngularMixer, Attention, FocusedMixer


def test_released_forms_are_the_defaults():
    angular = AngularMixer(8, 2)
    assert (angular.form, angular.conv, angular.sequential) == ('released', 'grid', False)
    assert angular.dconv.weight.shape == (2, 1, 3, 3) and angular.dconv.bias is None
    focused = FocusedMixer(8, 2, grid=(3, 4))
    assert focused.power == 3 and focused.local.weight.shape == (4, 1, 5, 5)
    assert focused.scale.shape == (8,) and not focused.scale.any()  # softplus(0) to begin with


def test_a_host_gates_those_that_have_no_opinion():
    """RALA without output augmentation (Tab. 9) stays without where the host gates all others."""
    gates = {
        name: Attention(8, 2, mixer, gate='projection').gate
        for name, mixer in dict(none=dict(type='rala', output_gate=None), rala='rala', softmax='softmax').items()
    }
    assert gates == dict(none=None, rala='projection', softmax='projection')
    assert Attention(8, 2, 'softmax').gate is None and Attention(8, 2, 'rala').gate == 'projection'
