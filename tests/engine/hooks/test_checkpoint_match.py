# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""A checkpoint whose head is of other classes than the model's."""

from types import SimpleNamespace

import pytest
import torch
from engine_toys import Augmented, Count, ToyModel, Wrapped, make_runner
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.runner import EpochBasedTrainLoop
from torch import nn

from mmlinattn.engine import CheckpointMatchHook, RunError
from mmlinattn.engine.hooks.checkpoint_match import check_weights


@MODELS.register_module(force=True)
class ToyClassifier(ToyModel):
    """ToyModel with a head, and one that only trains."""

    def __init__(self, num_classes=3, **kwargs):
        super().__init__(**kwargs)
        self.decode_head = nn.ModuleDict(dict(conv_seg=nn.Linear(4, num_classes)))
        self.auxiliary_head = nn.Linear(4, num_classes)
        self.register_buffer('count', torch.zeros(()))


class Renaming(ToyModel):
    """Has the weights of its first version under another name, and refuses those of a version that is to come."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        version = metadata.get('version')
        if version == 1:
            state[f'{prefix}scale'] = state.pop(f'{prefix}old_scale')
        if version == 3:
            errors.append('of a later version')
            state[f'{prefix}scale'] = state[f'{prefix}scale'][:1]
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))


class Resizing(ToyModel):
    """Resizes a table on loading, as backbones do."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2))
        self._register_load_state_dict_pre_hook(self.resize)

    def resize(self, state, prefix, *_):
        state[f'{prefix}table'] = state[f'{prefix}table'][:2]


@pytest.fixture
def checkpoint(tmp_path):
    state = {f'module.{key}': value for key, value in ToyClassifier(num_classes=5).state_dict().items()}
    torch.save(dict(state_dict=state, meta={}), tmp_path / 'five.pth')
    return str(tmp_path / 'five.pth')


def runner_of(tmp_path, checkpoint, model=None, left_out=(), **kwargs):
    hooks = [dict(type='FiniteLossHook'), dict(type='CheckpointMatchHook', left_out=left_out)]
    model = model or dict(type='ToyClassifier')
    kwargs.update(load_from=checkpoint, cfg=dict(custom_hooks=hooks))
    runner = make_runner(tmp_path / 'work', hooks, model=model, **kwargs)
    lines = []
    runner.logger.warning = lines.append
    return runner, lines


def evaluating(tmp_path, checkpoint, **kwargs):
    loader = dict(dataset=dict(type='ToyDataset'), sampler=dict(type='DefaultSampler'), batch_size=4)
    runner, _ = runner_of(tmp_path, checkpoint, test_dataloader=loader, test_cfg={}, test_evaluator=[Count()], **kwargs)
    return runner


def of_hook(lines):
    return [line for line in lines if 'does not fit' in line]


def test_training_goes_on_and_says_what_was_left_out(tmp_path, checkpoint):
    runner, lines = runner_of(tmp_path, checkpoint)
    runner.train()
    (line,) = of_hook(lines)
    assert 'decode_head.conv_seg.weight (5x4 in the file, 3x4 in the model)' in line
    assert 'auxiliary_head.bias (5 in the file, 3 in the model)' in line
    assert line.endswith('--cfg-options custom_hooks.1.left_out=decode_head.conv_seg,auxiliary_head')
    expected = torch.load(checkpoint)['state_dict']['module.layer.weight']
    assert runner.iter == 6 and runner.model.layer.weight.shape == expected.shape


def test_what_is_meant_is_not_warned_of(tmp_path, checkpoint):
    runner, lines = runner_of(tmp_path, checkpoint, left_out=['decode_head.conv_seg', 'auxiliary_head'])
    runner.train()
    assert of_hook(lines) == []


def test_testing_another_head_stops(tmp_path, checkpoint):
    with pytest.raises(RunError) as error:
        evaluating(tmp_path, checkpoint).test()
    message = str(error.value)
    assert 'decode_head.conv_seg.weight (5x4 in the file, 3x4 in the model)' in message
    assert 'auxiliary_head' not in message  # not used in tests
    assert message.endswith('--cfg-options custom_hooks.1.left_out=decode_head.conv_seg')
    assert evaluating(tmp_path, checkpoint, left_out='decode_head').test()


