# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/build_mmcv.py: which files it joins, what it keeps, what it refuses. A stand-in plays pip's process."""

import io
import os
import runpy
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
TAG = f'cp{sys.version_info.major}{sys.version_info.minor}'


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """What pip was called with, and the sources that it built; ``pip.cache`` is its cache folder."""
    seen = SimpleNamespace(calls=[], sources={}, files=FILES, cache=tmp_path, fails=False, root=None)

    def run(command, stdout, text, env):
        assert command[:3] == [sys.executable, '-m', 'pip'] and env['PATH'] == os.environ['PATH']
        action, *words = command[3:]
        seen.calls.append(words)
        if action == 'cache':
            assert stdout == subprocess.PIPE
            return SimpleNamespace(returncode=seen.fails, stdout='' if seen.fails else f' {seen.cache} \n')
        assert stdout is sys.stderr and {'--no-deps', '--no-build-isolation'} <= set(words)
        if action == 'download':
            assert words[words.index('--no-binary') + 1] == words[-1].partition('==')[0]
            folder = Path(words[words.index('-d') + 1])
            folder.mkdir()
            with tarfile.open(folder / 'mmcv-2.1.0.tar.gz', 'w:gz') as archive:
                for name in seen.files:
                    member = tarfile.TarInfo(f'mmcv-2.1.0/{name}')
                    member.size = len(name)
                    archive.addfile(member, io.BytesIO(name.encode()))
        else:
            assert action == 'wheel' and '--no-cache-dir' in words
            seen.root, seen.env = Path(words[-1]), env
            seen.sources = {str(file.relative_to(seen.root)): file.read_text() for file in seen.root.rglob('*.cpp')}
            folder = Path(words[words.index('-w') + 1])
            folder.mkdir()
            (folder / f'mmcv-2.1.0-{TAG}-{TAG}-linux_x86_64.whl').write_text('built')
        return SimpleNamespace(returncode=seen.fails, stdout=None)

    monkeypatch.setattr(subprocess, 'run', run)
    return seen


@pytest.fixture
def built(pip, monkeypatch, capsys):
    """Run the tool; the wheel it names."""

    def run(*words):
        monkeypatch.setattr(sys, 'argv', ['build_mmcv.py', *map(str, words)])
        runpy.run_path(str(TOOL), run_name='__main__')
        return Path(capsys.readouterr().out.strip())

    return run


@pytest.mark.parametrize(('jobs', 'parts'), [('2', 2), ('9', 4), ('', 1)])
def test_joins_what_chooses_and_leaves_what_computes(built, pip, monkeypatch, tmp_path, jobs, parts):
    """A joined file a job, four at most; nothing but the wheel is left behind."""
    monkeypatch.setenv('MAX_JOBS', jobs)
    monkeypatch.setattr('os.cpu_count', lambda: 1)
    wheel = built('mmcv==2.1.0', '--wheels', tmp_path)
    assert wheel.read_text() == 'built' and wheel.parent == tmp_path / f'mmlinattn-torch-{torch.__version__}'
    joined = {name: text for name, text in pip.sources.items() if 'joined' in name}
    assert sorted(joined) == [f'{PYTORCH}/joined_{i}.cpp' for i in range(parts)]
    lines = sorted(line for text in joined.values() for line in text.splitlines())
    assert lines == ['#include "nms.inc"', '#include "pybind.inc"', '#include "roi_align.inc"']
    others = {name: text for name, text in pip.sources.items() if name not in joined}
    assert others == {name: name for name in FILES if '/cpu/' in name}
    flags = dict(CFLAGS='-O1 -g0', MMCV_WITH_OPS='1', MAX_JOBS=jobs or '1', CUDA_VISIBLE_DEVICES='', FORCE_CUDA='0')
    assert {key: pip.env[key] for key in flags} == flags and not pip.root.exists()
    assert [path.name for path in wheel.parent.iterdir()] == [wheel.name]


def test_a_wheel_is_kept_for_its_pytorch(built, pip, monkeypatch):
    """In pip's cache unless told otherwise; of this Python, this PyTorch, this name and version."""
    first = built('mmcv==2.1.0')
    assert first.parent.parent == pip.cache and len(pip.calls) == 3
    for other in ('mmcv-2.1.0-cp99-z.whl', f'onedl_mmcv-2.1.0-{TAG}-z.whl', f'mmcv-2.1.1-{TAG}-z.whl'):
        (first.parent / other).touch()
    assert built('mmcv==2.1.0') == built('mmcv==2.1.0', '--wheels', pip.cache) == first and len(pip.calls) == 4
    assert built('onedl-mmcv==2.1.0').name == f'onedl_mmcv-2.1.0-{TAG}-z.whl'
    monkeypatch.setattr(torch, '__version__', '9.9.9')
    assert built('mmcv==2.1.0') != first


def test_what_cannot_be_built(built, pip, tmp_path, capsys):
    for requirement in ('mmcv', 'mmcv>=2.1', 'mmcv=='):
        with pytest.raises(SystemExit):
            built(requirement)
        assert f"requirement is '{requirement}'" in capsys.readouterr().err
    pip.files = ['src/nms.cpp']
    with pytest.raises(SystemExit, match='has its sources elsewhere'):
        built('mmcv==2.1.0', '--wheels', tmp_path)
    pip.fails = True
    with pytest.raises(SystemExit, match='^build_mmcv: `pip download .* mmcv==2.1.0` failed, see above$'):
        built('mmcv==2.1.0')
    assert not list(tmp_path.iterdir())
