# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Checkpoints with other weights than the model's, such as a head for other classes."""

import pytest
import torch
from helpers.engine_toys import LOADER, Count, ToyModel, make_runner, refused, warnings_of
from mmengine.model import BaseTTAModel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS
from torch import nn

from mmlinattn.backbones import RAVLT
from mmlinattn.checkpoints.loading import check_trained
from mmlinattn.engine import CPUDistributedDataParallel, RunError
from mmlinattn.layers import PositionTable


@MODELS.register_module(force=True)
class ToyClassifier(ToyModel):
    def __init__(self, num_classes=3, **kwargs):
        super().__init__(**kwargs)
        self.decode_head = nn.ModuleDict(dict(conv_seg=nn.Linear(4, num_classes)))
        self.auxiliary_head = nn.Linear(4, num_classes)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer('count', torch.zeros(()))


def load(tmp_path, mode, state, wrap=lambda model: model, hooks=(), **options):
    """Let a Runner load a state dict; return the warnings of the hook."""
    torch.save(state, tmp_path / 'given.pth')
    hooks = [dict(type='CheckpointMatchHook', **options), *hooks]
    kwargs = dict(load_from=str(tmp_path / 'given.pth'))
    if mode == 'resume':
        kwargs['resume'] = True
    elif mode == 'test':
        kwargs.update(test_dataloader=LOADER, test_cfg={}, test_evaluator=[Count()])
    runner = make_runner(tmp_path / 'work', hooks, model=dict(type='ToyClassifier'), **kwargs)
    runner.model = wrap(runner.model)
    if mode == 'test':
        runner.train = runner.load_or_resume  # as test() does first
    lines = warnings_of(runner, 'checkpoint')
    assert mode == 'test' or runner.iter == 6
    return lines


def state_of(num_classes=3, without=(), **changed):
    state = ToyClassifier(num_classes=num_classes).state_dict()
    state.update({key.replace('__', '.'): value for key, value in changed.items()})
    return {key: value for key, value in state.items() if not key.startswith(tuple(without))}


HEAD = 'decode_head.conv_seg'
OPTION = '--cfg-options custom_hooks.CheckpointMatchHook.left_out='
FINITE = '--cfg-options custom_hooks.CheckpointMatchHook.allow_nonfinite'
SHAPES = f'left out for its shape: {HEAD}.weight (5x4 in the file, 3x4 in the model), {HEAD}.bias (5 in the file, 3'
NAN = torch.tensor([float('nan')])


def test_training_continues_and_lists_skipped_weights(tmp_path):
    wrapped = {f'module.{key}': value for key, value in state_of(5, ['layer.bias']).items()}  # as processes save them
    (line,) = load(tmp_path, 'train', dict(state_dict=wrapped, meta={}))
    assert SHAPES in line and ', auxiliary_head.weight (5x4 in the file' in line
    assert '; 1 parameters not in the file: layer.bias. These train from their initial values' in line
    assert line.endswith(f'{OPTION}{HEAD},auxiliary_head,layer')


@pytest.mark.parametrize(
    'mode, state, options',
    [
        ('train', state_of(5), dict(left_out=[HEAD, 'auxiliary_head'])),
        ('train', state_of(without=['layer']), dict(left_out='layer')),  # fine-tuning starts from a backbone
        ('train', state_of(norm__bias=NAN.expand(2)), {}),
        ('test', state_of(5), dict(left_out='decode_head')),  # one beginning is no list of letters
        ('test', state_of(without=['auxiliary_head', 'count']), {}),
        ('test', state_of(layer__bias=NAN), dict(allow_nonfinite=True)),
        ('test', state_of(count=torch.tensor(float('inf'))), {}),  # a buffer that is no running statistic
    ],
)
def test_accepted_differences(tmp_path, mode, state, options):
    assert load(tmp_path, mode, state, **options) == []


@pytest.mark.parametrize('mode', ['test', 'resume'])
@pytest.mark.parametrize(
    'state, expected, option',
    [
        (state_of(5), SHAPES, f'{OPTION}{HEAD}'),
        (state_of(without=['layer.bias']), '1 parameters not in the file: layer.bias.', f'{OPTION}layer'),
        (state_of(layer__bias=NAN), '1 weights of the checkpoint are NaN or infinite: layer.bias.', f'{FINITE}=True'),
        (state_of(norm__running_var=NAN.expand(2)), 'NaN or infinite: norm.running_var.', f'{FINITE}=True'),
        (state_of(count=torch.tensor(1)), 'no real numbers in memory: count (int64).', ''),
    ],
    ids=['shapes', 'missing', 'NaN', 'NaN statistics', 'integer'],
)
def test_refused_differences(tmp_path, mode, state, expected, option):
    if mode == 'resume':  # the state of the optimizer has the old shapes
        state = dict(state_dict=state, meta={})
        if 'NaN' in expected:
            option = f'{FINITE}=True'
        elif option:
            option = 'load_from=CHECKPOINT instead of --resume trains other parts from scratch.'
    with pytest.raises(RunError) as found:
        load(tmp_path, mode, state)
    message = str(found.value)
    assert expected in message and message.endswith(option) and '\n' not in message
    assert ('auxiliary_head' in message) == (mode == 'resume' and expected == SHAPES)  # they train on


