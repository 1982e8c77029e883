# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Content of wheel and source archive; pinned versions."""

import email
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
VERSION = runpy.run_path(str(ROOT / 'mmlinattn' / 'version.py'))['__version__']
ONEDL = {name: f'onedl-{name}' for name in ('mmengine', 'mmcv', 'mmsegmentation', 'mmpretrain')}
ONEDL['mmdet'] = 'onedl-mmdetection'
# a PYTHONPATH of another checkout would come before installed packages
CLEAN = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
REGISTERED = r'^@(?:MODELS|MODEL_WRAPPERS|HOOKS|OPTIM_WRAPPER_CONSTRUCTORS)\.register_module\(.*\)\nclass (\w+)'
DOWNSTREAM = """
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


def run(*command, cwd, env=CLEAN) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    """Return a copy of the checkout, the content of the wheel built from its source archive, and the install folder."""
    folder = tmp_path_factory.mktemp('wheel')
    checkout, site = folder / 'checkout', folder / 'site'
    ignore = shutil.ignore_patterns('__pycache__', '.mim', '*.egg-info', 'build')
    for name in ('mmlinattn', 'configs', 'tools', 'projects', 'mmcv_ops', 'requirements'):
        shutil.copytree(ROOT / name, checkout / name, ignore=ignore)
    for path in filter(Path.is_file, ROOT.iterdir()):
        shutil.copy2(path, checkout)
    archive = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    run(sys.executable, '-c', archive, cwd=checkout)
    with tarfile.open(folder / f'mmlinattn-{VERSION}.tar.gz') as archive:
        archive.extractall(folder, filter='data')
    source = folder / f'mmlinattn-{VERSION}'
    assert (source / 'projects' / 'studies' / 'main.py').is_file()  # in the archive, not in the wheel
    leftover = source / 'build' / 'lib' / 'mmlinattn' / '.mim' / 'configs' / 'deleted.py'
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    pip = (sys.executable, '-m', 'pip')
    run(*pip, 'wheel', '--no-deps', '--no-build-isolation', '-w', str(folder), '.', cwd=source)
    (wheel,) = folder.glob('mmlinattn-*.whl')
    run(*pip, 'install', '--no-deps', '--target', str(site), str(wheel), cwd=folder)
    with zipfile.ZipFile(wheel) as archive:
        return checkout, {name: archive.read(name) for name in archive.namelist()}, site


def test_wheel(installed):
    checkout, content, _ = installed
    # configs, tools, operators and index: complete, unchanged, without deleted files
    expected = {'model-index.yml': (checkout / 'model-index.yml').read_bytes()}
    for folder in ('configs', 'tools', 'mmcv_ops'):
        for path in (checkout / folder).rglob('*'):
            if path.is_file() and not {'tests', 'results'} & set(path.parts):
                expected[path.relative_to(checkout).as_posix()] = path.read_bytes()
    prefix = 'mmlinattn/.mim/'
    mim = {name[len(prefix) :]: data for name, data in content.items() if name.startswith(prefix)}
    assert mim == expected

    # modules and their tables
    for path in (checkout / 'mmlinattn').rglob('*'):
        if path.suffix in ('.py', '.csv', '.json') and '.mim' not in path.parts:
            assert path.relative_to(checkout).as_posix() in content

    metadata = email.message_from_bytes(content[f'mmlinattn-{VERSION}.dist-info/METADATA'])
    assert metadata['Version'] == VERSION
    assert metadata['Requires-Python'] == '>=3.10'
    assert metadata.get_all('Project-URL')
    assert 'Apache-2.0' in (metadata['License'], metadata['License-Expression'])
    assert {'mim', 'tests', 'all'} <= set(metadata.get_all('Provides-Extra'))
    required = [Requirement(line) for line in metadata.get_all('Requires-Dist')]
    always = {requirement.name for requirement in required if requirement.marker is None}
    assert always == {'torch', 'einops', 'filelock', 'numpy'}


@pytest.mark.slow
def test_downstream_example_on_an_installed_wheel(installed, tmp_path):
    """Build the model from its ``mmlinattn::`` base, and start a tool of the wheel."""
    pytest.importorskip('mmdet')
    site, env = installed[2], {**CLEAN, 'PYTHONPATH': str(installed[2])}
    shutil.copy2(ROOT / 'docs' / 'examples' / 'downstream' / 'fruit_detector.py', tmp_path)
    sources = (path.read_text() for path in (ROOT / 'mmlinattn').rglob('*.py'))
    offered = [name for text in sources for name in re.findall(REGISTERED, text, re.MULTILINE)]
    offered.remove('CPUDistributedDataParallel')  # MMEngine asks for a class, and our tools import it
    assert len(offered) > 18
    assert json.loads(run(sys.executable, '-c', DOWNSTREAM, cwd=tmp_path, env=env).splitlines()[-1]) == dict(
        package=str(site / 'mmlinattn' / '__init__.py'),
        neck='PAFPN',
        classes=[2, 2],
        frozen=[False, True, True, True],
        registered=sorted(offered),  # by the import alone
    )
    assert '--resume' in run(site / 'bin' / 'mmlinattn', 'train', '--help', cwd=tmp_path, env=env)
    folder = str(site / 'mmlinattn' / '.mim' / 'tools')
    assert folder in run(sys.executable, '-m', 'mmlinattn', '--help', cwd=tmp_path, env=env)
    (line,) = re.findall(r'^python (-c .*)', (ROOT / 'docs' / 'install.md').read_text(encoding='utf-8'), re.M)
    assert run(sys.executable, *shlex.split(line), cwd=tmp_path, env=env).strip() == folder


@pytest.mark.slow
def test_tools_of_a_checkout_run_beside_a_wheel(installed, tmp_path):
    """Take package and configs of the checkout, not of the wheel, as in README's install with pip."""
    pytest.importorskip('mmdet')
    checkout, site = shutil.copytree(installed[0], tmp_path / 'checkout'), installed[2]
    marked = checkout / 'configs' / 'mmdet' / 'ravlt_shapes_quickstart.py'
    marked.write_text(marked.read_text() + '\ntrain_cfg.update(max_epochs=1, val_interval=1)\nmark = "checkout"\n')
    env = {**CLEAN, 'PYTHONPATH': str(site), 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
    shapes = ('shapes', '--format', 'coco', '--num-train', '4', '--num-val', '2')
    run(sys.executable, 'checkout/tools/make_shapes_dataset.py', *shapes, cwd=tmp_path, env=env)
    (tmp_path / 'mine.py').write_text("_base_ = 'mmlinattn::mmdet/ravlt_shapes_quickstart.py'\n")
    train = ('checkout/tools/train.py', 'mine.py', '--data-root', 'shapes')
    run(sys.executable, *train, cwd=tmp_path, env=env)
    work_dir = tmp_path / 'work_dirs' / 'mine'
    assert "mark = 'checkout'" in (work_dir / 'mine.py').read_text() and (work_dir / 'epoch_1.pth').is_file()


def requirements(name: str) -> list:
    lines = (ROOT / 'requirements' / f'{name}.txt').read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith('#')]


