# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from unittest import mock

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn

from mmlinattn import __version__
from mmlinattn.checkpoints import CheckpointError, load_file
from mmlinattn.checkpoints.convert import convert_checkpoint, convert_state


@MODELS.register_module(force=True)
class ModelOfNorms(nn.Module):
    def __init__(self, data_preprocessor=None):
        super().__init__()
        self.backbone, self.neck, self.head = (nn.Sequential(nn.BatchNorm2d(4)) for _ in range(3))


@pytest.fixture
def config(tmp_path) -> str:
    (tmp_path / 'c.py').write_text("model = dict(type='ModelOfNorms')\n")
    return str(tmp_path / 'c.py')


def sevens() -> dict:
    return {key: torch.full_like(value, 7) for key, value in ModelOfNorms().state_dict().items()}


def test_counters_of_batches_that_a_file_has_are_kept():
    state = sevens()
    del state['head.0.num_batches_tracked']
    fit = convert_state(dict(state_dict=state), 'a.pth', ModelOfNorms())
    found = {key: int(value) for key, value in fit.weights.items() if key.endswith('num_batches_tracked')}
    assert found == {f'{part}.0.num_batches_tracked': n for part, n in (('backbone', 7), ('neck', 7), ('head', 0))}
    assert fit.is_complete


@pytest.mark.parametrize(
    'meta, expected',
    [
        (dict(epoch=3), None),
        (dict(dataset_meta=dict(classes=('a',)), CLASSES=('b',)), dict(classes=('a',))),
        (dict(dataset_meta=None, CLASSES=('b',), PALETTE=None), dict(classes=('b',))),
        (dict(PALETTE=[(1, 2, 3)]), dict(palette=[(1, 2, 3)])),
    ],
)
def test_meta_of_a_converted_file(config, tmp_path, monkeypatch, capsys, meta, expected):
    monkeypatch.setenv('HOME', str(tmp_path))
    torch.save(dict(state_dict=sevens(), meta=meta), tmp_path / 'a.pth')
    assert convert_checkpoint(tmp_path / 'a.pth', '~/b.pth', config).is_complete
    written = load_file(tmp_path / 'b.pth')
    known = dict(source='a.pth', mmlinattn_version=__version__, config_name='c.py')
    assert written['meta'] == (known if expected is None else dict(known, dataset_meta=expected))
    assert list(written) == ['state_dict', 'meta'] and set(written['state_dict']) == set(sevens())
    assert all((value == 7).all() for value in written['state_dict'].values())
    assert capsys.readouterr().out == ''  # the tool prints


def test_a_failed_write_leaves_the_old_file(config, tmp_path, monkeypatch):
    (tmp_path / 'b.pth').write_text('yesterday')
    torch.save(sevens(), tmp_path / 'a.pth')

    monkeypatch.setattr(torch, 'save', mock.Mock(side_effect=RuntimeError('disk\nfull')))
    with pytest.raises(CheckpointError, match=f'^cannot write {tmp_path}/b.pth: disk$'):
        convert_checkpoint(tmp_path / 'a.pth', tmp_path / 'b.pth', config)
    assert (tmp_path / 'b.pth').read_text() == 'yesterday'


def test_targets_are_checked_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    source, link = tmp_path / 'a.pth', tmp_path / 'link.pth'
    source.write_text('as it was')
    link.symlink_to(source)
    for given, target, said in (
        (source, tmp_path, 'is a folder; name a file in it'),
        (source, source, 'is SRC itself'),
        (source, link, 'is SRC itself'),
        ('~/a.pth', source, 'is SRC itself'),
        (source, tmp_path / 'no' / 'b.pth', 'does not exist or cannot be written to'),
        ('mmlinattn://no_such', tmp_path / 'b.pth', 'known names'),
    ):
        with pytest.raises(CheckpointError, match=said):
            convert_checkpoint(given, target, 'no_such_config.py')
    assert source.read_text() == 'as it was'
