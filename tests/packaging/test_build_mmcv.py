# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/build_mmcv.py: which files it joins, what it keeps, what it refuses. A stand-in plays pip."""

import importlib.util
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TOOL = Path(__file__).resolve().parents[2] / 'tools' / 'build_mmcv.py'
PYTORCH = 'mmcv/ops/csrc/pytorch'
FILES = [f'{PYTORCH}/{name}' for name in ('nms.cpp', 'pybind.cpp', 'roi_align.cpp', 'cpu/nms.cpp', 'cpu/psamask.cpp')]


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location('build_mmcv', TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv('MAX_JOBS', '2')
    module.calls = []
    module.seen = {}

    def pip(*arguments, **environment):
        module.calls.append((arguments, environment))
        if arguments[0] == 'download':
            folder = Path(arguments[arguments.index('-d') + 1])
            folder.mkdir()
            with tarfile.open(folder / 'mmcv-2.1.0.tar.gz', 'w:gz') as archive:
                for name in module.files:
                    text = f'// {name}\n'.encode()
                    member = tarfile.TarInfo(f'mmcv-2.1.0/{name}')
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text))
        elif arguments[0] == 'wheel':
            root = Path(arguments[-1])
            module.seen.update({str(file.relative_to(root)): file.read_text() for file in root.rglob('*.cpp')})
            folder = Path(arguments[arguments.index('-w') + 1])
            folder.mkdir()
            tag = f'cp{sys.version_info.major}{sys.version_info.minor}'
            (folder / f'mmcv-2.1.0-{tag}-{tag}-linux_x86_64.whl').write_text('built')

    module.real_pip = module.pip
    module.pip = pip
    module.files = FILES
    return module


def run(tool, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, 'argv', ['build_mmcv.py', *map(str, arguments)])
    tool.main()
    return Path(capsys.readouterr().out.strip())


def test_joins_what_chooses_and_leaves_what_computes(tool, monkeypatch, capsys, tmp_path):
    wheel = run(tool, monkeypatch, capsys, 'mmcv==2.1.0', '--wheels', tmp_path)
    assert wheel.read_text() == 'built' and wheel.parent.name == f'mmlinattn-torch-{torch.__version__}'
    joined = {name: text for name, text in tool.seen.items() if 'joined' in name}
    assert sorted(joined) == [f'{PYTORCH}/joined_0.cpp', f'{PYTORCH}/joined_1.cpp']
    lines = sorted(line for text in joined.values() for line in text.splitlines())
    assert lines == ['#include "nms.inc"', '#include "pybind.inc"', '#include "roi_align.inc"']
    others = {name: text for name, text in tool.seen.items() if 'joined' not in name}
    assert others == {name: f'// {name}\n' for name in FILES if '/cpu/' in name}
    environment = tool.calls[-1][1]
    assert environment['MMCV_WITH_OPS'] == '1' and environment['CUDA_VISIBLE_DEVICES'] == ''
    assert environment['FORCE_CUDA'] == '0'


def test_builds_once_for_each_pytorch(tool, monkeypatch, capsys, tmp_path):
    first = run(tool, monkeypatch, capsys, 'mmcv==2.1.0', '--wheels', tmp_path)
    count = len(tool.calls)
    assert run(tool, monkeypatch, capsys, 'mmcv==2.1.0', '--wheels', tmp_path) == first
    assert len(tool.calls) == count
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    monkeypatch.setattr(torch, '__version__', '9.9.9')
    assert run(tool, monkeypatch, capsys, 'mmcv==2.1.0', '--wheels', tmp_path) != first
    assert len(tool.calls) == 2 * count


