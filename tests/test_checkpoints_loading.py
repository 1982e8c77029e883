# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import logging
import sys

import goldens
import pytest
import torch
from checkpoint_helpers import ARCH, released_ravlt
from mmengine.logging import MMLogger
from mmengine.model import PretrainedInit
from mmengine.runner.checkpoint import CheckpointLoader
from torch import nn

from mmlinattn.backbones import RAVLT
from mmlinattn.checkpoints import CheckpointError, layouts, load_pretrained, loading
from mmlinattn.checkpoints.layouts import Layout, all_layouts, find_layout
from mmlinattn.checkpoints.states import (
    backbone_state,
    fit_backbone,
    fit_state,
    kind_of,
    model_state,
    not_finite,
    some,
    state_dict_of,
    strip_prefix,
)


def model(**kwargs) -> RAVLT:
    return RAVLT(ARCH, **kwargs)


def save(path, thing) -> str:
    torch.save(thing, path)
    return str(path)


@pytest.fixture
def warnings_of(caplog):
    """The warnings that loading logs."""
    logger = MMLogger.get_instance('checkpoint-tests', log_level='INFO')
    logger.addHandler(caplog.handler)
    MMLogger.get_instance('the current one')  # is not the one that is given

    def run(*args, **kwargs):
        caplog.clear()
        report = load_pretrained(*args, logger=logger, **kwargs)
        found = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        return report, found

    yield run
    logger.removeHandler(caplog.handler)


WRAPPINGS = {
    'bare': lambda state: state,
    'model': lambda state: {'model': state, 'epoch': 299},
    'state_dict': lambda state: {'state_dict': state, 'meta': {}},
    'module': lambda state: {'model': {f'module.{key}': v for key, v in state.items()}},
}


@pytest.mark.parametrize('wrapping', WRAPPINGS)
@pytest.mark.parametrize('dense', [False, True])
def test_released_files_however_wrapped(tmp_path, warnings_of, wrapping, dense):
    released = released_ravlt(dense)
    path = save(tmp_path / 'released.pth', WRAPPINGS[wrapping](released))
    backbone = model(out_norm=dense)
    report, warned = warnings_of(backbone, path)
    assert warned == [] and set(report.loaded) == set(backbone.state_dict())
    # Each tensor arrived: 1x1 convolutions as linear layers, the rest as it was.
    ours = sorted(float(v.double().sum()) for v in backbone.state_dict().values())
    classifier = ('proj.', 'norm.', 'head.')
    theirs = sorted(
        float(v.double().sum()) for key, v in released.items() if 'RoPE' not in key and not key.startswith(classifier)
    )
    assert ours == pytest.approx(theirs)


def test_a_whole_released_detector_gives_its_backbone(tmp_path, warnings_of):
    state = {f'backbone.{key}': v for key, v in released_ravlt(dense=True).items()}
    state.update({'neck.w': torch.ones(1), 'rpn_head.w': torch.ones(1), 'head.fc': torch.ones(1)})
    for prefix in (None, 'backbone', 'backbone.'):
        backbone = model()
        report, warned = warnings_of(backbone, save(tmp_path / 'detector.pth', {'state_dict': state}), prefix=prefix)
        assert warned == [] and len(report.loaded) == len(backbone.state_dict())


@pytest.mark.parametrize('prefix', ['', 'backbone.', 'module.backbone.'])
def test_our_own_files(tmp_path, warnings_of, prefix):
    source, target = model(), model()
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    state = {f'{prefix}{key}': value for key, value in source.state_dict().items()}
    if prefix:
        state[prefix.replace('backbone.', '') + 'head.fc.weight'] = torch.ones(1)
    _, warned = warnings_of(target, save(tmp_path / 'own.pth', {'state_dict': state}))
    assert warned == []
    for key, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], value), key


def test_what_loading_hands_on(monkeypatch):
    """Where and how the file is read, and MMEngine's log of where each weight comes from."""
    asked, backbone = [], model()
    monkeypatch.setattr(
        CheckpointLoader, 'load_checkpoint', classmethod(lambda _, *args: asked.append(args) or model().state_dict())
    )
    load_pretrained(backbone, 'a.pth')
    backbone.init_weights()
    load_pretrained(backbone, 'b.pth', 'meta', 'silent')
    assert asked == [('a.pth', 'cpu', 'current'), ('b.pth', 'meta', 'silent')]
    noted = []
    monkeypatch.setattr(loading, 'update_init_info', lambda *args: noted.append(args))
    load_pretrained(backbone, 'c.pth')
    assert noted == []  # it is kept while weights are initialised
    backbone._params_init_info = {}
    load_pretrained(backbone, 'c.pth')
    assert noted == [(backbone, 'load_pretrained: from c.pth')]


