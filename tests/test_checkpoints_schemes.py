# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""MMEngine's own ways to load a checkpoint, after ``import mmlinattn`` and nothing else."""

import io
import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import touch_when_loaded, with_package
from mmengine.model import BaseModel, BaseModule
from mmengine.runner import Runner, load_checkpoint
from mmengine.runner import checkpoint as mmengine_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader
from torch import nn

from mmlinattn.checkpoints import CheckpointError, register, schemes


class OneLayer(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs, mode='tensor'):
        return dict(loss=self.layer(torch.stack(inputs)).sum())


def runner(work_dir, epochs, **kwargs) -> Runner:
    return Runner(
        model=OneLayer(),
        work_dir=str(work_dir),
        train_dataloader=dict(
            dataset=[dict(inputs=torch.ones(1))] * 4,
            batch_size=2,
            sampler=dict(type='DefaultSampler', shuffle=True),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.1)),
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=2),
            dict(type='MultiStepLR', milestones=[1]),
        ],
        custom_hooks=[dict(type='EMAHook')],
        default_scope='mmengine',
        experiment_name=f'{work_dir.name}_{epochs}_{len(kwargs)}',
        **kwargs,
    )


def test_mmengine_resumes_its_own_checkpoints(tmp_path):
    first = runner(tmp_path, epochs=1)
    first.train()
    losses = first.message_hub.get_scalar('train/loss').data[0].copy()
    second = runner(tmp_path, epochs=2, resume=True)
    second.train()
    assert second.iter == 4
    # The history of the loss, which is what the plain safe loader stumbles over, came along.
    resumed = second.message_hub.get_scalar('train/loss').data[0]
    assert len(losses) == 2 and len(resumed) == 4 and list(resumed[:2]) == list(losses)
    assert resumed[2] < losses[1]  # the weights as well: the loss goes on falling


def test_load_from_takes_the_safe_way(tmp_path):
    marker = tmp_path / 'was_run'
    torch.save({'state_dict': {}, 'meta': touch_when_loaded(marker)}, tmp_path / 'bad.pth')
    with pytest.raises(CheckpointError, match='refused'):
        runner(tmp_path, 1, load_from=str(tmp_path / 'bad.pth')).train()
    assert not marker.exists()


@pytest.mark.parametrize('prefix', [None, 'backbone.'])
def test_init_cfg_of_any_module_takes_the_safe_way(tmp_path, prefix):
    class Layer(BaseModule):
        def __init__(self, checkpoint):
            super().__init__(dict(type='Pretrained', checkpoint=checkpoint, prefix=prefix))
            self.weight = nn.Parameter(torch.zeros(2))

    marker, good, bad = tmp_path / 'was_run', tmp_path / 'good.pth', tmp_path / 'bad.pth'
    torch.save({f'{prefix or ""}weight': torch.ones(2)}, good)
    torch.save({'weight': touch_when_loaded(marker)}, bad)
    layer = Layer(str(good))
    layer.init_weights()
    assert torch.equal(layer.weight.data, torch.ones(2))
    with pytest.raises(CheckpointError, match='refused'):
        Layer(str(bad)).init_weights()
    assert not marker.exists()


@pytest.mark.parametrize('map_location', [None, 'cpu', lambda storage, location: storage])
def test_local_files_load_under_any_map_location(tmp_path, map_location, monkeypatch):
    torch.save({'state_dict': {'weight': torch.ones(1, 1), 'bias': torch.ones(1)}}, tmp_path / 'a')
    layer = nn.Linear(1, 1)
    load_checkpoint(layer, str(tmp_path / 'a'), map_location=map_location, strict=True)
    assert layer.weight.item() == 1
    monkeypatch.setenv('HOME', str(tmp_path))
    assert 'state_dict' in CheckpointLoader.load_checkpoint('~/a', map_location)


