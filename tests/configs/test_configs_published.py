# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every config whole against the table of published recipes."""

import pytest
import recipes
from config_helpers import CONFIGS, load

import mmlinattn  # noqa: F401

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)


@pytest.mark.parametrize('name', CONFIGS)
def test_a_config_is_its_published_recipe(name):
    assert recipes.summary(load(name)) == recipes.published(name)
