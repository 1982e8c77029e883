# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Side effects of ``import mmlinattn``."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
from helpers.config_helpers import ROOT
from mmengine.registry import HOOKS

from mmlinattn import registry


def test_importing_the_package_warns_of_nothing_and_leaves_upstream_alone():
    late = ('mmdet', 'mmseg', 'mmpretrain', 'pandas', 'mmlinattn.engine')
    code = f'import sys, mmlinattn; print([m for m in {late} if m in sys.modules])'
    # MMEngine calls `re.split(pattern, docstring, 1)`, deprecated in Python 3.13
    allowed = "ignore:'maxsplit' is passed as positional:DeprecationWarning"
    command = [sys.executable, '-W', 'error', '-W', allowed, '-c', code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.strip() == '[]'


@pytest.mark.parametrize('name', ['ops', 'layers', 'attention', 'backbones', 'necks', 'checkpoints', 'engine'])
def test_every_imported_name_is_exported(name):
    module = import_module(f'mmlinattn.{name}')
    names = [key for key, value in vars(module).items() if key[0] != '_' and not inspect.ismodule(value)]
    assert sorted(names) == sorted(module.__all__)


def test_names_of_late_modules_become_their_classes():
    for path, (root, names) in registry.LATE.items():
        module = import_module(f'mmlinattn.{path}')
        assert all(root.get(name) is getattr(module, name) for name in names)
    ours = {name for name, kind in HOOKS.module_dict.items() if getattr(kind, '__module__', '')[:9] == 'mmlinattn'}
    assert ours == {*registry.LATE['engine.hooks'][1]}
    build = registry._builder('engine.hooks', 'StopHook')
    assert inspect.isfunction(build) and build(interval=3).interval == 3
