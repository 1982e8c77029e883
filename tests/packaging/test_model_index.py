# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Model index and metafiles: complete and consistent with configs and tables."""

import pytest
import yaml
from helpers.config_helpers import CONFIG_DIR, ROOT

from mmlinattn.checkpoints.released import find_link, released_checkpoints


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


def test_every_config_has_an_entry(models):
    configs = {path.relative_to(ROOT).as_posix() for path in CONFIG_DIR.glob('mm*/*.py')}
    assert {model['Config'] for model in models.values()} == configs
    # unique, although three tasks have a config of the same name
    for name, model in models.items():
        task, stem = model['Config'][:-3].split('/')[1:]
        assert name in (stem, f'{stem}_{task}')


def test_links_are_those_of_the_released_table(models):
    released = released_checkpoints()
    for name, model in models.items():
        assert ('Weights' in model) == (name in released)
        if 'Weights' in model:
            assert model['Converted From']['Weights'] == released[name].link
            assert find_link(model['Weights']).name == name  # loaded by MMEngine with its layout
            # name of the file that mim saves
            assert model['Weights'].split('/')[-1] == released[name].file_name
