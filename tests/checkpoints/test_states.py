# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
from checkpoint_helpers import released_ravlt
from torch import nn

from mmlinattn.checkpoints import CheckpointError
from mmlinattn.checkpoints.states import (
    backbone_state,
    fit_backbone,
    fit_state,
    kind_of,
    model_state,
    not_finite,
    state_dict_of,
    strip_prefix,
)

ONE = torch.ones(1)


def test_the_first_state_dict_of_a_file_counts():
    """In the order of the documentation, the trained weights before their average, in whatever order the file has
    them; what is no dict is passed over, as the name of a model is; what lies deeper is of somebody else."""
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
    assert list(state_dict_of({'a': ONE, 'epoch': 3}, 'x')) == ['a']


@pytest.mark.parametrize(
    'checkpoint, line',
    [
        (3, 'a.pth holds a int, not a state dict'),
        (dict(epoch=1, lr=2, args=3, x=4), 'a.pth holds no weights; it has epoch, lr, args, ...'),
        (dict(model={}), 'a.pth holds no weights; it has nothing'),
    ],
)
def test_files_without_weights(checkpoint, line):
    with pytest.raises(CheckpointError, match=f'^{line}$'):
        state_dict_of(checkpoint, 'a.pth')


def test_parts_of_a_file():
    """What of a bare file is a head, what of a whole one is its backbone, and what is asked for by its prefix."""
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    bare = {'stem.w': a, 'head.w': b, 'neck.w': c, 'header.w': d}
    assert backbone_state(bare, 'x') == ({'stem.w': a, 'header.w': d}, {'head.w': b, 'neck.w': c}, [])
    whole = {'backbone.stem.w': a, 'neck.w': b, 'teacher.backbone.stem.w': c}
    assert backbone_state(whole, 'x') == ({'stem.w': a}, {}, [])
    assert backbone_state(whole, 'x', 'teacher.backbone') == ({'stem.w': c}, {}, [])
    assert backbone_state(whole, 'x', 'teacher.') == ({'backbone.stem.w': c}, {}, [])
    assert backbone_state({'w': a}, 'x', 'backbone.') == ({'w': a}, {}, [])
    with pytest.raises(
        CheckpointError, match="^x.pth holds nothing under prefix 'student.'; .* backbone.stem.w, neck.w"
    ):
        backbone_state(whole, 'x.pth', 'student.')
    assert model_state(whole, 'x') == (whole, [])
    assert model_state(bare, 'x')[0] == {'backbone.stem.w': a, 'backbone.header.w': d, 'head.w': b, 'neck.w': c}


@pytest.mark.parametrize(
    'part', 'head neck rpn_head roi_head bbox_head mask_head decode_head auxiliary_head data_preprocessor'.split()
)
def test_parts_beside_a_bare_backbone_are_heads(part):
    assert backbone_state({'w': ONE, f'{part}.w': ONE}, 'x') == ({'w': ONE}, {f'{part}.w': ONE}, [])


def test_what_of_a_whole_file_was_dropped_has_its_whole_name():
    dense = released_ravlt(dense=True)
    for prefix in ('backbone.', ''):
        _, dropped = model_state({f'{prefix}{key}': value for key, value in dense.items()}, 'x')
        assert dropped == [f'{prefix}layers.{i}.RoPE.angle' for i in range(4)]


def test_the_report_of_a_fit():
    """Kinds are compared where the model has real numbers; old files have counters of 32 bits."""
    shape, ints = torch.ones(2, 3), torch.ones(1, dtype=torch.int64)
    own = dict(same=ONE, shape=shape, kind=ONE, absent=ONE, late=ONE, count=ints[0], num_batches_tracked=ints[0])
    state = dict(same=ONE, shape=ONE, kind=ints, extra=ONE, later=ONE, count=ints.int()[0])
    fits, report = fit_state(own, state, lambda key: key.startswith('late'))
    assert fits == dict(same=ONE, count=ints.int()[0]) and report == (
        ['same', 'count'],
        ['absent'],
        ['extra'],
        ['shape (1 in the file, 2x3 in the model)', 'kind (int64 in the file, real in the model)'],
        ['later'],
    )
    _, report = fit_state(own, dict(count=shape))
    assert report.mismatched == ['count (2x3 in the file, scalar in the model)']
    assert report.missing == ['same', 'shape', 'kind', 'absent', 'late'] and report.ignored == []


class Table(nn.Module):
    """A backbone with a table of its own size, as position encodings are, and a part that may be left out."""

    def __init__(self, size):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(size))
        self.late = nn.Linear(1, 1)

    def adapt_state_dict(self, state):
        return {'table': state.pop('table')[: len(self.table)], **state}

    def ignorable_keys(self, key):
        return key.startswith('late.')


def test_a_backbone_takes_part_through_its_two_hooks():
    state = {'table': torch.arange(5.0), 'late.weight': torch.ones(1, 1), 'late.other': ONE}
    fits, report = fit_backbone(Table(3), state)
    assert list(state) == ['table', 'late.weight', 'late.other']  # the caller's own
    assert fits['table'].tolist() == [0, 1, 2]
    assert report == (['table', 'late.weight'], [], [], [], ['late.other'])
    fits, report = fit_backbone(nn.Linear(1, 1), {'weight': torch.ones(1, 1), 'x': ONE})  # without hooks
    assert list(fits) == ['weight'] and report == (['weight'], ['bias'], ['x'], [], [])


def test_kinds_of_tensors():
    kinds = dict(
        real=torch.ones(1, dtype=torch.bfloat16),
        meta=torch.ones(1, device='meta'),
        quantized=torch.quantize_per_tensor(ONE, 0.1, 0, torch.qint8),
        nested=torch.nested.nested_tensor([ONE, torch.ones(2)]),
        sparse_coo=ONE.to_sparse(),
        sparse_csr=torch.ones(1, 1).to_sparse_csr(),
        int8=torch.ones(1, dtype=torch.int8),
        complex64=torch.ones(1, dtype=torch.complex64),
    )
    assert {name: kind_of(tensor) for name, tensor in kinds.items()} == {name: name for name in kinds}
    small = {f'{dtype}': torch.tensor(float('nan')).to(dtype) for dtype in (torch.half, torch.float8_e4m3fn)}
    broken = dict(kinds, bad=torch.tensor([1, -float('inf')]), **small)
    assert not_finite(broken, [*broken, 'not there']) == ['bad', *small] and not_finite(broken, ['bad']) == ['bad']