def test_testing_without_a_head_stops(tmp_path, checkpoint):
    state = ToyClassifier().state_dict()
    del state['auxiliary_head.weight'], state['count']
    torch.save(dict(state_dict=state), checkpoint)
    assert evaluating(tmp_path, checkpoint).test()
    del state['decode_head.conv_seg.weight']
    torch.save(state, checkpoint)  # bare
    with pytest.raises(RunError, match=r'1 parameters not in the file: decode_head\.conv_seg\.weight'):
        evaluating(tmp_path, checkpoint).test()


def test_resuming_with_another_head_stops(tmp_path, checkpoint):
    runner, _ = runner_of(tmp_path, checkpoint, resume=True)
    with pytest.raises(RunError, match='decode_head.conv_seg.weight') as found:
        runner.train()
    # what is left out of the model is not left out of the optimizer
    assert str(found.value).endswith(' load_from=... in place of resuming trains other parts anew.')


def test_what_the_model_resizes_fits(tmp_path, checkpoint):
    MODELS.register_module(module=Resizing, force=True)
    torch.save(dict(Resizing().state_dict(), table=torch.ones(7), of_another=torch.ones(1)), checkpoint)
    assert evaluating(tmp_path, checkpoint, model=dict(type='Resizing')).test()


SAME = 'The config has to be the one of the checkpoint.'


@pytest.mark.parametrize('is_wrapped', [False, True])
def test_modules_are_told_of_the_version_they_were_saved_in(is_wrapped):
    def state(name, version, **others):
        made = Renaming().state_dict()
        made[name] = made.pop('scale')
        made.update(others)
        made._metadata[''] = dict(version=version)
        return dict(state_dict=made) if is_wrapped else made

    check_weights(Renaming(), state('old_scale', 1))
    for version in (None, 2):  # which have no such name
        with pytest.raises(RunError, match='fit the model; 1 parameters not in the file: scale. '):
            check_weights(Renaming(), state('old_scale', version))
    # what a module says itself names no weights: then all that differ are named
    with pytest.raises(RunError) as found:
        check_weights(Renaming(), state('scale', 3, scale=torch.ones(3)))
    assert str(found.value) == (
        f'the checkpoint does not fit the model; left out for its shape: scale (3 in the file, 1 in the model). {SAME}'
    )


@pytest.mark.parametrize('version', [1, 2, 3])
def test_what_is_renamed_is_not_missing_beside_another_shape(version):
    model = nn.ModuleDict(dict(renaming=Renaming(), head=nn.Linear(1, 3)))
    state = model.state_dict()
    if version < 3:
        state['renaming.old_scale'] = state.pop('renaming.scale')
    state['head.bias'] = torch.ones(5)
    state._metadata['renaming'] = dict(version=version)
    with pytest.raises(RunError) as found:
        check_weights(model, state)
    missing = '; 1 parameters not in the file: renaming.scale' * (version == 2)
    shapes = 'left out for its shape: head.bias (5 in the file, 3 in the model)'
    assert str(found.value) == f'the checkpoint does not fit the model; {shapes}{missing}. {SAME}'


def test_one_beginning_is_no_list_of_letters():
    """``left_out`` of a single key, as options on the command line have it."""
    hook = CheckpointMatchHook(left_out='layer.weight')
    assert hook.left_out == ('layer.weight',) and CheckpointMatchHook().left_out == ()
    assert CheckpointMatchHook(left_out=['a', 'b']).left_out == ('a', 'b')


