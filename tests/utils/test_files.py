# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import os
from pathlib import Path

import pytest

from mmlinattn.utils import atomic_write, files, project_files


def test_files_of_an_installation_come_first(tmp_path, monkeypatch):
    package = tmp_path / 'site' / 'mmlinattn'
    monkeypatch.setattr(files, 'PACKAGE', package)
    with pytest.raises(FileNotFoundError) as found:
        project_files('tools')
    assert str(found.value) == (
        f'tools is neither in {package}/.mim nor in {tmp_path}/site: install mmlinattn with pip'
    )
    (tmp_path / 'site' / 'tools').mkdir(parents=True)
    assert project_files('tools') == tmp_path / 'site' / 'tools'
    (package / '.mim' / 'tools').mkdir(parents=True)
    assert project_files('tools') == package / '.mim' / 'tools'


def test_a_checkout_gets_the_links_that_mmengine_reads(tmp_path, monkeypatch):
    package = tmp_path / 'mmlinattn'
    monkeypatch.setattr(files, 'PACKAGE', package)
    package.mkdir()
    files.link_checkout()  # a package without configs beside it
    assert not (package / '.mim').exists()
    (tmp_path / 'configs' / 'mmdet').mkdir(parents=True)
    (tmp_path / 'model-index.yml').touch()
    for _ in range(2):
        files.link_checkout()
        assert (package / '.mim' / 'configs' / 'mmdet').is_dir() and (package / '.mim' / 'model-index.yml').is_file()


def test_a_file_gets_its_name_when_it_is_on_the_disk(tmp_path, monkeypatch):
    target, steps = tmp_path / 'a.bin', []
    replace = os.replace
    monkeypatch.setattr(os, 'fsync', lambda fd: steps.append(Path(f'/proc/self/fd/{fd}').read_bytes()))
    monkeypatch.setattr(os, 'replace', lambda *paths: steps.append(tuple(map(str, paths))) or replace(*paths))
    with atomic_write(target) as file:
        file.write(b'whole')
        (written,) = tmp_path.glob('a.bin.*.part')  # of a name of its own
        assert not target.exists()
    assert steps == [b'whole', (str(written), str(target))] and target.read_bytes() == b'whole'
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), atomic_write(target) as file:
            file.write(b'broken')
            raise error
        assert target.read_bytes() == b'whole' and os.listdir(tmp_path) == ['a.bin']
    with pytest.raises(OSError), atomic_write(tmp_path / 'no' / 'a.bin'):
        raise AssertionError