def test_position_tables_of_another_size(tmp_path):
    """They are resized, but the state of the optimizer is not."""

    def widened(model):
        model.norm.table = PositionTable(2, (3, 3))
        return model

    state = {**state_of(), 'norm.table.weight': torch.ones(1, 4, 2)}
    assert load(tmp_path, 'train', state, widened) == load(tmp_path, 'test', state, widened) == []
    with pytest.raises(RunError, match='norm.table.weight. Its optimizer cannot continue'):
        load(tmp_path, 'resume', dict(state_dict=state, meta={}), widened)


def test_training_from_a_checkpoint_without_a_fitting_weight(tmp_path):
    with pytest.raises(RunError, match=r'nothing in the checkpoint fits the model; it has other.0, other.1, other.2, '):
        load(tmp_path, 'train', {f'other.{i}': torch.ones(1) for i in range(4)})


ARCH = dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 4))


def with_backbone(hides=False, **options):
    """A model with a backbone, hidden from checkpoints as adapters hide frozen weights."""

    def wrap(model):
        model.backbone = RAVLT(ARCH, **options)
        if hides:

            def hide(module, state, prefix, *_):
                for key in [key for key in state if key.startswith(f'{prefix}backbone.')]:
                    del state[key]

            model._register_state_dict_hook(hide)
        return model

    return wrap


def of_backbone(arch=ARCH, **options):
    return {f'backbone.{key}': value for key, value in RAVLT(arch, **options).state_dict().items()}


def test_training_with_random_frozen_weights(tmp_path):
    wrap, stem = with_backbone(frozen_stages=0), 'backbone.patch_embeds.0.layers.0'
    said = f'^16 frozen parameters of the backbone .*: {stem}.weight, .*left_out=backbone.patch_embeds.0'
    with pytest.raises(RunError, match=said):
        load(tmp_path, 'train', state_of(), wrap)
    wider = dict(state_of(), **of_backbone(dict(ARCH, embed_dims=(16, 16, 24, 32))))
    with pytest.raises(RunError, match=said):
        load(tmp_path, 'train', wider, wrap)
    assert load(tmp_path, 'train', state_of(), wrap, left_out='backbone') == []
    of_classifier = dict(state_of(), **of_backbone(out_norm=False))
    assert load(tmp_path, 'train', of_classifier, with_backbone(frozen_stages=1)) == []


@pytest.mark.parametrize('hides', [True, False])
def test_adapters_that_hide_the_backbone_freeze_its_statistics(tmp_path, hides):
    if hides:
        assert 'backbone.' not in ''.join(load(tmp_path, 'train', of_backbone(), with_backbone(hides=True)))
    runner = make_runner(tmp_path, [dict(type='CheckpointMatchHook')])
    runner.model = with_backbone(hides)(runner.model)
    runner.model.teacher = with_backbone(hides)(nn.Module())
    said = ' '.join(warnings_of(runner))
    for name in ('backbone', 'teacher.backbone'):
        assert said.count(f'running statistics of {name} stay as they are') == hides
        assert runner.model.get_submodule(name).patch_embeds[0].layers[1].training != hides and runner.model.training


def test_a_backbone_that_lacks_weights_of_the_checkpoint(tmp_path):
    """Its network differs from the trained one. Heads and keys that it ignores may be left over."""

    def wrap(model):
        ignorable = dict(ignorable_keys=lambda self, key: key.startswith('stages.1'))
        model.backbone = type('Backbone', (nn.Linear,), ignorable)(1, 1)
        return model

    def with_weight(key):
        own = {'backbone.weight': torch.ones(1, 1), 'backbone.bias': torch.ones(1), key: torch.ones(1)}
        return dict(state_dict=dict(state_of(), **own), meta={})

    for key in ('backbone.stages.1.weight', 'other_head.weight'):
        assert load(tmp_path, 'test', with_weight(key), wrap) == []
    state = with_weight('backbone.stages.0.weight')
    assert load(tmp_path, 'train', state, wrap) == load(tmp_path, 'test', state, wrap, left_out='backbone') == []
    said = '1 weights not in the model: backbone.stages.0.weight. .*Use the config'
    for mode in ('test', 'resume'):
        with pytest.raises(RunError, match=said):
            load(tmp_path, mode, state, wrap)
    with pytest.raises(RunError, match=said):
        check_trained(wrap(ToyClassifier()), state)


def test_weights_of_a_compiled_model(tmp_path):
    state = {f'_orig_mod.{key}': torch.full_like(value, 0.5) for key, value in state_of().items()}
    assert load(tmp_path, 'test', dict(state_dict=state)) == load(tmp_path, 'train', state) == []
    check_trained(model := ToyClassifier(), dict(state_dict=state))
    assert all(parameter.unique().tolist() == [0.5] for parameter in model.parameters())


