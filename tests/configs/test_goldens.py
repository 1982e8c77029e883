# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The classifiers of the configs, under released files."""

import goldens
import numpy as np
import pytest
import torch
from config_helpers import build

import mmlinattn  # noqa: F401
from mmlinattn.checkpoints.convert import convert_state

pytest.importorskip('mmpretrain')

# a file of each layout; all sizes and methods: tests/backbones
CLASSIFIERS = (
    'ravlt_t inline_pvt_t inline_deit_t flatten_pvt_t flatten_pvt_v2_b1 flatten_swin_t inline_cswin_t softmax_nextvit_s'
).split()
FAST = {'ravlt_t', 'inline_pvt_t', 'inline_deit_t', 'flatten_pvt_t'}


def config_of(case: str) -> str:
    """``ravlt_t_288x416`` -> ``mmpretrain/ravlt_t_in1k``."""
    return f'mmpretrain/{"_".join(part for part in case.split("_") if not part[0].isdigit())}_in1k'


@pytest.mark.parametrize(
    'case', [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CLASSIFIERS]
)
def test_released_classifier(case):
    """Converted as tools/convert_checkpoint.py does, it loads key by key and gives the released logits."""
    if case.startswith('softmax'):  # a baseline is its sibling's config with another arch
        model, _ = build(config_of(case.replace('softmax', 'hmhsa')), False, model__backbone__arch='softmax-small')
    else:
        model, _ = build(config_of(case), random_init=False)
    released = {'model': goldens.state_dict(case)}
    conversion = convert_state(released, case, model)
    assert conversion.complete, conversion.report
    model.load_state_dict(conversion.state_dict, strict=True)
    model.double().eval()
    with torch.no_grad():
        logits = model(goldens.image(case).double(), mode='tensor').numpy()
    expected = goldens.outputs(case)['logits']
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()