def test_another_layout_of_the_sources_is_refused(tool, monkeypatch, capsys, tmp_path):
    tool.files = ['src/nms.cpp']
    with pytest.raises(SystemExit, match='has its sources elsewhere'):
        run(tool, monkeypatch, capsys, 'mmcv==2.1.0', '--wheels', tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('requirement', ['mmcv', 'mmcv>=2.1', 'mmcv=='])
def test_a_version_has_to_be_named(tool, monkeypatch, capsys, requirement):
    with pytest.raises(SystemExit):
        run(tool, monkeypatch, capsys, requirement)
    assert f"requirement is '{requirement}'" in capsys.readouterr().err


def test_what_pip_is_asked_for(tool, monkeypatch, capsys, tmp_path):
    """Sources without what they need, and a wheel that pip keeps nowhere; a joined file a job, four at most."""
    for jobs, parts in (('9', 4), ('', 1)):
        monkeypatch.setenv('MAX_JOBS', jobs)
        monkeypatch.setattr(tool.os, 'cpu_count', lambda: 1)
        tool.calls.clear()
        tool.seen.clear()
        wheel = run(tool, monkeypatch, capsys, 'mmcv==2.1.0', '--wheels', tmp_path / jobs)
        (download, _), (built, environment) = tool.calls
        source, wheels, root = Path(download[6]), Path(built[5]), Path(built[6])
        assert download == (
            *('download', '--no-deps', '--no-build-isolation', '--no-binary', 'mmcv', '-d', str(source)),
            'mmcv==2.1.0',
        )
        assert built == (
            *('wheel', '--no-deps', '--no-build-isolation', '--no-cache-dir', '-w', str(wheels)),
            str(root),
        )
        assert environment == dict(
            CFLAGS='-O1 -g0', MMCV_WITH_OPS='1', MAX_JOBS=jobs or '1', CUDA_VISIBLE_DEVICES='', FORCE_CUDA='0'
        )
        assert len([name for name in tool.seen if 'joined' in name]) == parts
        assert wheel.parent.parent == tmp_path / jobs and not root.exists()  # nothing else is left behind


def test_wheels_that_are_there(tool, monkeypatch, capsys, tmp_path):
    """In pip's cache unless told otherwise; of this Python, this PyTorch, this name and version."""
    asked = []
    monkeypatch.setattr(tool, 'pip', lambda *arguments: asked.append(arguments) or str(tmp_path))
    kept = tmp_path / f'mmlinattn-torch-{torch.__version__}'
    kept.mkdir()
    tag = f'cp{sys.version_info.major}{sys.version_info.minor}'
    for name in (f'onedl_mmcv-2.3.6-{tag}-{tag}-linux_x86_64.whl', f'onedl_mmcv-2.3.6-{tag}-{tag}-a.whl'):
        (kept / name).touch()
    for other in ('onedl_mmcv-2.3.6-cp99-cp99-z.whl', f'mmcv-2.3.6-{tag}-z.whl', f'onedl_mmcv-2.3.7-{tag}-z.whl'):
        (kept / other).touch()
    found = run(tool, monkeypatch, capsys, 'onedl-mmcv==2.3.6')
    assert found == kept / f'onedl_mmcv-2.3.6-{tag}-{tag}-linux_x86_64.whl' and asked == [('cache', 'dir')]
    found = run(tool, monkeypatch, capsys, 'mmcv==2.3.6', '--wheels', tmp_path)
    assert found == kept / f'mmcv-2.3.6-{tag}-z.whl' and len(asked) == 1


def test_how_pip_is_run(tool, monkeypatch):
    calls, done = [], SimpleNamespace(returncode=0, stdout=' /cache \n')
    monkeypatch.setattr(tool.subprocess, 'run', lambda command, **options: calls.append((command, options)) or done)
    monkeypatch.setenv('OF_THE_USER', 'yes')
    assert tool.real_pip('cache', 'dir') == '/cache'
    done.stdout = None
    assert tool.real_pip('wheel', 'x', CFLAGS='-O1') == ''
    (query, of_query), (command, options) = calls
    pip = [sys.executable, '-m', 'pip']
    assert query == [*pip, 'cache', 'dir'] and command == [*pip, 'wheel', 'x']
    assert of_query['stdout'] is subprocess.PIPE and options['stdout'] is sys.stderr and of_query['text'] is True
    assert options['env']['CFLAGS'] == '-O1' and options['env']['OF_THE_USER'] == 'yes' and 'CFLAGS' not in os.environ
    done.returncode = 1
    assert tool.real_pip('cache', 'dir') == ''  # pip may have none
    with pytest.raises(SystemExit) as end:
        tool.real_pip('wheel', 'x')
    assert end.value.code == 'build_mmcv: `pip wheel x` failed, see above'
