# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch

from mmlinattn.checkpoints import CheckpointError
from mmlinattn.checkpoints.states import backbone_state, model_state, state_dict_of, strip_prefix

ONE = torch.ones(1)


def test_order_of_state_dicts_in_a_file():
    """Prefer trained weights to their average, in any order. Skip nested dicts and other values."""
    names = ['state_dict', 'model', 'model_ema', 'state_dict_ema']
    for first in range(4):
        parts = {name: dict(w=torch.tensor(float(i))) for i, name in enumerate(names) if i >= first}
        others = {name: 'resnet' for name in names[:first]}
        for checkpoint in ({**others, **parts}, dict(reversed([*others.items(), *parts.items()]))):
            assert state_dict_of(checkpoint, 'a.pth') == parts[names[first]]
    assert state_dict_of(dict(state_dict=dict(w=ONE, model=dict(v=ONE))), 'a.pth') == dict(w=ONE)


def test_prefixes():
    state = {'a.b': 1, 'a.a.c': 2, 'ab.c': 3}
    assert strip_prefix(state, 'a') == strip_prefix(state, 'a.') == {'b': 1, 'a.c': 2}
    assert list(state_dict_of({'module.module.a': ONE, 'module.b': ONE}, 'x')) == ['a', 'b']
    assert list(state_dict_of({'module.a': ONE, 'b': ONE}, 'x')) == ['module.a', 'b']  # a part of that name
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
    assert list(state_dict_of(averaged.state_dict(), 'x')) == ['weight', 'bias']
    assert list(state_dict_of({'a': ONE, 'epoch': 3}, 'x')) == ['a']
    compiled = {'_orig_mod.module.a': ONE, '_orig_mod.module.b._orig_mod.c': ONE, '_orig_mod.module.my_orig_mod.d': ONE}
    assert list(state_dict_of(compiled, 'x')) == ['a', 'b.c', 'my_orig_mod.d']


def test_parts_of_a_file():
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    parts = 'head neck rpn_head roi_head bbox_head mask_head decode_head auxiliary_head data_preprocessor'.split()
    heads = {f'{part}.w': b for part in parts}
    bare = {'stem.w': a, 'header.w': d, **heads}
    assert backbone_state(bare, 'x') == ({'stem.w': a, 'header.w': d}, heads, [])
    whole = {'backbone.stem.w': a, 'neck.w': b, 'teacher.backbone.stem.w': c}
    assert backbone_state(whole, 'x') == ({'stem.w': a}, {}, [])
    assert backbone_state(whole, 'x', 'teacher.backbone') == ({'stem.w': c}, {}, [])
    assert backbone_state(whole, 'x', 'teacher.') == ({'backbone.stem.w': c}, {}, [])
    assert backbone_state({'w': a}, 'x', 'backbone.') == ({'w': a}, {}, [])
    with pytest.raises(CheckpointError, match="^x.pth holds nothing under prefix 'student.'; .* neck.w"):
        backbone_state(whole, 'x.pth', 'student.')
    assert model_state(whole, 'x') == (whole, [])
    assert model_state(bare, 'x')[0] == {'backbone.stem.w': a, 'backbone.header.w': d, **heads}