def test_the_lines_about_weights_for_a_model():
    model = ToyClassifier()
    five, whole = ToyClassifier(num_classes=5).state_dict(), model.state_dict()
    check_weights(model, dict(state_dict={f'module.{key}': value for key, value in whole.items()}))
    check_weights(model, {key: value for key, value in whole.items() if not key.startswith('auxiliary_head')})

    def line(state, **kwargs):
        with pytest.raises(RunError) as found:
            check_weights(model, dict(state_dict=state), **kwargs)
        return str(found.value)

    fits = 'the checkpoint does not fit the model; '
    shapes = (
        'decode_head.conv_seg.weight (5x4 in the file, 3x4 in the model), '
        'decode_head.conv_seg.bias (5 in the file, 3 in the model)'
    )
    assert line(five) == f'{fits}left out for its shape: {shapes}. {SAME}'
    del five['layer.bias']
    missing = '1 parameters not in the file: layer.bias'
    assert line(five) == f'{fits}left out for its shape: {shapes}; {missing}. {SAME}'
    assert line(dict(whole, **{'layer.weight': torch.ones(1, 4, dtype=torch.int64)})) == (
        f'{fits}no real numbers in memory: layer.weight (int64).'
    )
    assert line(dict(whole, count=torch.tensor(1))) == f'{fits}no real numbers in memory: count (int64).'  # a buffer
    broken = dict(whole, **{'layer.weight': torch.tensor([[1, 1, float('inf'), 1]]), 'count': torch.tensor(0 / 1)})
    broken['layer.bias'] = torch.tensor([float('nan')])
    assert line(broken) == (
        '2 weights of the checkpoint are NaN or infinite: layer.weight, layer.bias. It was saved by a run that had '
        'failed; take an earlier one.'
    )
    broken['count'] = torch.tensor(float('inf'))  # a buffer that is no running statistic
    check_weights(model, dict(state_dict=broken), allow_nonfinite=True)


def test_only_the_module_of_processes_is_taken_off():
    model = nn.ModuleDict(dict(a=nn.ModuleDict(dict(module=nn.Linear(1, 1)))))
    check_weights(model, model.state_dict())
    check_weights(model, {f'module.{key}': value for key, value in model.state_dict().items()})


def test_what_the_runner_does_not_load_is_missing():
    """It takes ``module`` and one character more off the front of a key, whatever the character is."""
    model = nn.ModuleDict(dict(module_list=nn.ModuleList([nn.Linear(1, 1)])))
    with pytest.raises(RunError, match='2 parameters not in the file: module_list.0.weight, module_list.0.bias'):
        check_weights(model, model.state_dict())
    check_weights(model, {f'module.{key}': value for key, value in model.state_dict().items()})


def test_statistics_that_are_not_finite():
    model, statistic = nn.Sequential(nn.BatchNorm1d(2)), torch.tensor([1.0, float('inf')])
    for name in ('0.running_mean', '0.running_var'):
        with pytest.raises(RunError, match=f'1 weights of the checkpoint are NaN or infinite: {name}'):
            check_weights(model, dict(model.state_dict(), **{name: statistic}))


def match(state, left_out=(), trains=True, resumes=False, model=None, cfg=None, attributes=None, **kwargs):
    """What the hook logs of a checkpoint, with a runner of no more than it looks at."""
    lines = []
    loop = EpochBasedTrainLoop.__new__(EpochBasedTrainLoop) if trains else None
    runner = SimpleNamespace(
        model=model or ToyClassifier(),
        _train_loop=loop,
        _resume=resumes,
        cfg=Config(cfg or dict(custom_hooks=[dict(type='EMAHook'), dict(type='CheckpointMatchHook')])),
        logger=SimpleNamespace(warning=lines.append),
        **(attributes or {}),
    )
    CheckpointMatchHook(left_out, **kwargs).after_load_checkpoint(runner, dict(state_dict=state))
    return lines


def test_the_whole_lines_of_the_hook():
    five = ToyClassifier(num_classes=5).state_dict()
    del five['auxiliary_head.weight'], five['auxiliary_head.bias'], five['layer.bias']
    fits = (
        'the checkpoint does not fit the model; left out for its shape: decode_head.conv_seg.weight (5x4 in the file, '
        '3x4 in the model), decode_head.conv_seg.bias (5 in the file, 3 in the model); '
    )
    (line,) = match(five)
    assert line == (
        f'{fits}3 parameters not in the file: layer.bias, auxiliary_head.weight, auxiliary_head.bias. These train '
        'from their initial values, as is usual for other classes than those of the checkpoint. To say that it is '
        'meant: --cfg-options custom_hooks.1.left_out=decode_head.conv_seg'
    )
    for case in (dict(trains=False), dict(trains=False, resumes=True)):
        with pytest.raises(RunError) as found:
            match(five, **case)
        assert str(found.value) == (
            f'{fits}1 parameters not in the file: layer.bias. These would be used as initialised. The config has to '
            'be the one of the checkpoint, its class count included. If it is meant: --cfg-options '
            'custom_hooks.1.left_out=decode_head.conv_seg'
        )
    for case in (dict(resumes=True), dict(attributes=dict(is_resuming=True))):  # the latter by runner.resume(FILE)
        with pytest.raises(RunError, match='3 parameters not in the file'):  # auxiliary heads train on
            match(five, **case)
    assert len(match(five, attributes=dict(is_resuming=False))) == 1
    missing = {key: value for key, value in ToyClassifier().state_dict().items() if not key.startswith('layer')}
    assert match(missing) == []  # a backbone alone is what one fine-tunes from
    with pytest.raises(RunError, match='custom_hooks.N.left_out=layer$'):
        match(missing, trains=False, cfg=dict(custom_hooks=None))
    with pytest.raises(RunError, match=r'custom_hooks\.0\.left_out=layer$'):
        match(missing, trains=False, cfg=dict(custom_hooks=[dict(type='CheckpointMatchHook'), dict(type='EMAHook')]))
    hooks = [dict(type='EMAHook'), dict(type=CheckpointMatchHook)]
    with pytest.raises(RunError, match=r'custom_hooks\.1\.left_out=layer$'):
        match(missing, trains=False, cfg=dict(custom_hooks=hooks))
    assert match(missing, trains=False, left_out='layer') == match(missing, trains=False, left_out=['x', 'layer']) == []