def test_where_to_and_how_loudly_files_are_read(tmp_path, capsys, caplog):
    """MMEngine's arguments have the effect that they have without us, in their places and by their names."""
    path, logger = str(tmp_path / 'a.pth'), logging.getLogger('of-schemes')
    torch.save({'weight': torch.ones(2)}, path)
    load = CheckpointLoader.load_checkpoint
    assert load(path, 'meta', 'silent')['weight'].is_meta
    assert load(filename=path, map_location='meta', logger='silent')['weight'].is_meta
    assert capsys.readouterr().out == '' and load(path, logger='silent')['weight'].device.type == 'cpu'
    with caplog.at_level(logging.INFO, logger.name):
        load(path, None, logger)
        load(path, logger=logger)
    assert [(record.name, path in record.getMessage()) for record in caplog.records] == [(logger.name, True)] * 2
    torch.save([1], path)
    with pytest.raises(CheckpointError, match=f'^{path} holds a list, not a state dict$'):
        load(path, logger='silent')


def test_missing_and_broken_files_in_one_line(tmp_path):
    broken = tmp_path / 'broken.pth'
    broken.write_bytes(b'PK\x03\x04 and then nothing')
    for path in (str(tmp_path / 'missing.pth'), str(broken)):
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(nn.Linear(1, 1), path)
        assert path in str(caught.value) and '\n' not in str(caught.value)


def test_registering_again_changes_nothing():
    register()
    before = dict(CheckpointLoader._schemes)
    register()
    assert dict(CheckpointLoader._schemes) == before
    order = list(before)
    assert order.index('mmlinattn://') < order.index('')


def test_a_plain_import_is_all_an_upstream_tool_needs(tmp_path):
    runner(tmp_path, epochs=1).train()
    script = f"""
        import mmlinattn
        from mmengine.runner.checkpoint import _load_checkpoint
        checkpoint = _load_checkpoint({str(tmp_path / 'epoch_1.pth')!r}, map_location='cpu')
        print(checkpoint['meta']['epoch'], len(checkpoint['message_hub']['log_scalars']) > 0)
    """
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env=with_package(),
    )
    assert done.stdout.splitlines()[-1:] == ['1 True'], done.stderr


def test_loaders_of_other_addresses_read_safely_too(tmp_path, monkeypatch):
    """Those of s3 and the like open a file and hand it to ``torch.load``."""
    marker = tmp_path / 'was_run'
    good, bad = io.BytesIO(), io.BytesIO()
    torch.save(dict(weight=torch.ones(2)), good)
    torch.save(touch_when_loaded(marker), bad)
    good.seek(0)
    bad.seek(0)
    theirs = mmengine_checkpoint.torch
    assert torch.equal(theirs.load(good, map_location='cpu')['weight'], torch.ones(2))
    with pytest.raises(CheckpointError, match='refused'):
        theirs.load(bad, 'cpu', weights_only=False)
    assert not marker.exists() and theirs.nn is nn
    asked = []
    monkeypatch.setattr(schemes, 'load_file', lambda *args: asked.append(args))
    theirs.load('a.pth', 'cuda')
    schemes.load_from_local('b.pth')
    assert asked == [('a.pth', 'cuda'), ('b.pth', None)]
    theirs.load(good, 'cuda')
    assert asked[2][0].endswith('.pth') and asked[2][1] == 'cuda' and not Path(asked[2][0]).exists()


def test_what_registering_puts_in_place(monkeypatch):
    monkeypatch.setattr(mmengine_checkpoint, '_safe_torch_load', None, raising=False)  # of onedl-mmengine
    for prefix in ('', 'http://', 'https://'):
        monkeypatch.setitem(CheckpointLoader._schemes, prefix, None)
    register()
    assert mmengine_checkpoint._safe_torch_load is schemes._load_any
    assert mmengine_checkpoint.load_from_http is schemes.load_from_http
    expected = {'': 'local', 'http://': 'http', 'https://': 'http', 'mmlinattn://': 'mmlinattn'}
    found = {prefix: CheckpointLoader._schemes[prefix].__name__ for prefix in expected}
    assert found == {prefix: f'load_from_{name}' for prefix, name in expected.items()}
