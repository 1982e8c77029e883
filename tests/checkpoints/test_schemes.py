# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""MMEngine's checkpoint loading after ``import mmlinattn``."""

import json
import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_helpers import saved, touch_when_loaded
from helpers.engine_toys import make_runner
from mmengine.model import BaseModule
from mmengine.runner import CheckpointLoader, Runner, load_checkpoint
from torch import nn

import mmlinattn
from mmlinattn.checkpoints import CheckpointError, schemes
from mmlinattn.utils.private_apis import checkpoint_loaders

LOAD = CheckpointLoader.load_checkpoint


def runner(work_dir, **kwargs) -> Runner:
    schedule = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=2)]
    schedule.append(dict(type='MultiStepLR', milestones=[1]))
    loop = dict(by_epoch=True, max_epochs=1)
    return make_runner(work_dir, [dict(type='EMAHook')], loop, param_scheduler=schedule, **kwargs)


def test_hostile_files_are_refused(tmp_path):
    marker, bad = tmp_path / 'was_run', str(tmp_path / 'bad.pth')
    torch.save({'state_dict': {}, 'meta': touch_when_loaded(marker)}, bad)
    with pytest.raises(CheckpointError, match='refused'):
        runner(tmp_path, load_from=bad).train()
    with pytest.raises(CheckpointError, match='refused'):
        BaseModule(dict(type='Pretrained', checkpoint=bad)).init_weights()
    assert not marker.exists()


def test_arguments_of_mmengine_s_loader(tmp_path, monkeypatch, caplog, capsys):
    path, logger, layer = str(tmp_path / 'a.pth'), logging.getLogger('of-schemes'), nn.Linear(1, 1)
    torch.save({'state_dict': {'weight': torch.ones(1, 1), 'bias': torch.ones(1)}}, path)
    load_checkpoint(layer, path, map_location='cpu', strict=True)
    assert layer.weight.item() == 1
    assert LOAD(filename=path, map_location='meta', logger='silent')['state_dict']['weight'].is_meta
    with caplog.at_level(logging.INFO, logger.name):
        LOAD(path, None, logger)
    assert [(record.name, path in record.getMessage()) for record in caplog.records] == [(logger.name, True)]
    monkeypatch.setenv('HOME', str(tmp_path))
    assert 'state_dict' in LOAD('~/a.pth')
    with pytest.raises(FileNotFoundError, match='no.pth does not exist'):
        LOAD(str(tmp_path / 'no.pth'))


def test_an_import_registers_loaders_and_patches_nothing(tmp_path):
    runner(tmp_path).train()
    script = f"""
        import mmengine.runner, mmengine.hooks, mmengine.infer, torch
        from mmengine.runner import checkpoint
        places = [checkpoint, checkpoint.CheckpointLoader, torch, torch.hub, torch.serialization]
        places += [mmengine.runner, mmengine.infer.BaseInferencer]
        ours = ('_schemes', 'find_latest_checkpoint')
        before = [{{name: value for name, value in vars(p).items() if name not in ours}} for p in places]
        listed = torch.serialization.get_safe_globals()
        import mmlinattn
        for place, names in zip(places, before):
            changed = [name for name, value in names.items() if vars(place)[name] is not value]
            assert not changed, (place, changed)
        assert torch.serialization.get_safe_globals() == listed
        loaded = checkpoint._load_checkpoint({str(tmp_path / 'epoch_1.pth')!r}, map_location='cpu')
        print(loaded['meta']['epoch'], len(loaded['message_hub']['log_scalars']) > 0)
    """
    command = [sys.executable, '-c', textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(mmlinattn.__file__).parents[1])
    assert done.stdout.splitlines()[-1:] == ['1 True'], done.stderr


def test_links_are_cached_in_mmengine_s_folder(server):
    """Name files of links without a file name, such as InLine's and FLatten's."""
    for number, path in enumerate(('/a/model.pth', '/f/1/?dl=1', '/g/1/?dl=1', '/?dl=1')):
        server.replies[path] = (200, saved({'w': torch.tensor(number)}))
        for _ in range(2):
            assert LOAD(server.root + path)['w'] == number
    assert [name.partition('-')[0] for name in server.kept()] == ['1', '1', 'checkpoint', 'model.pth']
    assert len(server.requests) == 4


@pytest.mark.parametrize('scheme', ['torchvision://', 'http'])
def test_hostile_downloads_are_neither_run_nor_kept(server, tmp_path, monkeypatch, scheme):
    marker, link = tmp_path / 'was_run', f'{server.root}/x.pth'
    server.replies['/x.pth'] = (200, saved(touch_when_loaded(marker)))
    monkeypatch.setattr(schemes, '_ZOOS', dict.fromkeys(schemes._ZOOS, lambda: {'x': link}))
    with pytest.raises(CheckpointError, match='refused'):
        LOAD(link if scheme == 'http' else f'{scheme}x')
    assert not marker.exists() and server.kept() == []


def test_the_zoos_of_mmengine(server, monkeypatch, tmp_path):
    (tmp_path / 'open_mmlab.json').write_text(json.dumps({'mine': f'{server.root}/mine.pth'}))
    monkeypatch.setenv('MMENGINE_HOME', str(tmp_path))  # for models of users
    server.replies['/mine.pth'] = (200, saved({'state_dict': {'backbone.w': torch.ones(2), 'head.w': torch.ones(1)}}))
    assert set(LOAD('open-mmlab://mine')['state_dict']) == {'backbone.w', 'head.w'}
    monkeypatch.setitem(schemes._ZOOS, 'openmmlab', lambda: {'detectron/resnet50_caffe': f'{server.root}/mine.pth'})
    assert LOAD('openmmlab://resnet50_caffe')['state_dict']  # a name that MMEngine has changed
    server.replies['/resnet.pth'] = (200, saved({'fc': torch.ones(3)}))
    monkeypatch.setitem(schemes._ZOOS, 'torchvision', lambda: {'resnet50': f'{server.root}/resnet.pth'})
    assert LOAD('torchvision://resnet50', map_location='meta')['fc'].is_meta
    with pytest.raises(CheckpointError, match="no model 'resnet51'; it has resnet50"):
        LOAD('torchvision://resnet51')


def test_addresses_that_mmengine_unpickles_without_a_check():
    for address in ('s3://x', 'cluster:s3://x', 'petrel://x', 'pavi://x', 'mmcls://x'):
        with pytest.raises(CheckpointError, match=f'^{address} .* download the file'):
            LOAD(address)
    CheckpointLoader.register_scheme('mine://', mine := lambda filename, map_location: filename)
    try:
        schemes.register()
        loaders = checkpoint_loaders()
        assert loaders['mine://'] is mine and LOAD('mine://x') == 'mine://x'
        assert not [name for name, loader in loaders.items() if loader.__module__.startswith('mmengine.')]
    finally:
        del CheckpointLoader._schemes['mine://']
