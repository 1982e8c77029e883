# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Incomplete environments: one line with the module and the command, before anything is trained."""

import sys

import pytest
import torch
from mmengine.config import Config

from mmlinattn.tooling import environment, running
from mmlinattn.tooling.configs import read_config
from mmlinattn.utils.errors import RunError


@pytest.fixture
def no_operators(monkeypatch):
    """Hide MMCV's operators from this process, as mmcv-lite alone lacks them."""
    for name in [name for name in sys.modules if name == 'mmcv.ops' or name.startswith('mmcv.ops.')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'mmcv._ext', None)


def test_config_of_a_detector_says_that_mmcv_has_no_operators(no_operators, tmp_path):
    pytest.importorskip('mmdet')
    (tmp_path / 'config.py').write_text("default_scope = 'mmdet'\n")
    with pytest.raises(RunError, match=r'needs mmdet: mmcv.ops does not work .*: pip install \S*mmcv_ops$'):
        read_config(str(tmp_path / 'config.py'))


INCOMPATIBLE = AssertionError('MMCV==2.2.0 is used but incompatible')
OTHER = {'mmcv-lite': '2.1.0', 'onedl-mmcv': '2.3.6'}
ONEDL = {**OTHER, 'onedl-mmdetection': '3.5.1'}
TORCH = 'pip uninstall -y torch && pip install torch torchvision "setuptools>=77,<82"'


@pytest.mark.parametrize(
    ('installed', 'module', 'error', 'command'),
    [
        ({}, 'mmseg', ModuleNotFoundError("No module named 'ftfy'", name='ftfy'), 'pip install ftfy'),
        ({}, 'mmengine', ModuleNotFoundError('x', name='pkg_resources'), 'pip install "setuptools>=77,<82"'),
        ({}, 'mmcv', AttributeError("module 'pkgutil' has no attribute 'find_loader'"), 'pip install {ops}'),
        ({}, 'mmpretrain.models', ModuleNotFoundError("No module named 'x'", name='x.y'), 'pip install x'),
        ({}, 'mmdet.models', ImportError('cannot import name'), '{alone} "mmdet>=3.3,<3.4"'),
        ({'mmcv': '2.2.0'}, 'mmdet.models', INCOMPATIBLE, 'pip uninstall -y mmcv && {lite} {ops}'),
        ({'mmcv-lite': '2.2.0'}, 'mmdet.models', INCOMPATIBLE, '{lite} {ops}'),
        (dict(OTHER, mmdet='3.3.0'), 'mmcv.ops', ImportError('_ext'), 'pip uninstall -y onedl-mmcv && {lite} {ops}'),
        (ONEDL, 'mmcv.ops', ImportError('_ext'), 'pip uninstall -y mmcv-lite && {alone} onedl-mmcv {ops}'),
        ({'transformers': '4.57.1'}, 'mmdet.models', ImportError('moved'), 'pip install "transformers>=4.28,<4.52"'),
        (
            {'torch': '2.14.1+cu126', 'torchvision': '0.28.0'},
            'mmcv.ops',
            RuntimeError('operator torchvision::nms does not exist'),
            'pip uninstall -y torchvision && '
            'pip install torchvision torch==2.14.1+cu126 --index-url https://download.pytorch.org/whl/cu126',
        ),
        ({'torch': '2.14.1'}, 'torch', OSError('libtorch.so'), TORCH),
    ],
)
def test_line_names_the_part_and_the_command(monkeypatch, installed, module, error, command):
    monkeypatch.setattr(environment, '_version', lambda name: installed.get(name, ''))
    alone, ops = 'pip install --force-reinstall --no-deps', environment.PIP['mmcv._ext']
    command = command.format(alone=alone, lite=f'{alone} "mmcv-lite>=2.1,<2.2"', ops=ops)
    line = f'{module} does not work in {sys.executable}: {error}; mend it with: {command}'
    assert environment.describe_failure(module, error) == line


@pytest.mark.parametrize(
    ('version', 'is_outside'), [('1.25.2', True), ('1.26', False), ('1.26.0rc1', False), ('2.5.5', False), ('', False)]
)
def test_versions_are_those_of_the_requirements(monkeypatch, version, is_outside):
    monkeypatch.setattr(environment, '_version', lambda name: version)
    assert environment._is_outside_range('numpy') is is_outside
    assert {'torch': '>=2.4', 'mmcv-lite': '>=2.1,<2.2'}.items() <= environment.ACCEPTED.items()


def test_several_causes_are_one_command(monkeypatch):
    def use(module):
        if module in ('numpy', 'cv2', 'mmcv', 'mmdet.models', 'ftfy'):
            name = 'cv2' if module in ('cv2', 'mmcv') else module.partition('.')[0]
            raise (ImportError if name == 'cv2' else ModuleNotFoundError)(f'no {name}', name=name)
        if module == 'mmseg.models':
            raise ValueError('a consequence')

    monkeypatch.setattr(environment, 'use', use)
    monkeypatch.setattr(environment, '_version', lambda name: '4.9' if name == 'opencv-python' else '')
    *lines, last = environment.check([*environment.WHOLE])
    assert [line.split()[0] for line in lines] == ['numpy', 'cv2', 'ftfy', 'mmdet.models']
    assert last.startswith(
        'mend all with: pip uninstall -y opencv-python && pip install numpy opencv-python-headless f'
    )


def test_one_cause_is_one_line(monkeypatch):
    def use(module):
        raise ImportError('libGL.so.1: cannot open shared object file', name='cv2')

    monkeypatch.setattr(environment, 'use', use)
    (line,) = environment.check(('cv2', 'mmcv', 'mmdet.models'))
    assert line.startswith('cv2 ') and line.endswith(' && pip install opencv-python-headless')


def test_gpu_without_operators_raises_before_training(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip('the GPU has them')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(running, 'get_device', lambda: 'cuda')
    monkeypatch.setattr(running, 'prepare_distributed', lambda cfg: None)
    with pytest.raises(RunError, match='NMS and RoIAlign do not run on the GPU .* mend it with: pip '):
        running.build_runner(Config(dict(default_scope='mmdet')))


@pytest.mark.parametrize(
    ('name', 'value', 'line'),
    [
        *(('MMLINATTN_OPS', value, '') for value in ('', 'auto', 'reference')),
        ('MMLINATTN_OPS', 'triton', "MMLINATTN_OPS='triton': expected 'auto' or 'reference'; --compile replaces"),
        *(('MMLINATTN_KEEP_MEMORY', value, '') for value in ('', '0', '1')),
        ('MMLINATTN_KEEP_MEMORY', 'maybe', "MMLINATTN_KEEP_MEMORY='maybe': expected '0' or '1'"),
    ],
)
def test_refused_values_of_variables(monkeypatch, name, value, line):
    monkeypatch.setenv(name, value)
    assert environment.refused().startswith(line) and bool(environment.refused()) == bool(line)
