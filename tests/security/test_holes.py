# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Nothing out of a checkpoint runs, and nothing it names is removed: upstream's Runner, hooks and inferencers."""

import copy
import logging
import os
import pickle

import pytest
import torch
from checkpoint_helpers import touch_when_loaded
from engine_toys import Count, ToyModel, make_runner
from mmengine.config import Config
from mmengine.hooks import CheckpointHook
from mmengine.infer import BaseInferencer
from mmengine.runner.checkpoint import CheckpointLoader

import mmlinattn  # noqa: F401, what puts the checks in place
from mmlinattn.checkpoints import CheckpointError
from mmlinattn.checkpoints.config_text import count_gpus, read_config_text

SAVE_EACH = dict(checkpoint=dict(type='CheckpointHook', interval=1))
SAVE_BEST = dict(checkpoint=dict(type='CheckpointHook', interval=1, save_best='acc', rule='greater', max_keep_ckpts=1))


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A checkpoint of MMEngine's own, after the first of two epochs."""
    folder = tmp_path_factory.mktemp('saved')
    make_runner(folder, [], train_cfg=dict(by_epoch=True, max_epochs=1), default_hooks=SAVE_EACH).train()
    return torch.load(folder / 'epoch_1.pth', weights_only=True)


@pytest.fixture
def write(saved, tmp_path):
    """Write the checkpoint with changes to its meta or runtime information."""

    def write(folder=tmp_path, meta=None, info=None):
        folder.mkdir(exist_ok=True)
        checkpoint = copy.deepcopy(saved)
        checkpoint['meta'].update(meta or {})
        checkpoint['message_hub']['runtime_info'].update(info or {})
        torch.save(checkpoint, folder / 'epoch_1.pth')
        (folder / 'last_checkpoint').write_text(str(folder / 'epoch_1.pth'))
        return str(folder / 'epoch_1.pth')

    return write


def programs(tmp_path, marker):
    """Config texts that touch ``marker`` when they are run."""
    (tmp_path / 'base.py').write_text(f'open({str(marker)!r}, "w").close()\n')
    (tmp_path / 'hostile_module.py').write_text(f'open({str(marker)!r}, "w").close()\n')
    touch = f'touch {marker}'
    return {
        'a call': f'import os\nos.system({touch!r})\ngpu_ids = range(1)\n',
        'a base': f'_base_ = {str(tmp_path / "base.py")!r}\ngpu_ids = range(1)\n',
        'an import': "custom_imports = dict(imports=['hostile_module'])\ngpu_ids = range(1)\n",
        'a value': f'gpu_ids = [__import__("os").system({touch!r})]\n',
        'a default of a variable': f'x = "{{{{$NO_SUCH_NAME:";open({str(marker)!r},"w");"}}}}"\n',
        'a lazy import': 'from mmengine.config import read_base\nwith read_base():\n    from .base import *\n',
    }


KINDS = ['a call', 'a base', 'an import', 'a value', 'a default of a variable', 'a lazy import']
WAYS = ['load_from and resume', 'auto-resume', 'runner.resume', 'a Runner of a user']


@pytest.mark.parametrize('kind, way', [(kind, WAYS[1]) for kind in KINDS] + [(KINDS[0], way) for way in WAYS])
def test_the_config_text_of_a_checkpoint_does_not_run_on_resume(write, tmp_path, monkeypatch, kind, way):
    marker = tmp_path / 'was_run'
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(tmp_path / 'run', meta=dict(config=programs(tmp_path, marker)[kind]))
    settings = {
        'load_from and resume': dict(load_from=path, resume=True),
        'auto-resume': dict(resume=True),
    }.get(way, {})
    runner = make_runner(tmp_path / 'run', [], **settings)
    if way == 'a Runner of a user':  # which copies what upstream's method does
        runner.load_checkpoint = lambda name, **kwargs: CheckpointLoader.load_checkpoint(name, 'cpu')
    if not settings:
        runner.resume(path)
    runner.train()
    assert runner.epoch == 2 and not marker.exists()


