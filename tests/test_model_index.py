# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Model index and metafiles: complete, in step with configs and tables, and read by those who read such files."""

import csv
import runpy

import pytest
import yaml
from config_helpers import CONFIG_DIR, ROOT
from mmengine.config import utils as config_utils

import mmlinattn
from mmlinattn.analysis.published import read_rows
from mmlinattn.checkpoints.released import find_link, released_checkpoints

TOOL = runpy.run_path(str(ROOT / 'tools/analysis_tools/make_metafiles.py'))


@pytest.fixture(scope='module')
def models() -> dict:
    index = yaml.safe_load((ROOT / 'model-index.yml').read_text())
    found = {}
    for path in index['Import']:
        content = yaml.safe_load((ROOT / path).read_text())
        collections = {collection['Name'] for collection in content['Collections']}
        for model in content['Models']:
            assert model['In Collection'] in collections
            assert model['Name'] not in found
            found[model['Name']] = model
    return found


def test_files_are_as_generated():
    for path, text in TOOL['make_files']().items():
        assert (ROOT / path).read_text(encoding='utf-8') == text, 'run tools/analysis_tools/make_metafiles.py'


def test_every_config_has_an_entry(models):
    configs = {path.relative_to(ROOT).as_posix() for path in CONFIG_DIR.glob('mm*/*.py')}
    assert {model['Config'] for model in models.values()} == configs
    # a name of its own, though three tasks have a config of the same name
    for name, model in models.items():
        task, stem = model['Config'][:-3].split('/')[1:]
        assert name in (stem, f'{stem}_{task}')


def test_metrics_are_marked_as_published(models):
    rows = {row.stem: row for task in ('mmdet', 'mmseg', 'mmpretrain') for row in read_rows(task)}
    for name, model in models.items():
        if 'Results' in model:
            assert model['Metadata']['Metrics Source'] == f'published in {rows[name].source}; not retrained here'
    results = models['ravlt_b_cascade_3x']['Results']
    assert [result['Metrics'] for result in results] == [
        {'box AP': 55.3, 'box AP50': 73.8, 'box AP75': 60.1},
        {'mask AP': 47.7, 'mask AP50': 71.4, 'mask AP75': 52.1},
    ]


def test_links_are_those_of_the_released_table(models):
    with open(ROOT / 'mmlinattn/checkpoints/released_checkpoints.csv', newline='') as file:
        links = {row['link'] for row in csv.DictReader(file)}
    used = {model['Converted From']['Weights'] for model in models.values() if 'Weights' in model}
    assert used <= links
    released = released_checkpoints()
    for name, model in models.items():
        assert ('Weights' in model) == (name in released)
        if 'Weights' in model:
            assert find_link(model['Weights']).name == name  # what MMEngine loads, layout and all
            # what mim saves it as
            assert model['Weights'].split('/')[-1] == released[name].file_name
    missing = {entry.link for entry in released.values() if not entry.bare and entry.name in models} - used
    assert not missing


def test_unknown_family_is_named(tmp_path):
    folder = tmp_path / 'configs' / 'mmdet'
    folder.mkdir(parents=True)
    (folder / 'newcomer_t_maskrcnn_1x.py').touch()
    with pytest.raises(SystemExit, match="'newcomer'"):
        TOOL['make_files'](tmp_path)


def test_configs_of_one_name_are_told_apart_by_their_task(tmp_path):
    for path in ('mmdet/ravlt_x_shapes.py', 'mmseg/ravlt_x_shapes.py', 'mmseg/ravlt_y_shapes.py'):
        (tmp_path / 'configs' / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'configs' / path).touch()
    entries = yaml.safe_load(TOOL['make_files'](tmp_path)['configs/ravlt/metafile.yml'])['Models']
    assert [entry['Name'] for entry in entries] == ['ravlt_x_shapes_mmdet', 'ravlt_x_shapes_mmseg', 'ravlt_y_shapes']


def test_check_reports_what_is_out_of_date(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TOOL['main'].__globals__, 'ROOT', tmp_path)
    monkeypatch.setattr('sys.argv', ['make_metafiles.py', '--check'])
    with pytest.raises(SystemExit) as stop:
        TOOL['main']()
    assert stop.value.code == 1  # as its help says
    said = capsys.readouterr().out
    assert said.startswith('out of date: configs/') and 'model-index.yml' in said
    assert not (tmp_path / 'model-index.yml').exists()


def test_files_are_written_where_they_differ(tmp_path, monkeypatch, capsys):
    names = TOOL['main'].__globals__
    monkeypatch.setitem(names, 'ROOT', tmp_path)
    monkeypatch.setitem(names, 'make_files', lambda: {'new/a.yml': 'a', 'b.yml': 'b'})
    (tmp_path / 'b.yml').write_text('b')

    def run(*args):
        monkeypatch.setattr('sys.argv', ['make_metafiles.py', *args])
        TOOL['main']()
        return capsys.readouterr().out

    assert run() == 'written: new/a.yml\n' and (tmp_path / 'new' / 'a.yml').read_text() == 'a'
    assert run() == 'written: nothing\n' and run('--check') == 'out of date: nothing\n'


def installed(tmp_path):
    """A package folder as an installation has it."""
    package = tmp_path / 'mmlinattn'
    (package / '.mim').mkdir(parents=True)
    for name in ('configs', 'model-index.yml'):
        (package / '.mim' / name).symlink_to(ROOT / name)
    return package


def test_mmengine_finds_configs_and_weights(tmp_path):
    meta = config_utils._get_cfg_metainfo(str(installed(tmp_path)), 'mmdet/ravlt_t_maskrcnn_1x.py')
    assert meta['Weights'].endswith('/maskrcnn_t_1x_12_epoch.pth')
    with pytest.raises(ValueError, match='ravlt_t_maskrcnn_1x'):
        config_utils._get_cfg_metainfo(str(tmp_path / 'mmlinattn'), 'mmdet/ravlt_x.py')


def test_mmpretrain_lists_and_builds_them(tmp_path, monkeypatch):
    pytest.importorskip('mmpretrain')
    from mmpretrain.apis.model import ModelHub, get_model, list_models

    monkeypatch.setattr(ModelHub, '_models_dict', {})
    monkeypatch.setattr(ModelHub, '_ModelHub__mmpretrain_registered', True)
    ModelHub.register_model_index(ROOT / 'model-index.yml', config_prefix=ROOT)
    assert {'ravlt_t_in1k', 'ravlt_l_in1k'} <= set(list_models('ravlt*in1k'))
    model = get_model('ravlt_t_in1k', backbone=dict(init_cfg=None))
    assert isinstance(model.backbone, mmlinattn.backbones.RAVLT)
    assert ModelHub.get('ravlt_t_in1k').metadata.parameters == 14_900_000


def test_paths_of_the_index_are_files():
    for path in yaml.safe_load((ROOT / 'model-index.yml').read_text())['Import']:
        assert (ROOT / path).is_file()
    assert all((CONFIG_DIR / task).is_dir() for task in TOOL['TASKS'])