def test_nothing_that_fits():
    with pytest.raises(RunError) as found:
        match({f'other.{i}': torch.ones(1) for i in range(4)})
    assert str(found.value) == ('nothing in the checkpoint fits the model; it has other.0, other.1, other.2, ....')
    with pytest.raises(
        RunError, match='4 parameters not in the file: layer.weight, layer.bias, .* used as initialised'
    ):
        match({'other.0': torch.ones(1)}, trains=False)  # auxiliary heads aside


def test_weights_that_are_not_finite_may_be_trained_from():
    state = ToyClassifier().state_dict()
    state['layer.bias'] = torch.tensor([float('nan')])
    assert match(state) == match(state, trains=False, allow_nonfinite=True) == []
    for case in (dict(trains=False), dict(resumes=True)):
        with pytest.raises(RunError) as found:
            match(state, **case)
        assert str(found.value) == (
            '1 weights of the checkpoint are NaN or infinite: layer.bias. It was saved by a run that had failed; take '
            'an earlier one. If it is meant: --cfg-options custom_hooks.1.allow_nonfinite=True'
        )
    state['layer.bias'] = torch.ones(1, dtype=torch.complex64)
    with pytest.raises(RunError, match=r'no real numbers in memory: layer.bias \(complex64\)'):
        match(state)


def test_models_in_wrappers():
    state = ToyClassifier().state_dict()
    for model in (Wrapped(ToyClassifier()), Augmented(ToyClassifier()), Wrapped(Augmented(ToyClassifier()))):
        assert match(state, trains=False, model=model) == []


def test_of_what_is_resized_only_what_stays_too_large_is_named():
    state = dict(Resizing().state_dict(), table=torch.ones(7), **{'layer.weight': torch.ones(2, 4)})
    with pytest.raises(RunError) as found:
        match(state, trains=False, model=Resizing())
    assert 'left out for its shape: layer.weight (2x4 in the file, 1x4 in the model). These' in str(found.value)
    del state['layer.bias']
    with pytest.raises(RunError, match='1x4 in the model\\); 1 parameters not in the file: layer.bias'):
        match(state, trains=False, model=Resizing())


def test_of_many_weights_the_first_parts_are_named():
    """All shapes, three names of what is missing, five parts for the option."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(7)))
    state = {f'{i}.weight': torch.ones(2 + (i > 0), 2) for i in range(7)}
    shapes = ', '.join(f'{i}.weight (3x2 in the file, 2x2 in the model)' for i in range(1, 7))
    missing = '7 parameters not in the file: 0.bias, 1.bias, 2.bias, ...'
    (line,) = match(state, model=model)
    assert f'left out for its shape: {shapes}; {missing}. These train' in line
    assert line.endswith('--cfg-options custom_hooks.1.left_out=1,2,3,4,5')
    with pytest.raises(RunError) as found:
        match({'0.weight': torch.ones(2, 2)}, trains=False, model=model)
    assert '13 parameters not in the file: 0.bias, 1.weight, 1.bias, ....' in str(found.value)
    assert str(found.value).endswith('custom_hooks.1.left_out=0,1,2,3,4')