def test_the_number_of_gpus_of_the_saved_run_still_counts(write, tmp_path):
    path = write(meta=dict(config='model = dict(depth=2)\ngpu_ids = range(0, 8)\n'))
    with pytest.raises(RuntimeError, match='Number of GPUs'):
        make_runner(tmp_path / 'run', []).resume(path)


@pytest.mark.parametrize(
    'text, number',
    [
        ('gpu_ids = range(0, 4)', 4),
        ('import os\ngpu_ids = [0, 1]', 2),
        ('gpu_ids = (0,)', 1),
        ('gpu_ids = (0,)\ngpu_ids = [0, 1, 2]\ngpus = [0]', 3),
        ('x.gpu_ids = [0]', None),
        ('gpu_ids = 3', None),
        ("gpu_ids = 'ab'", None),
        ('gpu_ids = None', None),
        ('gpu_ids = range(0, 10**30)', None),
        ('gpu_ids = ' + '-' * 100000 + '1', None),
        ('gpu_ids = [', None),
        ('x = 1', None),
        ('\0', None),
        (7, None),
    ],
)
def test_gpus_are_counted_in_literals_only(text, number):
    assert count_gpus(text) == number


@pytest.fixture
def files(tmp_path):
    """What a hostile checkpoint would like to see gone: a file, a folder, and things of the run itself."""
    (tmp_path / 'home' / 'folder').mkdir(parents=True)
    run = tmp_path / 'run'
    run.mkdir()
    kept = [tmp_path / 'home' / 'best_thesis.pth', tmp_path / 'home' / 'folder' / 'x', run / 'notes.txt']
    for path in kept:
        path.write_text('precious')
    (run / 'best_link').symlink_to(tmp_path / 'home')
    return run, kept


@pytest.mark.parametrize(
    'target, hook',
    [
        ('{home}/best_thesis.pth', 'CheckpointHook'),
        ('{home}/best_thesis.pth', 'SafeCheckpointHook'),
        ('{home}/folder', 'CheckpointHook'),
        ('{run}', 'SafeCheckpointHook'),
        ('{run}/notes.txt', 'CheckpointHook'),
        ('{run}/best_link/best_thesis.pth', 'CheckpointHook'),
        ('{run}/../home/best_thesis.pth', 'SafeCheckpointHook'),
        ('{run}/best_/../../home/best_thesis.pth', 'CheckpointHook'),
        (['{home}/best_thesis.pth'], 'CheckpointHook'),
        (7, 'CheckpointHook'),
        ('\0', 'SafeCheckpointHook'),
    ],
)
def test_best_ckpt_of_a_checkpoint_removes_nothing_of_others(write, files, target, hook, monkeypatch, caplog):
    run, kept = files
    folders = dict(home=str(run.parent / 'home'), run=str(run))
    target = target.format(**folders) if isinstance(target, str) else target
    path = write(run, info=dict(best_ckpt=target, best_score=-1.0))
    default_hooks = dict(checkpoint=dict(SAVE_BEST['checkpoint'], type=hook))
    runner = resumed(run, path, default_hooks)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        notices = []
        patch.setattr(runner.logger, 'warning', notices.append)
        runner.train()
    assert all(file.read_text() == 'precious' for file in kept)
    assert (run / 'best_link').is_symlink() and len(list(run.glob('best_acc_*'))) == 1
    assert len([text for text in notices if 'best_ckpt' in text]) == 1


def resumed(run, path, default_hooks):
    return make_runner(
        run,
        [],
        default_hooks=default_hooks,
        val_dataloader=dict(
            dataset=dict(type='ToyDataset'), sampler=dict(type='DefaultSampler', shuffle=False), batch_size=4
        ),
        val_cfg=dict(),
        val_evaluator=[Count()],
        load_from=path,
        resume=True,
    )


