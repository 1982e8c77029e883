# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The downstream example of the docs, in a project outside the repository."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from config_helpers import ROOT

EXAMPLE = ROOT / 'docs' / 'examples' / 'downstream' / 'fruit_detector.py'
REGISTERED = r'^@(?:MODELS|MODEL_WRAPPERS|HOOKS|OPTIM_WRAPPER_CONSTRUCTORS)\.register_module\(.*\)\nclass (\w+)'


@pytest.fixture
def project(tmp_path):
    """A folder with the example, and mmlinattn as an installation lays it out."""
    pytest.importorskip('mmdet')
    package, folder = tmp_path / 'site' / 'mmlinattn', tmp_path / 'project'
    shutil.copytree(ROOT / 'mmlinattn', package, ignore=shutil.ignore_patterns('__pycache__', '.mim'))
    (package / '.mim').mkdir()
    for name in ('configs', 'model-index.yml'):
        (package / '.mim' / name).symlink_to(ROOT / name)
    # copies: tools look for the package they belong to beside them
    shutil.copytree(ROOT / 'tools', package / '.mim' / 'tools', ignore=shutil.ignore_patterns('__pycache__'))
    folder.mkdir()
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


def test_installed_tools_start_beside_their_package(project):
    """A whole run of the example: ``test_own_data.py``."""
    assert '--resume' in run(
        project, str(project.parent / 'site' / 'mmlinattn' / '.mim' / 'tools' / 'train.py'), '--help'
    )
