# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Backbones behind timm's interface: feature information, intermediates, checkpointing, parameter groups."""

import pytest
import torch
from helpers.small_backbones import ARCHS, PYRAMIDS, build, image

every_backbone = pytest.mark.parametrize('backbone', ARCHS)


@every_backbone
@pytest.mark.parametrize('out_norm', [True, False])
def test_the_named_module_computes_the_output(backbone, out_norm):
    model = build(backbone, 'rala', out_indices=(0, 1), out_norm=out_norm).eval()
    found = []
    for info in model.feature_info:
        assert (info['num_chs'], info['reduction']) == (info['channels'], info['stride'])
        model.get_submodule(info['module']).register_forward_hook(lambda *call: found.append(call[-1]))
    with torch.no_grad():
        outs = model(image())
    assert len(found) == len(outs) == 2
    if backbone in PYRAMIDS:
        for made, out in zip(found, outs):
            made = made if out_norm else made.permute(0, 3, 1, 2)
            torch.testing.assert_close(made, out, rtol=1e-5, atol=1e-5)


def test_intermediates_are_the_selected_outputs():
    model, x = build('RAVLT').eval(), image()
    outs = model(x)
    last, maps = model.forward_intermediates(x, [-1, 0], norm=True)
    assert torch.equal(last, outs[3]) and list(map(torch.equal, maps, (outs[0], outs[3]))) == [True, True]
    for indices, kept in ((None, outs), (2, outs[2:])):
        maps = model.forward_intermediates(x, indices, stop_early=True, intermediates_only=True)
        assert len(maps) == len(kept) and all(map(torch.equal, maps, kept))


@pytest.mark.parametrize(
    ('backbone', 'options', 'call', 'message'),
    [
        ('RAVLT', {}, dict(indices=5), 'indices=5: expected 1 to 4'),
        ('RAVLT', {}, dict(indices=0), 'indices=0'),
        ('RAVLT', {}, dict(indices=[4]), r'indices=\[4\]'),
        ('RAVLT', {}, dict(norm=False), 'norm=False: expected True. Build the model with out_norm=False'),
        ('RAVLT', dict(out_norm=False), dict(norm=True), 'norm=True: expected False'),
        ('RAVLT', {}, dict(output_fmt='NLC'), "output_fmt='NLC': expected 'NCHW'"),
        ('LinearDeiT', dict(out_type='cls_token'), {}, "out_type='cls_token': expected 'featmap'"),
    ],
)
def test_intermediates_that_are_refused(backbone, options, call, message):
    with pytest.raises(ValueError, match=message):
        build(backbone, **options).forward_intermediates(image(), **call)


def test_tables_are_exempt_from_weight_decay():
    assert {'cls_token', 'position_table.weight'} <= build('LinearDeiT', 'softmax').no_weight_decay()
    names = build('LinearSwin', 'softmax').no_weight_decay()
    assert names and all(name.endswith('relative_bias.table') for name in names)
    assert build('RAVLT', 'softmax').no_weight_decay() == set()


@every_backbone
def test_layers_of_parameters_rise_with_depth(backbone):
    model = build(backbone, 'rala')
    fine, coarse = model.group_matcher(), model.group_matcher(coarse=True)
    names = [name for name, _ in model.named_parameters()]
    assert sorted({fine(name) for name in names} | {0}) == list(range(sum(model.built_depths) + 2))
    assert {coarse(name) for name in names} == set(range(len(model.built_depths) + 2))
    last = max(i for i, name in enumerate(names) if name.startswith(('stages', 'blocks')))
    assert fine(names[last]) == sum(model.built_depths) and coarse(names[last]) == len(model.built_depths)