@pytest.mark.parametrize('hook', ['CheckpointHook', 'SafeCheckpointHook'])
def test_its_own_older_best_is_replaced_as_before(write, tmp_path, hook):
    path = write(tmp_path, info=dict(best_ckpt=str(tmp_path / 'best_acc_epoch_0.pth'), best_score=-1.0))
    (tmp_path / 'best_acc_epoch_0.pth').touch()
    resumed(tmp_path, path, dict(checkpoint=dict(SAVE_BEST['checkpoint'], type=hook))).train()
    assert [file.name for file in tmp_path.glob('best_*')] == ['best_acc_epoch_2.pth']


def test_a_folder_for_all_runs_counts_as_the_run_s_own(write, tmp_path):
    run, out = tmp_path / 'run', tmp_path / 'out'
    (out / 'run').mkdir(parents=True)
    older = out / 'run' / 'best_acc_epoch_0.pth'
    older.touch()
    path = write(run, info=dict(best_ckpt=str(older), best_score=-1.0))
    resumed(run, path, dict(checkpoint=dict(SAVE_BEST['checkpoint'], out_dir=str(out)))).train()
    assert not older.exists()


@pytest.mark.parametrize('ids', [['/../../home/best_thesis', 1], '12', [-1], [None], {1: 2}, 5])
def test_kept_checkpoints_are_numbers(write, files, ids):
    run, kept = files
    path = write(run, info=dict(keep_ckpt_ids=ids))
    hook = dict(type='CheckpointHook', interval=1, max_keep_ckpts=1, filename_tmpl='../home/{}.pth')
    make_runner(run, [], default_hooks=dict(checkpoint=hook), load_from=path, resume=True).train()
    assert all(file.read_text() == 'precious' for file in kept)


def test_a_hub_loaded_some_other_way_is_checked_too(files, tmp_path):
    run, kept = files
    runner = resumed(run, None, SAVE_BEST)
    runner._resume = False
    runner.message_hub.update_info('best_ckpt', str(kept[0]))
    runner.train()
    assert all(file.read_text() == 'precious' for file in kept)


@pytest.mark.parametrize('place', ['CLASSES', 'dataset_meta'])
def test_names_of_classes_that_would_reach_the_terminal_are_made_printable(write, place):
    names = ('cat', '\x1b[2J', 'a\x07')
    path = write(meta={place: names if place == 'CLASSES' else dict(classes=names)})
    found = CheckpointLoader.load_checkpoint(str(path), 'cpu', logger='silent')['meta'][place]
    found = found if place == 'CLASSES' else found['classes']
    assert found[0] == 'cat' and all(name.isprintable() for name in found)


def test_the_resumed_run_writes_its_own_config_down(write, tmp_path):
    """The text of the older file would travel on to whoever loads the newer one."""
    path = write(info=dict(cfg='import os', experiment_name='theirs'))
    runner = make_runner(tmp_path / 'run', [], default_hooks=SAVE_EACH, load_from=path, resume=True)
    runner.train()
    info = torch.load(tmp_path / 'run' / 'epoch_2.pth', weights_only=True)['message_hub']['runtime_info']
    assert info['cfg'] == runner.cfg.pretty_text and info['experiment_name'] == runner.experiment_name


class Inferencer(BaseInferencer):
    """The least that BaseInferencer takes."""

    def _init_pipeline(self, cfg):
        return lambda x: x

    def _init_visualizer(self, cfg):
        return None

    def visualize(self, *args, **kwargs):
        return None

    def postprocess(self, *args, **kwargs):
        return None


HOSTILE_MODELS = {
    'a function by name': dict(type='os.system', command='touch {marker}'),
    'a class by name': dict(type='subprocess.Popen', args='touch {marker}', shell=True),
    'a module of the current folder': dict(type='hostile_module'),
    'a part of a model': dict(type='ToyModel', data_preprocessor=dict(type='os.system', command='touch {marker}')),
    'another package': dict(type='hostile_module.Model'),
    'another scope': dict(type='ToyModel', _scope_='hostile_module'),
    'a program': dict(type='ToyModel', teacher_config='{base}'),
    'no name': dict(type=7),
    'a pickle': dict(type='mmseg.CrossEntropyLoss', class_weight='{folder}/weights.pkl'),
    'YAML': dict(type='mmseg.CrossEntropyLoss', class_weight='{folder}/weights.yaml'),
    'an expression': dict(type='ToyModel', cmc=dict(type='mmdet.CameraMotionCompensation', warp_mode='{expression}')),
}


