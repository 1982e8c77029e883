# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What a wheel, a source archive and an editable install contain, and which versions are pinned."""

import email
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
VERSION = runpy.run_path(str(ROOT / 'mmlinattn' / 'version.py'))['__version__']
ONEDL = {
    'mmengine': 'onedl-mmengine',
    'mmcv': 'onedl-mmcv',
    'mmdet': 'onedl-mmdetection',
    'mmsegmentation': 'onedl-mmsegmentation',
    'mmpretrain': 'onedl-mmpretrain',
}
# Of another checkout, which would come before what is installed.
CLEAN = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
# Loads a config that inherits one of ours by its package name, from wherever mmlinattn is found.
INHERIT = """
import json, mmlinattn
from mmengine.config import Config
config = Config.fromfile('child.py')
print(json.dumps(dict(package=mmlinattn.__file__, answer=config.answer)))
"""


def run(*command, cwd, env=CLEAN) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def inherit(python, folder: Path, **kwargs) -> dict:
    folder.mkdir(exist_ok=True)
    (folder / 'child.py').write_text("_base_ = 'mmlinattn::mmdet/packaging_probe.py'\n")
    return json.loads(run(python, '-c', INHERIT, cwd=folder, **kwargs).splitlines()[-1])


@pytest.fixture
def checkout(tmp_path):
    """A copy of what packaging reads, with one more config that needs no upstream package."""
    copy = tmp_path / 'checkout'
    copy.mkdir()
    ignore = shutil.ignore_patterns('__pycache__', '.mim', '*.egg-info')
    for name in ('mmlinattn', 'configs', 'tools', 'projects', 'requirements'):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, copy)
    (copy / 'configs' / 'mmdet').mkdir(exist_ok=True)
    (copy / 'configs' / 'mmdet' / 'packaging_probe.py').write_text('answer = 42\n')
    return copy


@pytest.fixture
def wheel(checkout, tmp_path):
    leftover = checkout / 'build' / 'lib' / 'mmlinattn' / '.mim' / 'configs' / 'deleted.py'
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    pip = (sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation')
    run(*pip, '-w', str(tmp_path / 'wheels'), '.', cwd=checkout)
    return next((tmp_path / 'wheels').glob('mmlinattn-*.whl'))


def test_wheel(wheel, checkout, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}

    # Configs, tools, projects and index: all of them, as they are, and nothing that was deleted since.
    expected = {'model-index.yml': (checkout / 'model-index.yml').read_bytes()}
    for folder in ('configs', 'tools', 'projects'):
        for path in (checkout / folder).rglob('*'):
            if path.is_file() and not {'tests', 'results'} & set(path.parts):
                expected[path.relative_to(checkout).as_posix()] = path.read_bytes()
    prefix = 'mmlinattn/.mim/'
    mim = {name[len(prefix) :]: data for name, data in content.items() if name.startswith(prefix)}
    assert mim == expected
    for path in yaml.safe_load(mim['model-index.yml'])['Import']:
        assert path in mim

    # Modules and the tables that they read.
    for path in (checkout / 'mmlinattn').rglob('*'):
        if path.suffix in ('.py', '.csv', '.json') and '.mim' not in path.parts:
            assert path.relative_to(checkout).as_posix() in content

    metadata = email.message_from_bytes(content[f'mmlinattn-{VERSION}.dist-info/METADATA'])
    assert metadata['Version'] == VERSION
    assert metadata['Requires-Python'] == '>=3.9'
    assert 'Apache-2.0' in (metadata['License'], metadata['License-Expression'])
    assert {'mim', 'tests', 'all'} <= set(metadata.get_all('Provides-Extra'))
    required = [Requirement(line) for line in metadata.get_all('Requires-Dist')]
    always = {requirement.name for requirement in required if requirement.marker is None}
    assert always == {'torch', 'einops', 'filelock', 'numpy'}

    # Installed elsewhere, its configs are found by name.
    site = tmp_path / 'site'
    pip = (sys.executable, '-m', 'pip', 'install', '--no-deps', '--target', str(site))
    run(*pip, str(wheel), cwd=tmp_path)
    found = inherit(sys.executable, tmp_path / 'project', env={**CLEAN, 'PYTHONPATH': str(site)})
    assert found == {'package': str(site / 'mmlinattn' / '__init__.py'), 'answer': 42}


def test_editable_install_uses_the_configs_of_the_checkout(checkout, tmp_path):
    venv = tmp_path / 'venv'
    run(sys.executable, '-m', 'venv', '--without-pip', str(venv), cwd=tmp_path)
    python = str(venv / 'bin' / 'python')
    where = 'import sysconfig; print(sysconfig.get_path("purelib"))'
    inner = Path(run(python, '-c', where, cwd=tmp_path).strip())
    # All of this environment but its own mmlinattn: the import hooks of a nested folder stay off.
    (inner / 'outer.pth').write_text(run(sys.executable, '-c', where, cwd=tmp_path))
    pip = (sys.executable, '-m', 'pip', '--python', python, 'install', '--no-build-isolation')
    run(*pip, '--no-deps', '--ignore-installed', '-e', str(checkout), cwd=tmp_path)

    (checkout / 'configs' / 'mmdet' / 'packaging_probe.py').write_text('answer = 43\n')
    found = inherit(python, tmp_path / 'project')
    assert found == {'package': str(checkout / 'mmlinattn' / '__init__.py'), 'answer': 43}
    for name in ('configs', 'tools', 'projects', 'model-index.yml'):
        assert (checkout / 'mmlinattn' / '.mim' / name).resolve() == checkout / name


def test_source_archive_holds_all_that_the_build_reads(checkout):
    code = 'from setuptools.build_meta import build_sdist; print(build_sdist("."))'
    name = run(sys.executable, '-c', code, cwd=checkout).splitlines()[-1]
    with tarfile.open(checkout / name) as archive:
        names = {member.name.partition('/')[2] for member in archive if member.isfile()}
    expected = {'setup.py', 'LICENSE', 'model-index.yml', 'requirements/runtime.txt'}
    expected |= {'configs/mmdet/packaging_probe.py', 'tools/setup_env.sh', 'pyproject.toml'}
    expected |= {'projects/studies/main.py'}
    assert expected <= names


def test_version_is_read_without_importing_the_package():
    code = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['mmlinattn'] = None;"
        "sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py', run_name='__main__')"
    )
    assert run(sys.executable, '-c', code, cwd=ROOT).splitlines()[-1] == VERSION