def test_what_does_not_fit_is_listed_in_one_warning(tmp_path, warnings_of):
    state = model().state_dict()
    state['mystery.weight'] = torch.ones(1)
    state['out_norms.1.weight'] = torch.full((5,), 3.0)
    del state['patch_embeds.0.layers.0.weight']
    target = model()
    path = save(tmp_path / 'own.pth', state)
    report, warned = warnings_of(target, path)
    assert report.missing == ['patch_embeds.0.layers.0.weight']
    assert report.unexpected == ['mystery.weight']
    (warning,) = warned
    assert path in warning
    for part in (*report.missing, *report.unexpected, 'out_norms.1.weight (5 in the file, 16'):
        assert part in warning
    assert target.state_dict()['out_norms.1.weight'].shape == (16,)


@pytest.mark.parametrize('dtype', [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
def test_weights_that_are_no_real_numbers_are_not_loaded(tmp_path, warnings_of, dtype):
    """PyTorch would copy them, rounded or without their imaginary part, and say nothing."""
    state, key = model().state_dict(), 'out_norms.1.weight'
    state[key] = torch.full((16,), 3, dtype=dtype)
    target = model()
    report, (warning,) = warnings_of(target, save(tmp_path / 'own.pth', state))
    assert report.mismatched == [f'{key} ({str(dtype)[6:]} in the file, real in the model)']
    assert report.mismatched[0] in warning and (target.state_dict()[key] == 1).all()


PARTS = 'head neck rpn_head roi_head bbox_head mask_head decode_head auxiliary_head data_preprocessor'


@pytest.mark.parametrize('part', PARTS.split())
def test_what_a_bare_backbone_has_beside_it_is_no_news(tmp_path, warnings_of, part):
    state = {**model().state_dict(), f'{part}.weight': torch.ones(1)}
    report, warned = warnings_of(model(), save(tmp_path / 'own.pth', state))
    assert warned == [] and report.unexpected == []


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_weights_that_are_no_numbers_are_news(tmp_path, warnings_of, value):
    state, key = model().state_dict(), 'out_norms.1.weight'
    state[key][3] = value
    _, (warning,) = warnings_of(model(), save(tmp_path / 'own.pth', state))
    assert warning.endswith(f'NaN or infinite: {key}')


@pytest.mark.parametrize('statistic', ['running_mean', 'running_var'])
def test_missing_statistics_of_a_batch_norm_are_news(tmp_path, warnings_of, statistic):
    """Only the counter beside them may be missing: without its mean a norm gives other numbers."""
    state = model().state_dict()
    keys = [key for key in state if key.endswith(statistic)]
    assert keys
    del state[keys[0]]
    report, (warning,) = warnings_of(model(), save(tmp_path / 'own.pth', state))
    assert report.missing == [keys[0]] and keys[0] in warning


@pytest.mark.parametrize('first, second', [('model', 'model_ema'), ('state_dict', 'state_dict_ema')])
def test_the_weights_of_training_go_before_their_average(tmp_path, warnings_of, first, second):
    """Files of both kinds name the trained weights first; which are taken must not depend on the file's order."""
    trained, averaged = (
        {key: torch.full_like(value, number) for key, value in model().state_dict().items()} for number in (1.0, 2.0)
    )
    for i, checkpoint in enumerate(({second: averaged, first: trained}, {first: trained, second: averaged})):
        target = model()
        warnings_of(target, save(tmp_path / f'{i}.pth', checkpoint))
        assert (target.state_dict()['out_norms.1.weight'] == 1).all()


def test_the_first_state_dict_of_a_file_counts():
    """In the order of the documentation; what is no dict is passed over, as the name of a model is."""
    names = ['state_dict', 'model', 'model_ema', 'state_dict_ema']
    for first in range(4):
        parts = {name: dict(w=torch.tensor(float(i))) for i, name in enumerate(names) if i >= first}
        others = {name: 'resnet' for name in names[:first]}
        for checkpoint in ({**others, **parts}, dict(reversed([*others.items(), *parts.items()]))):
            assert state_dict_of(checkpoint, 'a.pth') == parts[names[first]]


def test_a_state_dict_is_looked_for_once():
    """What lies deeper is of somebody else."""
    weight, other = torch.zeros(1), torch.ones(1)
    state = state_dict_of(dict(state_dict=dict(weight=weight, model=dict(weight=other))), 'a.pth')
    assert list(state) == ['weight'] and state['weight'] is weight


def test_parts_the_model_was_configured_without_are_no_news(tmp_path, warnings_of):
    path = save(tmp_path / 'dense.pth', {'state_dict': released_ravlt(dense=True)})
    report, warned = warnings_of(model(out_indices=(1, 2)), path)
    assert warned == [] and 'out_norms.0.weight' in report.ignored
    report, warned = warnings_of(model(out_norm=False), path)
    assert warned == [] and len(report.ignored) == 8


def test_norms_that_a_classifier_lacks_are_news(tmp_path, warnings_of):
    report, warned = warnings_of(model(), save(tmp_path / 'cls.pth', {'model': released_ravlt()}))
    assert len(warned) == 1 and len(report.missing) == 8
    assert all(key.startswith('out_norms.') for key in report.missing)


@pytest.mark.parametrize(
    'alien',
    [{'layer1.0.conv1.weight': torch.ones(1)}, {'patch_embeds.0.layers.0.bias': torch.ones(99)}],
)
def test_nothing_loaded_at_all_is_an_error(tmp_path, alien):
    path = save(tmp_path / 'resnet.pth', {'state_dict': alien})
    backbone = model()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(backbone, path)
    message = str(caught.value)
    assert path in message and next(iter(alien)) in message and 'patch_embeds.0' in message
    assert all(torch.equal(before[key], v) for key, v in backbone.state_dict().items())


@pytest.mark.parametrize('thing', [{'epoch': 3}, {}, [torch.ones(1)], {'model': {'a': 1}}])
def test_a_file_without_weights_is_an_error(tmp_path, thing):
    path = save(tmp_path / 'log.pth', thing)
    with pytest.raises(CheckpointError, match='log.pth'):
        load_pretrained(model(), path)


def test_a_wrong_prefix_is_an_error(tmp_path):
    path = save(tmp_path / 'own.pth', model().state_dict())
    with pytest.raises(CheckpointError, match="prefix 'encoder.'"):
        load_pretrained(model(), path, prefix='encoder.')
    assert load_pretrained(model(), path, prefix='backbone.').missing == []


def test_batch_counters_may_be_missing(tmp_path, warnings_of):
    state = {k: v for k, v in model().state_dict().items() if 'num_batches' not in k}
    assert warnings_of(model(), save(tmp_path / 'own.pth', state))[1] == []


class Table(nn.Module):
    """A backbone with a table of its own size, as position encodings are."""

    def __init__(self, size):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(size))
        self.late = nn.Linear(1, 1)

    def adapt_state_dict(self, state):
        return {**state, 'table': state['table'][: len(self.table)]}

    def ignorable_keys(self, key):
        return key.startswith('late.')


def test_a_backbone_takes_part_through_its_two_hooks(tmp_path, warnings_of):
    path = save(tmp_path / 'table.pth', {'table': torch.arange(5.0)})
    backbone = Table(3)
    report, warned = warnings_of(backbone, path)
    assert backbone.table.tolist() == [0, 1, 2] and warned == [] and report.missing == []
    state = {'table': torch.arange(5.0), 'late.weight': torch.ones(1, 1), 'late.other': torch.ones(1)}

    class Greedy(Table):
        def adapt_state_dict(self, state):
            return {'table': state.pop('table')[:3], **state}

    fits, report = fit_backbone(Greedy(3), state)
    assert list(state) == ['table', 'late.weight', 'late.other']  # the caller's own
    assert list(fits) == ['table', 'late.weight'] and report == (['table', 'late.weight'], [], [], [], ['late.other'])
    fits, report = fit_backbone(nn.Linear(1, 1), {'weight': torch.ones(1, 1), 'x': torch.ones(1)})  # without hooks
    assert list(fits) == ['weight'] and report == (['weight'], ['bias'], ['x'], [], [])


@pytest.mark.parametrize(
    'kind', ['Pretrained', PretrainedInit, 'mmengine.Pretrained', 'mmengine.model.weight_init.PretrainedInit'], ids=str
)
def test_init_weights_reads_a_released_file(tmp_path, kind):
    """However the config names what loads it, the class included, as configs of the pure Python style do."""
    released = released_ravlt()
    path = save(tmp_path / 'RAVLT.pth', {'model': released})
    backbone = model(init_cfg=dict(type=kind, checkpoint=path))
    backbone.init_weights()
    stem = backbone.patch_embeds[0].layers[0].weight
    assert torch.equal(stem, released['patch_embed.proj.0.weight'])


def test_init_weights_takes_the_part_that_is_asked_for(tmp_path):
    """Of a file of two: without ``prefix``, that under ``backbone.``."""
    parts = {
        f'{prefix}{key}': torch.full_like(value, number)
        for number, prefix in ((1, 'backbone.'), (2, 'teacher.'))
        for key, value in model().state_dict().items()
    }
    path = save(tmp_path / 'both.pth', {'state_dict': parts})
    for expected, options in ((1, {}), (2, dict(prefix='teacher.'))):
        backbone = model(init_cfg=dict(type='Pretrained', checkpoint=path, **options))
        backbone.init_weights()
        assert all((value == expected).all() for value in backbone.state_dict().values())


def test_a_released_file_is_of_one_layout_and_others_are_of_none():
    found = set()
    for case in goldens.cases():
        keys = frozenset(goldens.info(case)['state'])
        (layout,) = [layout.name for layout in all_layouts() if layout.matches(keys)]
        found.add(layout)
    assert found == {layout.name for layout in all_layouts()}
    assert find_layout(model().state_dict()) is None
    assert find_layout(['patch_embed.proj.weight', 'norm.weight']) is None


def test_layouts_of_a_module(tmp_path, monkeypatch):
    """By name, one of two functions or any number of objects; each once, helpers are none."""
    two = 'from mmlinattn.checkpoints.layouts import Layout\nx = Layout("z", len, dict)\ny = Layout("a", any, dict)\n'
    for name, text in (
        ('b_functions', 'matches, convert = all, list'),
        ('a_objects', two),
        ('c_again', f'from {layouts.__name__}.a_objects import y\nmatches = convert = None'),
        ('_helper', 'matches = convert = None'),
    ):
        (tmp_path / f'{name}.py').write_text(text)
        monkeypatch.setitem(sys.modules, f'{layouts.__name__}.{name}', None)  # so that it is taken back
        del sys.modules[f'{layouts.__name__}.{name}']
    monkeypatch.setattr(layouts, '__path__', [str(tmp_path)])
    found = all_layouts.__wrapped__()
    assert found == (Layout('z', len, dict), Layout('a', any, dict), Layout('b_functions', all, list))


def test_the_first_few_of_many():
    assert [some('abcd'[:n]) for n in range(5)] == ['nothing', 'a', 'a, b', 'a, b, c', 'a, b, c, ...']
    assert some([1, 2], limit=1) == '1, ...'


def test_prefixes():
    state = {'a.b': 1, 'a.a.c': 2, 'ab.c': 3}
    assert strip_prefix(state, 'a') == strip_prefix(state, 'a.') == {'b': 1, 'a.c': 2}
    weight = torch.ones(1)
    assert list(state_dict_of({'module.module.a': weight, 'module.module.b': weight}, 'x')) == ['a', 'b']
    assert list(state_dict_of({'module.a': weight, 'b': weight}, 'x')) == ['module.a', 'b']  # a part of that name
    assert list(state_dict_of({'a': weight, 'epoch': 3}, 'x')) == ['a']


@pytest.mark.parametrize(
    'checkpoint, line',
    [
        (3, 'a.pth holds a int, not a state dict'),
        (dict(epoch=1, lr=2, args=3, x=4), 'a.pth holds no weights; it has epoch, lr, args, ...'),
        (dict(model={}), 'a.pth holds no weights; it has nothing'),
    ],
)
def test_lines_about_files_without_weights(checkpoint, line):
    with pytest.raises(CheckpointError) as found:
        state_dict_of(checkpoint, 'a.pth')
    assert str(found.value) == line


def test_parts_of_a_file():
    """What of a bare file is a head, what of a whole one is its backbone, and what is asked for by its prefix."""
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    bare = {'stem.w': a, 'head.w': b, 'neck.w': c, 'header.w': d}
    assert backbone_state(bare, 'x') == ({'stem.w': a, 'header.w': d}, {'head.w': b, 'neck.w': c}, [])
    whole = {'backbone.stem.w': a, 'neck.w': b, 'teacher.backbone.stem.w': c}
    assert backbone_state(whole, 'x') == ({'stem.w': a}, {}, [])
    assert backbone_state(whole, 'x', 'teacher.backbone') == ({'stem.w': c}, {}, [])
    assert backbone_state(whole, 'x', 'teacher.') == ({'backbone.stem.w': c}, {}, [])
    with pytest.raises(CheckpointError) as found:
        backbone_state(whole, 'x.pth', 'student.')
    assert str(found.value) == (
        "x.pth holds nothing under prefix 'student.'; its keys are like backbone.stem.w, neck.w, "
        'teacher.backbone.stem.w'
    )
    assert model_state(whole, 'x') == (whole, [])
    assert model_state(bare, 'x') == (
        {'backbone.stem.w': a, 'backbone.header.w': d, 'head.w': b, 'neck.w': c},
        [],
    )


def test_what_of_a_whole_file_was_dropped_has_its_whole_name():
    dense = released_ravlt(dense=True)
    _, dropped = model_state({f'backbone.{key}': value for key, value in dense.items()}, 'x')
    assert dropped == [f'backbone.layers.{i}.RoPE.angle' for i in range(4)]
    _, dropped = model_state(dense, 'x')
    assert dropped == [f'layers.{i}.RoPE.angle' for i in range(4)]


def test_the_report_of_a_fit():
    one, two, whole = torch.ones(1), torch.ones(2, 3), torch.ones(2, dtype=torch.int64)
    own = dict(same=one, shape=two, kind=one, absent=one, late=one, count=whole[0], num_batches_tracked=whole[0])
    state = dict(same=one, shape=one, kind=whole[:1], extra=one, later=one, count=one[0])
    fits, report = fit_state(own, state, lambda key: key.startswith('late'))
    assert fits == dict(same=one, count=one[0]) and report == (
        ['same', 'count'],
        ['absent'],
        ['extra'],
        ['shape (1 in the file, 2x3 in the model)', 'kind (int64 in the file, real in the model)'],
        ['later'],
    )
    _, report = fit_state(own, dict(count=two))
    assert report.mismatched == ['count (2x3 in the file, scalar in the model)']
    assert report.missing == ['same', 'shape', 'kind', 'absent', 'late'] and report.ignored == []


def test_kinds_of_tensors():
    kinds = dict(
        real=torch.ones(1, dtype=torch.bfloat16),
        meta=torch.ones(1, device='meta'),
        quantized=torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8),
        nested=torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        sparse_coo=torch.ones(1).to_sparse(),
        sparse_csr=torch.ones(1, 1).to_sparse_csr(),
        int8=torch.ones(1, dtype=torch.int8),
        complex64=torch.ones(1, dtype=torch.complex64),
    )
    assert {name: kind_of(tensor) for name, tensor in kinds.items()} == {name: name for name in kinds}
    small = {f'{dtype}': torch.tensor(float('nan')).to(dtype) for dtype in (torch.half, torch.float8_e4m3fn)}
    broken = dict(kinds, bad=torch.tensor([1, -float('inf')]), **small)
    assert not_finite(broken, [*broken, 'not there']) == ['bad', *small] and not_finite(broken, ['bad']) == ['bad']