@pytest.mark.parametrize(
    'kind, place', [(kind, 'message hub') for kind in [*KINDS, *HOSTILE_MODELS]] + [(KINDS[0], 'meta')]
)
def test_an_inferencer_from_weights_alone_runs_nothing(saved, tmp_path, monkeypatch, kind, place):
    marker = tmp_path / 'was_run'
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    text = programs(tmp_path, marker).get(kind)
    if text is None:
        model = repr(HOSTILE_MODELS[kind])
        text = f'model = {model.replace("{marker}", str(marker)).replace("{base}", str(tmp_path / "base.py"))}'
        text = text.replace('{folder}', str(tmp_path)).replace('{expression}', 'open("was_run", "w")')
        if 'mm' in text:
            pytest.importorskip('mmseg.models')
            pytest.importorskip('mmdet.models')
        (tmp_path / 'weights.pkl').write_bytes(pickle.dumps(touch_when_loaded(marker)))
        (tmp_path / 'weights.yaml').write_text(f'!!python/object/apply:os.system ["touch {marker}"]')
    else:
        text += "model = dict(type='ToyModel')\n"
    checkpoint = copy.deepcopy(saved)
    if place == 'meta':
        del checkpoint['message_hub']
        checkpoint['meta']['cfg'] = text
    else:
        checkpoint['message_hub']['runtime_info']['cfg'] = text
    torch.save(checkpoint, 'weights.pth')
    if kind == 'an import':  # what the model needs has to be imported already
        Inferencer(weights='weights.pth', device='cpu')
    else:
        with pytest.raises(CheckpointError) as caught:
            Inferencer(weights='weights.pth', device='cpu')
        assert '\n' not in str(caught.value) and 'weights.pth' in str(caught.value)
    assert not marker.exists()


def test_an_inferencer_from_weights_alone_still_works(saved, tmp_path):
    checkpoint = copy.deepcopy(saved)
    checkpoint['message_hub']['runtime_info']['cfg'] = Config(dict(model=dict(type='ToyModel'))).pretty_text
    torch.save(checkpoint, tmp_path / 'weights.pth')
    inferencer = Inferencer(weights=str(tmp_path / 'weights.pth'), device='cpu')
    assert isinstance(inferencer.model, ToyModel)
    assert torch.equal(inferencer.model.layer.weight, saved['state_dict']['layer.weight'])


def test_config_texts_read_as_they_run(tmp_path):
    settings = dict(
        model=dict(type='ToyModel', bad_at=None, init_cfg=[dict(type='Normal', std=-0.5)]),
        schedule=[(1, 2.5), (3, 1e-9)],
        names={'a b': 1, 'type': 'SGD'},
        words='quotes \' " and\nlines',
        flag=True,
    )
    text = Config(settings).pretty_text
    assert read_config_text(text, 'x') == Config.fromstring(text, '.py')._cfg_dict
    lazy = f"model = dict(type='{ToyModel.__module__}.ToyModel')"
    assert read_config_text(lazy, 'x').model.type.endswith('ToyModel')
    for nobody in (5, None, 'NoSuchModel'):
        with pytest.raises(CheckpointError, match=f'it builds {nobody!r}, which is not registered'):
            read_config_text(f'model = dict(type={nobody!r})', 'x')


def test_checks_are_put_in_place_once():
    before = CheckpointHook.before_train
    mmlinattn.engine.guard()
    mmlinattn.checkpoints.register()
    assert CheckpointHook.before_train is before
    assert (
        os.path.basename(CheckpointLoader.load_checkpoint.__func__.__wrapped__.__code__.co_filename) == 'checkpoint.py'
    )