@pytest.mark.parametrize(
    'wrapper', [CPUDistributedDataParallel, type('Augmented', (BaseTTAModel,), dict(merge_preds=0))]
)
def test_models_in_wrappers(tmp_path, one_process, wrapper):
    with pytest.raises(RunError, match='1 parameters not in the file: layer.bias'):
        load(tmp_path, 'test', state_of(without=['layer.bias']), wrapper)


def resume(folder, before=None, after=None, optimizer=None, change=lambda checkpoint: None):
    """Resume the second of two epochs with another schedule or optimizer; return its warnings."""
    hooks, path = [dict(type='CheckpointMatchHook')], folder / 'epoch_1.pth'
    make_runner(folder, hooks, param_scheduler=before).train()
    checkpoint = torch.load(path, weights_only=False)
    change(checkpoint)
    torch.save(checkpoint, path)
    runner = make_runner(folder, hooks, param_scheduler=after, load_from=str(path), resume=True)
    runner.optim_wrapper['optimizer'] = optimizer or runner.optim_wrapper['optimizer']
    lines = warnings_of(runner, 'resum')
    assert runner.epoch == 2
    return lines


FASTER = dict(type='SGD', lr=0.5, momentum=0.9)
STEPS, LINEAR = (dict(type='MultiStepLR', milestones=[4]), dict(type='LinearLR', start_factor=0.1, end=2))


PLATEAU = dict(type='ReduceOnPlateauLR', monitor='loss')
BEST = dict(best=3.0, num_bad_epochs=1)


def age(checkpoint):
    for group in checkpoint['optimizer']['param_groups']:
        del group['nesterov']


def both(schedule, **options):
    return dict(before=schedule, after=schedule, **options)


@pytest.mark.parametrize(
    'options, said',
    [
        # settings of the checkpoint, for which MMEngine ignores those of the config
        (dict(optimizer=FASTER), 'lr = 0.01 (the config has 0.5). '),
        # with a schedule, the one that it begins with
        (both(LINEAR, optimizer=FASTER), 'of the checkpoint: lr = 0.01 (the config has 0.5). '),
        (both(STEPS), ''),
        (dict(before=STEPS, after=dict(STEPS, gamma=0.5)), 'MultiStepLR.gamma = 0.1 (the config has 0.5). '),
        (dict(before=dict(LINEAR, end=3), after=LINEAR), 'LinearLR.end = 3 (the config has 2)'),
        (dict(before=[LINEAR, STEPS], after=[LINEAR, dict(STEPS, gamma=0.5)]), ' MultiStepLR.gamma = 0.1'),
        # a schedule by iteration is fitted to other epochs
        *(
            (
                dict(
                    before=dict(STEPS, by_epoch=by_epoch),
                    after=dict(STEPS, by_epoch=by_epoch, gamma=0.5),
                    change=lambda checkpoint: checkpoint['meta'].update(iter=2),
                ),
                'MultiStepLR.gamma = 0.1' if by_epoch else '',
            )
            for by_epoch in (True, False)
        ),
        # the best metric so far is no setting; an older PyTorch and a removed schedule leave less
        (both(PLATEAU, change=lambda checkpoint: checkpoint['param_schedulers'][0].update(BEST)), ''),
        (dict(before=dict(type='ConstantLR'), change=age), 'of the checkpoint: lr = '),
        # lost state
        (both(STEPS, change=lambda checkpoint: checkpoint.pop('optimizer')), 'has no optimizer '),
        (both(STEPS, change=lambda checkpoint: checkpoint.pop('param_schedulers')), 'has no param_schedulers '),
        (
            both(STEPS, change=lambda checkpoint: checkpoint.update(ema_state_dict={})),
            'are averages of EMAHook, which the config lacks',
        ),
    ],
)
def test_a_resumed_run_lists_differences_of_its_checkpoint(tmp_path, options, said):
    found = resume(tmp_path, **options)
    assert len(found) == bool(said) and said in ''.join(found)


@pytest.mark.parametrize('scaler', [{}, dict(scale=512.0)])
def test_the_loss_scale_of_float16_is_resumed(tmp_path, monkeypatch, scaler):
    seen, load = [], OptimWrapper.load_state_dict
    monkeypatch.setattr(
        OptimWrapper, 'load_state_dict', lambda self, state: seen.append(state.get('loss_scaler')) or load(self, state)
    )
    resume(tmp_path, change=lambda checkpoint: checkpoint['optimizer'].update(loss_scaler=scaler))
    assert seen == [scaler or None]


OTHER = 'has 1 param_schedulers that do not fit those of the config: LinearLR'


@pytest.mark.parametrize(
    'options, said',
    [
        (dict(before=STEPS, after=[LINEAR, STEPS]), OTHER),
        (dict(before=STEPS, after=LINEAR), OTHER),
        (dict(optimizer=dict(type='AdamW', lr=0.1)), 'another optimizer than AdamW: it has dampening, .* and lacks'),
        (dict(change=lambda checkpoint: checkpoint.pop('meta')), 'no epoch and iteration, as .* alone. Set load_from='),
    ],
)
def test_runs_that_cannot_be_resumed(tmp_path, options, said):
    with refused(said):
        resume(tmp_path, **options)
