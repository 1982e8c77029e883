# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Models by their names, through MMEngine's hub and MMPretrain's."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from config_helpers import ROOT

import mmlinattn
from mmlinattn.checkpoints import schemes
from mmlinattn.checkpoints.released import find_link, find_released, link_with_name
from mmlinattn.utils import files, project_files, register_all_modules, registering, written_whole


def test_project_files_are_found():
    assert project_files('configs').samefile(ROOT / 'configs')
    with pytest.raises(FileNotFoundError, match='nothing.yml is neither in'):
        project_files('nothing.yml')


def test_files_of_an_installation_come_first(tmp_path, monkeypatch):
    package = tmp_path / 'site' / 'mmlinattn'
    monkeypatch.setattr(files, 'PACKAGE', package)
    with pytest.raises(FileNotFoundError) as found:
        project_files('tools')
    assert str(found.value) == (
        f'tools is neither in {package}/.mim nor in {tmp_path}/site: install mmlinattn with pip'
    )
    (tmp_path / 'site' / 'tools').mkdir(parents=True)
    assert project_files('tools') == tmp_path / 'site' / 'tools'
    (package / '.mim' / 'tools').mkdir(parents=True)
    assert project_files('tools') == package / '.mim' / 'tools'


@pytest.mark.parametrize('part', [None, 'mine.part'])
def test_a_file_gets_its_name_when_it_is_on_the_disk(tmp_path, monkeypatch, part):
    target, steps = tmp_path / 'a.bin', []
    part = part and tmp_path / part
    written = part or tmp_path / f'.a.bin.{os.getpid()}.part'
    replace = os.replace
    monkeypatch.setattr(os, 'fsync', lambda fd: steps.append(Path(f'/proc/self/fd/{fd}').read_bytes()))
    monkeypatch.setattr(os, 'replace', lambda *paths: steps.append(tuple(map(str, paths))) or replace(*paths))
    with written_whole(target, part) as file:
        file.write(b'whole')
        assert written.exists() and not target.exists()
    assert steps == [b'whole', (str(written), str(target))] and target.read_bytes() == b'whole'
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), written_whole(target, part) as file:
            file.write(b'broken')
            raise error
        assert target.read_bytes() == b'whole' and os.listdir(tmp_path) == ['a.bin']
    with pytest.raises(OSError), written_whole(tmp_path / 'no' / 'a.bin', part and tmp_path / 'no' / 'part'):
        raise AssertionError


def test_names_that_mmpretrain_knows_stay_and_paths_are_whole(hub, monkeypatch):
    steps = []
    models = {name: f'configs/{name}.py' for name in ('mmpretrain/Known', 'mmpretrain/New', 'mmdet/detector')}
    models = [SimpleNamespace(name=name.split('/')[1], config=path) for name, path in models.items()]
    loaded = SimpleNamespace(models=models, build_models_with_collections=lambda: steps.append('built'))
    monkeypatch.setattr('modelindex.load_model_index.load', lambda path: steps.append(path) or loaded)
    hub._models_dict['known'] = theirs = object()
    monkeypatch.setattr(registering, 'find_spec', lambda name: None)
    register_all_modules()
    assert list(hub._models_dict) == ['known'] and steps == []  # without MMPretrain the modules only
    monkeypatch.setattr(registering, 'find_spec', lambda name: name == 'mmpretrain')
    register_all_modules(init_default_scope=False)
    index = project_files('model-index.yml')
    assert steps == [str(index), 'built'] and hub._models_dict == dict(known=theirs, new=models[1])
    assert models[1].config == str(index.parent / 'configs/mmpretrain/New.py')


@pytest.fixture
def hub(monkeypatch):
    """MMPretrain's list of models without its own (reading its index takes seconds)."""
    models = pytest.importorskip('mmpretrain.apis').ModelHub
    monkeypatch.setattr(models, '_models_dict', {})
    monkeypatch.setattr(models, '_ModelHub__mmpretrain_registered', True)
    return models


def test_classifiers_are_known_by_name(hub):
    from mmpretrain import get_model, list_models

    assert list_models() == []
    register_all_modules()
    register_all_modules()
    assert {'ravlt_t_in1k', 'ravlt_s_in1k'} <= set(list_models('*ravlt*'))
    assert 'inline_deit_t_in1k' in list_models(task='Image Classification')
    assert not any('maskrcnn' in name or 'fpn' in name for name in list_models())
    model = get_model('ravlt_t_in1k', head=dict(num_classes=7))
    assert model(torch.rand(1, 3, 64, 64)).shape == (1, 7)


def test_inferencer_by_name(hub):
    from mmpretrain import ImageClassificationInferencer

    register_all_modules()
    inferencer = ImageClassificationInferencer('flatten_pvt_v2_b0_in1k', pretrained=False)
    (result,) = inferencer(np.zeros((64, 96, 3), np.uint8))
    assert 0 <= result['pred_label'] < 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    'name, head',
    [
        ('mmdet/ravlt_t_maskrcnn_1x', 'roi_head'),
        ('mmseg/inline_pvt_t_fpn_80k', 'decode_head'),
        ('mmpretrain/flatten_pvt_v2_b0_in1k', 'head'),
    ],
)
def test_mmengine_builds_any_config_by_name(name, head, hub):
    pytest.importorskip(name.partition('/')[0])
    from mmengine.hub import get_config, get_model

    if not (ROOT / 'mmlinattn' / '.mim').is_dir():
        pytest.skip('mmlinattn is not installed')
    model = get_model(f'mmlinattn::{name}.py')
    assert isinstance(model.backbone, mmlinattn.backbones.base.Backbone)
    assert hasattr(model, head)
    assert get_config(f'mmlinattn::{name}.py').default_scope == name.partition('/')[0]


def test_links_of_the_metafiles_are_converted(monkeypatch):
    """A link that is in the table is the checkpoint of that name, not a file in somebody else's layout."""
    monkeypatch.setattr(schemes, 'load_from_mmlinattn', lambda name, map_location: (name, map_location))
    for name in ('ravlt_t_maskrcnn_1x', 'inline_swin_t_in1k'):
        link = link_with_name(find_released(name))
        assert link.split('/')[-1].endswith('.pth')
        assert schemes.load_from_http(link, 'cpu') == (f'mmlinattn://{name}', 'cpu')
    assert find_link('https://example.org/RAVLT_T.pth') is None


def test_importing_the_package_warns_of_nothing_and_leaves_upstream_alone():
    code = "import sys, mmlinattn; print([m for m in ('mmdet', 'mmseg', 'mmpretrain', 'pandas') if m in sys.modules])"
    command = [sys.executable, '-W', 'error', '-c', code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.strip() == '[]'


@pytest.mark.slow
def test_importing_the_package_costs_little():
    """Beyond MMEngine and MMCV, of which a run needs these parts in any case."""
    code = (
        'import time, mmengine.runner, mmengine.model, mmengine.hooks, mmengine.optim, mmcv.cnn, mmcv.transforms\n'
        'begin = time.process_time(); import mmlinattn; print(time.process_time() - begin)'
    )
    runs = [subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.3
