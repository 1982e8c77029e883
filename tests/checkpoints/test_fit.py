# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""One comparison of weights with a model."""

import pytest
import torch
from torch import nn

from mmlinattn.checkpoints.fit import compare, needed, not_finite
from mmlinattn.utils.errors import RunError

ONE, NAN = torch.ones(1), torch.tensor(float('nan'))


class Tensors(nn.Module):
    def __init__(self, parameters, buffers=None):
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.clone()))
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value.clone())

    def ignorable_keys(self, key):
        return key.startswith('late')


def test_every_key_is_in_one_list():
    """Compare dtypes of floating-point weights only, as counters of old files have 32 bits."""
    shape, ints = torch.ones(2, 3), torch.ones(1, dtype=torch.int64)
    model = Tensors(
        dict(same=ONE, shape=shape, kind=ONE, absent=ONE), dict(count=ints[0], num_batches_tracked=ints[0], table=ONE)
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = dict(same=2 * ONE, shape=ONE, kind=ints, extra=ONE, later=ONE, count=ints.int()[0])
    fit = compare(model, state)
    assert fit.weights == dict(same=2 * ONE, count=ints.int()[0]) and fit.missing == ['absent', 'table']
    assert (fit.unexpected, fit.ignored, fit.nonfinite) == (['extra'], ['later'], [])
    assert fit.mismatched == dict(shape='1 in the file, 2x3 in the model') and fit.not_real == dict(kind='int64')
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), 'the model has changed'
    assert list(state) == ['same', 'shape', 'kind', 'extra', 'later', 'count']
    assert compare(model, dict(count=shape)).mismatched == dict(count='2x3 in the file, scalar in the model')
    with pytest.raises(RunError, match=r'no real numbers in memory: kind \(int64\)'):
        fit.check_values()
    fit = needed(model, fit, ('sh',))
    assert (fit.missing, fit.unexpected, fit.mismatched) == (['absent'], ['extra'], {}), 'a table is not trained'
    model.is_init, model.init_cfg = True, dict(type='Pretrained', checkpoint='base.pth')
    model.same.requires_grad_(False)
    assert needed(model, compare(model, {})).missing == ['shape', 'kind', 'absent'], 'only frozen weights come from it'


def test_modules_rename_weights():
    """Copy a detector's weights to student and teacher, as MMDetection's semi-supervised detectors do."""

    class Renames(nn.Sequential):
        def _load_from_state_dict(self, state_dict, prefix, *args):
            for key in list(state_dict):
                state_dict[key.replace('old.', '0.')] = state_dict.pop(key)
            super()._load_from_state_dict(state_dict, prefix, *args)

    fit = compare(Renames(nn.Linear(1, 1), nn.Linear(1, 1)), {'old.weight': torch.ones(1, 1), 'old.bias': ONE})
    assert (list(fit.weights), fit.missing) == (['0.weight', '0.bias'], ['1.weight', '1.bias']) and not fit.unexpected


def test_a_shared_weight_has_several_names():
    model = nn.ModuleDict(dict(a=nn.Linear(1, 1), b=nn.Linear(1, 1)))
    model.b.weight = model.a.weight
    assert compare(model, {'b.weight': torch.ones(1, 1)}).missing == ['a.bias', 'b.bias']


def test_nonfinite_values():
    broken = dict(bad=torch.tensor([1, -float('inf')]), half=NAN.half(), small=NAN.to(torch.float8_e4m3fn))
    state = dict(broken, fine=ONE, count=torch.ones(1, dtype=torch.int64))
    assert not_finite(state, [*state, 'not there']) == list(broken) and not_finite(state, ['bad']) == ['bad']
    model = Tensors(dict(bad=ONE), dict(mask=ONE, running_var=ONE))
    fit = compare(model, dict(bad=NAN[None], mask=NAN[None], running_var=NAN[None]))
    assert fit.nonfinite == ['bad', 'running_var']
    fit.check_values(allow_nonfinite=True)
    with pytest.raises(RunError, match='2 weights of the checkpoint are NaN or infinite: bad, running_var. .* Do this'):
        fit.check_values(remedy=' Do this')
