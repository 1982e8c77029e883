# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``_base_ = 'mmlinattn::TASK/NAME.py'``: the same config as by its path, and the same classes for its types."""

import mmengine.registry
import numpy as np
import pytest
from helpers.config_helpers import CONFIG_DIR, ROOT, load
from mmengine.config import Config
from mmengine.registry import DATASETS, MODELS, Registry, init_default_scope
from PIL import Image

from mmlinattn.registry import TaskRegistry
from mmlinattn.tooling.datasets import DatasetSpec, write_dataset

pytestmark = pytest.mark.skipif(not (ROOT / 'mmlinattn/.mim').is_dir(), reason='mmlinattn is not installed')
TASKS = 'mmdet', 'mmseg', 'mmpretrain'
ROOTS = [root for root in vars(mmengine.registry).values() if isinstance(root, Registry)]


def without_scopes(node):
    if isinstance(node, dict):
        return {key: without_scopes(value) for key, value in node.items() if key != '_scope_'}
    return [without_scopes(item) for item in node] if isinstance(node, (list, tuple)) else node


@pytest.mark.slow
@pytest.mark.parametrize('task', TASKS)
def test_every_config_is_the_same_by_name(task, tmp_path):
    pytest.importorskip(task)
    child = tmp_path / 'child.py'
    for path in sorted((CONFIG_DIR / task).glob('*.py')):
        child.write_text(f"_base_ = 'mmlinattn::{task}/{path.name}'\n")
        cfg = Config.fromfile(child)
        assert without_scopes(cfg.to_dict()) == without_scopes(load(f'{task}/{path.stem}').to_dict()), path.name


@pytest.mark.parametrize('task', TASKS)
def test_the_scope_is_that_of_the_run(task):
    """Look up types in the package of the run, also in a part of another task, by every registry of MMEngine."""
    pytest.importorskip(task)
    init_default_scope(task)
    assert all(isinstance(root.children['mmlinattn'], TaskRegistry) for root in ROOTS)
    loss = dict(type='CrossEntropyLoss', _scope_='mmlinattn')
    assert type(MODELS.build(loss)).__module__.startswith(f'{task}.')
    for other in filter(lambda name: name != task, TASKS):
        with MODELS.switch_scope_and_registry(other):
            assert type(MODELS.build(loss)).__module__.startswith(f'{other}.')
    assert type(MODELS.build(dict(type='mmlinattn.CrossEntropyLoss'))).__module__.startswith(f'{task}.')
    with pytest.raises(KeyError, match='NoSuchLoss is not in the'):
        MODELS.build(dict(loss, type='NoSuchLoss'))


OWN = "type='BaseSegDataset', metainfo=dict(classes=('a', 'b', 'c')), "


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ('', [255, 0, 1]),  # ADE20K
        (OWN, [0, 1, 2]),
        (f'{OWN}reduce_zero_label=False, ', [0, 1, 2]),
        (f'{OWN}reduce_zero_label=True, ', [255, 0, 1]),
    ],
)
def test_segmentation_masks_of_the_user_take_one_setting(changes, expected, tmp_path):
    pytest.importorskip('mmseg')
    write_dataset(tmp_path / 'data', DatasetSpec('ade', 1, 1, size=(64, 64)))
    (label,) = tmp_path.glob('data/annotations/validation/*.png')
    Image.fromarray(np.tile(np.uint8([0, 1, 2, 2]), (64, 16))).save(label)
    (tmp_path / 'child.py').write_text(f"""
_base_ = 'mmlinattn::mmseg/ravlt_t_upernet_160k.py'
val_dataloader = dict(dataset=dict({changes}data_root={str(tmp_path / 'data')!r}))
""")
    cfg = Config.fromfile(tmp_path / 'child.py')
    init_default_scope('mmseg')
    sample = DATASETS.build(cfg.val_dataloader.dataset)[0]['data_samples']
    assert sample.gt_sem_seg.data[0, 0, :3].tolist() == expected