def pins(name: str, python: str = '3.11') -> dict:
    locked = {}
    machine = dict(
        python_version=python, python_full_version=f'{python}.0', sys_platform='linux', platform_machine='x86_64'
    )
    for requirement in requirements(name):
        (specifier,) = requirement.specifier
        assert specifier.operator in ('==', '==='), str(requirement)
        if requirement.marker is None or requirement.marker.evaluate(machine):
            assert canonicalize_name(requirement.name) not in locked
            locked[canonicalize_name(requirement.name)] = specifier.version
    return locked


@pytest.mark.parametrize(
    ('lock', 'pythons'),
    [
        ('lock', ['3.10', '3.11', '3.12', '3.13', '3.14']),
        ('lock-onedl', ['3.10', '3.14']),
        ('lock-oldest', ['3.10']),
        ('lock-newest', ['3.11', '3.14']),
    ],
)
def test_lock_pins_every_requirement_within_its_range(lock, pythons):
    for python in pythons:
        locked = pins(lock, python)
        for group in ('runtime', 'mminstall', 'tests'):
            for requirement in requirements(group):
                name = canonicalize_name(requirement.name)
                if name.startswith('mm') and lock == 'lock-onedl':
                    assert name not in locked and ONEDL[name.replace('-lite', '')] in locked
                else:
                    assert requirement.specifier.contains(locked[name]), (python, name)
    # a local build (2.14.1+cpu) satisfies '==' and does not work with PyPI's torchvision
    text = (ROOT / 'requirements' / f'{lock}.txt').read_text()
    assert not re.search(r'^torch(vision)?==[^=]', text, re.M)


def test_oldest_lock_is_the_lower_bounds():
    locked = pins('lock-oldest', '3.10')
    for requirement in requirements('runtime') + requirements('mminstall'):
        for specifier in requirement.specifier:
            assert specifier.operator != '>=' or locked[canonicalize_name(requirement.name)] == specifier.version