def test_counts_of_another_kind_of_integer_fit():
    """Kinds are compared where the model has real numbers; old files have counters of 32 bits."""
    own = dict(counter=torch.zeros((), dtype=torch.int64), weight=torch.zeros(2))
    state = dict(counter=torch.ones((), dtype=torch.int32), weight=torch.ones(2, dtype=torch.int32))
    fits, report = fit_state(own, state)
    assert list(fits) == report.loaded == ['counter']
    assert report.mismatched == ['weight (int32 in the file, real in the model)']


def test_the_lines_of_loading(tmp_path, warnings_of):
    path = save(tmp_path / 'a.pth', {'x.w': torch.ones(1), 'x.v': torch.ones(1)})
    with pytest.raises(CheckpointError) as found:
        load_pretrained(nn.Linear(1, 1), path)
    assert str(found.value) == f'nothing in {path} fits Linear: the file has x.w, x.v; the model has weight, bias'
    path = save(tmp_path / 'heads.pth', {'head.w': torch.ones(1)})
    with pytest.raises(CheckpointError) as found:
        load_pretrained(nn.Linear(1, 1), path)
    assert str(found.value) == f'nothing in {path} fits Linear: the file has head.w; the model has weight, bias'
    path = save(tmp_path / 'b.pth', {'weight': torch.ones(3)})
    with pytest.raises(CheckpointError) as found:
        load_pretrained(nn.Linear(1, 1), path)
    assert str(found.value) == (
        f'nothing in {path} fits Linear: the file has weight; the model has weight, bias; of another shape or kind: '
        'weight (3 in the file, 1x1 in the model)'
    )
    state = dict(weight=torch.full((2, 2), float('nan')), x=torch.ones(1), y=torch.ones(1))
    state['0.w'] = torch.ones(1)
    path, model = save(tmp_path / 'c.pth', state), nn.Linear(2, 2)
    _, (line,) = warnings_of(model, path)
    assert line == (
        f'{path} and Linear do not match exactly. missing in the file: bias; unexpected in the file: x, y, 0.w; '
        'NaN or infinite: weight'
    )
    assert model.weight.isnan().all()
    _, (line,) = warnings_of(model, save(tmp_path / 'c.pth', dict(weight=torch.ones(2, 2), bias=torch.ones(3))))
    assert line.endswith('exactly. of another shape or kind, not loaded: bias (3 in the file, 2 in the model)')


