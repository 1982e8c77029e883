# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The downstream example of the docs, in a project outside the repository, on data of its own."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from config_helpers import ROOT

EXAMPLE = ROOT / 'docs' / 'examples' / 'downstream' / 'fruit_detector.py'
REGISTERED = r'^@(?:MODELS|MODEL_WRAPPERS|HOOKS|OPTIM_WRAPPER_CONSTRUCTORS)\.register_module\(.*\)\nclass (\w+)'


@pytest.fixture
def project(tmp_path):
    """A folder with the example, two images a split, and mmlinattn as an installation lays it out."""
    mmcv = pytest.importorskip('mmcv')
    package = tmp_path / 'site' / 'mmlinattn'
    package.parent.mkdir()
    shutil.copytree(ROOT / 'mmlinattn', package, ignore=shutil.ignore_patterns('__pycache__', '.mim'))
    (package / '.mim').mkdir()
    for name in ('configs', 'model-index.yml'):
        (package / '.mim' / name).symlink_to(ROOT / name)
    # copies: tools look for the package they belong to beside them
    shutil.copytree(ROOT / 'tools', package / '.mim' / 'tools', ignore=shutil.ignore_patterns('__pycache__'))
    folder = tmp_path / 'project'
    data = folder / 'data' / 'fruit'
    (data / 'annotations').mkdir(parents=True)
    for split in ('train', 'val'):
        images, annotations = [], []
        for i in range(2):
            picture = np.full((64, 96, 3), 200, np.uint8)
            picture[10:40, 20:60] = (40, 40, 220) if i else (40, 200, 120)
            mmcv.imwrite(picture, str(data / 'images' / split / f'{i}.png'))
            images.append(dict(id=i, file_name=f'{i}.png', height=64, width=96))
            polygon = [20, 10, 60, 10, 60, 40, 20, 40]
            box = dict(bbox=[20, 10, 40, 30], area=1200, iscrowd=0, segmentation=[polygon])
            annotations.append(dict(box, id=i + 1, image_id=i, category_id=i + 1))
        categories = [dict(id=1, name='apple'), dict(id=2, name='pear')]
        content = dict(images=images, annotations=annotations, categories=categories)
        (data / 'annotations' / f'{split}.json').write_text(json.dumps(content))
    shutil.copy2(EXAMPLE, folder)
    return folder


def run(project, *command) -> str:
    paths = [str(project.parent / 'site'), os.environ.get('PYTHONPATH', '')]
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, paths)), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run([sys.executable, *command], cwd=project, capture_output=True, text=True, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_inherits_by_package_name_and_builds(project):
    code = """
import json, mmlinattn
from mmengine import registry
from mmengine.config import Config
kinds = registry.MODELS, registry.MODEL_WRAPPERS, registry.HOOKS, registry.OPTIM_WRAPPER_CONSTRUCTORS
registered = [name for kind in kinds for name, made in kind.module_dict.items() if made.__module__[:9] == 'mmlinattn']
cfg = Config.fromfile('fruit_detector.py')
registry.init_default_scope(cfg.default_scope)
cfg.model.backbone.init_cfg = None
model = registry.MODELS.build(cfg.model)
print(json.dumps(dict(
    package=mmlinattn.__file__,
    neck=type(model.neck).__name__,
    classes=[model.roi_head.bbox_head.num_classes, model.roi_head.mask_head.num_classes],
    frozen=[any(p.requires_grad for p in stage.parameters()) for stage in model.backbone.stages],
    registered=sorted(registered),
)))
"""
    sources = (path.read_text() for path in (ROOT / 'mmlinattn').rglob('*.py'))
    offered = [name for text in sources for name in re.findall(REGISTERED, text, re.MULTILINE)]
    assert len(offered) > 18
    assert json.loads(run(project, '-c', code).splitlines()[-1]) == dict(
        package=str(project.parent / 'site' / 'mmlinattn' / '__init__.py'),
        neck='PAFPN',
        classes=[2, 2],
        frozen=[False, True, True, True],
        registered=sorted(offered),  # by the import alone
    )


@pytest.mark.slow
def test_trains(project):
    # small images and one epoch; everything else as the example has it
    size = '(96,64)'
    options = [
        'model.backbone.init_cfg=None',
        'train_cfg.max_epochs=1',
        f'train_dataloader.dataset.pipeline.2.scale={size}',
        f'val_dataloader.dataset.pipeline.1.scale={size}',
        f'test_dataloader.dataset.pipeline.1.scale={size}',
        *(f'{stage}_dataloader.num_workers=0' for stage in ('train', 'val', 'test')),
        *(f'{stage}_dataloader.persistent_workers=False' for stage in ('train', 'val', 'test')),
        'model.test_cfg.rpn.max_per_img=20',
        'model.train_cfg.rpn_proposal.max_per_img=20',
        'default_hooks.checkpoint.save_optimizer=False',
    ]
    train = project.parent / 'site' / 'mmlinattn' / '.mim' / 'tools' / 'train.py'
    out = run(project, str(train), 'fruit_detector.py', '--work-dir', 'work', '--cfg-options', *options)
    assert 'coco/bbox_mAP' in out and (project / 'work' / 'epoch_1.pth').is_file()