def requirements(name: str) -> list:
    lines = (ROOT / 'requirements' / f'{name}.txt').read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith('#')]


def pins(name: str) -> dict:
    locked = {}
    for requirement in requirements(name):
        (specifier,) = requirement.specifier
        assert specifier.operator in ('==', '==='), str(requirement)
        locked[canonicalize_name(requirement.name)] = specifier.version
    return locked


@pytest.mark.parametrize('group', ['runtime', 'mminstall', 'tests'])
def test_lock_pins_every_requirement_within_its_range(group):
    locked = pins('lock')
    for requirement in requirements(group):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])


def test_locks_hold_one_stack_each_on_the_same_torch():
    openmmlab, onedl = pins('lock'), pins('lock-onedl')
    assert set(ONEDL) <= set(openmmlab) and not set(ONEDL.values()) & set(openmmlab)
    assert set(ONEDL.values()) <= set(onedl) and not set(ONEDL) & set(onedl)
    for requirement in requirements('runtime') + requirements('tests'):
        assert canonicalize_name(requirement.name) in onedl
    for name in ('torch', 'torchvision', 'ruff', 'pytest'):
        assert openmmlab[name] == onedl[name]
    # A local build (2.11.0+cpu) satisfies '==' and does not work with PyPI's torchvision.
    for name in ('lock', 'lock-onedl'):
        text = (ROOT / 'requirements' / f'{name}.txt').read_text()
        assert re.search(r'^torch===', text, re.M) and re.search(r'^torchvision===', text, re.M)


def test_python_3_9_has_what_is_called():
    """Its syntax is looked at by ruff; ``zip`` has no ``strict`` there."""
    for path in [path for name in ('mmlinattn', 'tools') for path in (ROOT / name).rglob('*.py')]:
        assert not re.search(r'\bzip\(.*strict=', path.read_text(encoding='utf-8')), path