# keys of released files, with shapes, in the names of this project: of the backbone, of the head, or dropped
RELEASED = {
    'ravlt': {
        'patch_embed.proj.10.running_mean': ('patch_embeds.0.layers.10.running_mean', (4,)),
        'layers.0.RoPE.angle': (None, (2,)),
        'layers.0.blocks.1.gamma_1': ('stages.0.1.gamma1', (1, 4, 1, 1), (4,)),
        'layers.0.blocks.1.gamma_2': ('stages.0.1.gamma2', (1, 4, 1, 1), (4,)),
        'layers.0.blocks.1.norm1.norm.weight': ('stages.0.1.norm1.weight', (4,)),
        'layers.0.blocks.1.norm2.norm.bias': ('stages.0.1.norm2.bias', (4,)),
        'layers.2.blocks.11.attn.qkvo.weight': ('stages.2.11.attn.qkv.weight', (16, 4, 1, 1), (16, 4)),
        'layers.2.blocks.11.attn.qkvo.bias': ('stages.2.11.attn.qkv.bias', (16,)),
        'layers.2.blocks.11.attn.proj.weight': ('stages.2.11.attn.proj.weight', (4, 4, 1, 1), (4, 4)),
        'layers.2.blocks.11.attn.lepe.weight': ('stages.2.11.attn.local.weight', (4, 1, 5, 5)),
        'layers.2.blocks.11.ffn.fc1.weight': ('stages.2.11.ffn.fc1.weight', (8, 4, 1, 1), (8, 4)),
        'layers.2.blocks.11.ffn.fc2.weight': ('stages.2.11.ffn.fc2.weight', (4, 8, 1, 1), (4, 8)),
        'layers.2.blocks.11.ffn.dwconv.weight': ('stages.2.11.ffn.dwconv.weight', (8, 1, 3, 3)),
        'layers.2.blocks.11.pos.weight': ('stages.2.11.position.weight', (4, 1, 3, 3)),
        'layers.2.downsample.reduction.weight': ('patch_embeds.3.layers.conv.weight', (8, 4, 3, 3)),
        'layers.0.downsample.norm.running_var': ('patch_embeds.1.layers.norm.running_var', (8,)),
        'extra_norms.2.norm.weight': ('out_norms.2.weight', (4,)),
        'proj.weight': ('neck.proj.weight', (16, 4, 1, 1)),
        'norm.num_batches_tracked': ('neck.norm.num_batches_tracked', ()),
        'head.weight': ('head.fc.weight', (10, 16, 1, 1), (10, 16)),
        'head.bias': ('head.fc.bias', (10,)),
    },
    'deit': {
        'pos_embed': ('position_table.weight', (1, 5, 4)),
        'cls_token': ('cls_token', (1, 1, 4)),
        'patch_embed.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 2, 2)),
        'blocks.0.attn.qkv.weight': ('blocks.0.attn.qkv.weight', (12, 4)),
        'blocks.0.attn.residual.0.weight': ('blocks.0.attn.mixer.residual.fc1.weight', (4, 2, 1)),
        'blocks.0.attn.residual.2.bias': ('blocks.0.attn.mixer.residual.fc2.bias', (36,)),
        'blocks.0.mlp.fc1.weight': ('blocks.0.ffn.fc1.weight', (8, 4)),
        'norm.bias': ('out_norm.bias', (4,)),
        'head.weight': ('head.fc.weight', (10, 4)),
        'mystery': ('mystery', (1,)),
    },
    'swin': {
        'patch_embed.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 4, 4)),
        'patch_embed.norm.bias': ('patch_embeds.0.norm.bias', (4,)),
        'layers.2.blocks.17.attn.qkv.weight': ('stages.2.17.attn.qkv.weight', (12, 4)),
        'layers.0.blocks.1.attn.relative_position_bias_table': ('stages.0.1.attn.relative_bias.table', (9, 2)),
        'layers.0.blocks.1.attn.relative_position_index': (None, (4, 4)),
        'layers.0.blocks.1.attn_mask': (None, (4, 4, 4)),
        'layers.0.blocks.1.attn.positional_encoding': ('stages.0.1.attn.mixer.position.weight', (1, 4, 4)),
        'layers.0.blocks.1.attn.scale': ('stages.0.1.attn.mixer.scale', (1, 1, 4), (4,)),
        'layers.0.blocks.1.attn.dwc.weight': ('stages.0.1.attn.mixer.local.weight', (2, 1, 5, 5)),
        'layers.0.downsample.reduction.weight': ('patch_embeds.1.reduction.weight', (8, 16)),
        'layers.2.downsample.norm.weight': ('patch_embeds.3.norm.weight', (8,)),
        'norm.weight': ('out_norms.3.weight', (4,)),
        'norm1.weight': ('out_norms.1.weight', (4,)),  # of a dense backbone
        'head.bias': ('head.fc.bias', (10,)),
    },
    'pvt': {
        'patch_embed1.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 4, 4)),
        'pos_embed4': ('position_tables.3.weight', (1, 5, 4)),
        'block3.26.attn.q.weight': ('stages.2.26.attn.qkv.weight', (4, 4), (12, 4)),
        'block3.26.attn.kv.weight': (..., (8, 4)),
        'block2.3.mlp.dwconv.dwconv.weight': ('stages.1.3.ffn.dwconv.weight', (8, 1, 3, 3)),
        'block2.3.norm1.weight': ('stages.1.3.norm1.weight', (4,)),
        'norm1.bias': ('out_norms.0.bias', (4,)),
        'norm4.bias': ('out_norms.3.bias', (4,)),
        'norm.weight': ('out_norms.3.weight', (4,)),
        'head.weight': ('head.fc.weight', (10, 4)),
    },
    'pvt of FLatten': {
        'patch_embed1.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 4, 4)),
        'block1.0.attn.positional_encoding': ('stages.0.0.attn.mixer.position.weight', (1, 4, 4)),
        'norm.weight': (None, (4,)),  # which the release has and does not use
        'norm.bias': (None, (4,)),
    },
    'pvt of which a part is gone': {
        'patch_embed1.proj.weight': ('patch_embeds.0.proj.weight', (4, 3, 4, 4)),
        'block1.0.attn.q.weight': ('stages.0.0.attn.q.weight', (4, 4)),  # to be listed as unexpected
        'block2.0.attn.kv.weight': ('stages.1.0.attn.kv.weight', (8, 4)),
    },
    'cswin': {
        'stage1_conv_embed.0.weight': ('patch_embeds.0.proj.weight', (4, 3, 7, 7)),
        'stage1_conv_embed.2.weight': ('patch_embeds.0.norm.weight', (4,)),
        'merge2.conv.weight': ('patch_embeds.2.proj.weight', (8, 4, 3, 3)),
        'merge3.norm.bias': ('patch_embeds.3.norm.bias', (8,)),
        'stage1.0.qkv.weight': ('stages.0.0.attn.qkv.weight', (12, 4)),
        'stage3.31.qkv.weight': ('stages.2.31.attn.qkv.weight', (12, 4)),
        'stage3.31.norm1.weight': ('stages.2.31.norm1.weight', (4,)),
        'stage4.1.proj.bias': ('stages.3.1.attn.proj.bias', (4,)),
        'stage1.0.attns.0.get_v.weight': ('stages.0.0.attn.branches.0.local.weight', (2, 1, 3, 3)),
        'stage1.0.attns.1.get_v.weight': ('stages.0.0.attn.branches.1.local.weight', (2, 1, 3, 3)),
        'stage1.1.attns.0.get_v.weight': ('stages.0.1.attn.local.weight', (4, 1, 3, 3)),  # each block by itself
        'stage4.0.attns.0.get_v.weight': ('stages.3.0.attn.local.weight', (4, 1, 3, 3)),
        'stage1.0.mlp.fc2.weight': ('stages.0.0.ffn.fc2.weight', (4, 8)),
        'norm.weight': ('out_norms.3.weight', (4,)),
        'head.weight': ('head.fc.weight', (10, 4)),
    },
    'nextvit': {
        'stem.0.conv.weight': ('patch_embeds.0.0.0.conv.weight', (4, 3, 3, 3)),
        'features.0.patch_embed.conv.weight': ('patch_embeds.0.1.conv.weight', (4, 4, 1, 1)),
        'features.0.mhca.group_conv3x3.weight': ('stages.0.0.conv.conv.conv.weight', (4, 4, 3, 3)),
        'features.0.mhca.norm.bias': ('stages.0.0.conv.conv.norm.bias', (4,)),
        'features.0.mhca.projection.weight': ('stages.0.0.conv.proj.weight', (4, 4, 1, 1), (4, 4)),
        'features.1.mlp.conv1.weight': ('stages.0.1.ffn.fc1.weight', (8, 4, 1, 1), (8, 4)),
        'features.2.patch_embed.conv.weight': ('patch_embeds.1.conv.weight', (8, 4, 1, 1)),
        'features.2.patch_embed.norm.weight': ('patch_embeds.1.norm.weight', (8,)),
        'features.3.patch_embed.conv.weight': ('stages.1.1.embed.conv.weight', (6, 8, 1, 1)),
        'features.3.projection.conv.weight': ('stages.1.1.narrow.conv.weight', (2, 6, 1, 1)),
        'features.3.e_mhsa.q.weight': ('stages.1.1.attn.qkv.weight', (6, 6), (18, 6)),
        'features.3.e_mhsa.k.weight': (..., (6, 6)),
        'features.3.e_mhsa.v.weight': (..., (6, 6)),
        'extra_norm_list.1.weight': ('out_norms.1.weight', (8,)),
        'extra_norm_list.3.weight': (None, (8,)),
        'norm.weight': ('out_norms.3.weight', (8,)),
        'proj_head.0.weight': ('head.fc.weight', (10, 8)),
    },
    'nextvit of which a part is gone': {
        'stem.0.conv.weight': ('patch_embeds.0.0.0.conv.weight', (4, 3, 3, 3)),
        'features.0.patch_embed.conv.weight': ('patch_embeds.0.1.conv.weight', (4, 4, 1, 1)),
        'features.0.mhca.group_conv3x3.weight': ('stages.0.0.conv.conv.conv.weight', (4, 4, 3, 3)),
        'features.0.e_mhsa.q.weight': ('stages.0.0.attn.q.weight', (4, 4)),  # to be listed as unexpected
        'features.0.e_mhsa.k.weight': ('stages.0.0.attn.k.weight', (4, 4)),
        'features.0.e_mhsa.k.bias': ('stages.0.0.attn.k.bias', (4,)),
        'features.0.e_mhsa.v.bias': ('stages.0.0.attn.v.bias', (4,)),
    },
    'nextvit without its last norm': {
        'stem.3.conv.weight': ('patch_embeds.0.0.3.conv.weight', (4, 3, 3, 3)),
        'stem.0.conv.weight': ('patch_embeds.0.0.0.conv.weight', (4, 3, 3, 3)),
        'features.0.patch_embed.conv.weight': ('patch_embeds.0.1.conv.weight', (4, 4, 1, 1)),
        'features.0.mhca.group_conv3x3.weight': ('stages.0.0.conv.conv.conv.weight', (4, 4, 3, 3)),
        'extra_norm_list.3.weight': ('out_norms.3.weight', (8,)),
    },
}


@pytest.mark.parametrize('layout', RELEASED)
def test_names_and_shapes_of_released_files(layout):
    rows = RELEASED[layout]
    state = {key: torch.rand(row[1]) for key, row in rows.items()}
    assert find_layout(state).name.endswith(f'{layout.split()[0]}')
    backbone, head, dropped = backbone_state(state, 'x')
    assert dropped == [key for key, row in rows.items() if row[0] is None]
    expected = {row[0]: row[-1] for row in rows.values() if isinstance(row[0], str)}
    assert {key: tuple(value.shape) for key, value in {**backbone, **head}.items()} == expected
    assert set(head) == {key for key in expected if key.startswith(('neck.', 'head.'))}
    for key, row in rows.items():
        if isinstance(row[0], str):  # the first of joined ones begins the whole, and the others follow
            name, start = row[0], 0
        elif row[0] is None:
            continue
        value, end = {**backbone, **head}[name].flatten(), start + state[key].numel()
        assert torch.equal(value[start:end], state[key].flatten())
        start = end
