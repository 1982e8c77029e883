# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``mmlinattn://NAME`` of the released table: from the cache, else from the authors' link, whole or not at all."""

import socket

import pytest
from helpers.checkpoint_helpers import released_ravlt, saved
from mmengine.runner import CheckpointLoader

from mmlinattn.checkpoints import CheckpointError, download, find_released, released, released_checkpoints

LOAD = CheckpointLoader.load_checkpoint
WHOLE = saved({'model': released_ravlt()})


def link_to(root, monkeypatch):
    entries = released_checkpoints().items()
    table = {name: entry._replace(link=f'{root}/{entry.name}/?dl=1') for name, entry in entries}
    monkeypatch.setattr(released, 'released_checkpoints', lambda: table)


@pytest.fixture
def server(server, monkeypatch):
    link_to(server.root, monkeypatch)
    return server


def serve(server, name, *reply) -> str:
    server.replies[f'/{name}/?dl=1'] = reply
    return f'mmlinattn://{name}'


def error_line(name) -> str:
    """Return the error for a name that cannot be fetched, with link and path; no file is left."""
    entry = find_released(name.rpartition('/')[2])
    with pytest.raises(CheckpointError) as caught:
        LOAD(name, 'cpu')
    line = str(caught.value)
    assert line.isprintable() and entry.link in line and line.endswith(f'put it at {entry.path}')
    return line


def test_first_download_then_the_cache(server):
    name = serve(server, 'ravlt_t', 200, WHOLE)
    first, second, whole = (LOAD(name, 'cpu')['state_dict'] for name in (name, name, f'{name}_in1k'))
    assert len(server.requests) == 1 and server.kept() == ['RAVLT_T.pth']
    assert first.keys() == second.keys() and not any(key.startswith(('head', 'neck', 'layers')) for key in first)
    assert {f'backbone.{key}' for key in first} == {key for key in whole if key.startswith('backbone.')}
    assert any(key.startswith('head.') for key in whole)


def test_a_link_of_the_table_is_converted_as_well(server):
    serve(server, 'ravlt_t_in1k', 200, WHOLE)
    found = LOAD(f'{server.root}/ravlt_t_in1k/?dl=1#/RAVLT_T.pth', 'cpu')
    assert 'head.fc.weight' in found['state_dict'] and server.kept() == ['RAVLT_T.pth']


@pytest.mark.parametrize('slash', ['', '/'])
def test_a_mirror_of_hugging_face(server, monkeypatch, slash):
    link_to(download.HUB, monkeypatch)
    monkeypatch.setenv('HF_ENDPOINT', server.root + slash)
    name = serve(server, 'ravlt_t', 200, WHOLE)
    state = LOAD(name, 'cpu')['state_dict']
    assert state.keys() == LOAD(name, 'cpu')['state_dict'].keys() and len(server.requests) == 1
    whole = LOAD(f'{server.root}/ravlt_t_in1k/?dl=1', 'cpu')['state_dict']  # the file is cached
    assert 'head.fc.weight' in whole and len(server.requests) == 1
    link = download.mirrored('https://example.com/ravlt.pth')  # of the authors' own servers
    assert link == 'https://example.com/ravlt.pth'


@pytest.mark.parametrize('value', ['1', 'true', 'ON', '0', ''])
def test_without_network_only_cached_files_load(server, monkeypatch, value):
    monkeypatch.setenv('HF_HUB_OFFLINE', value)
    name = serve(server, 'ravlt_t', 200, WHOLE)
    if value in ('0', ''):
        LOAD(name, 'cpu')
        monkeypatch.setenv('HF_HUB_OFFLINE', '1')
        assert LOAD(name, 'cpu')['state_dict'] and len(server.requests) == 1
        return
    assert f'HF_HUB_OFFLINE={value!r} forbids downloads and {name} is not cached' in error_line(name)
    assert not server.requests


@pytest.mark.parametrize(
    'reply, said',
    [
        ((200, WHOLE[:-100], len(WHOLE)), 'cut short'),  # a transfer that breaks off
        ((200, b'<!DOCTYPE html><html>Please log in</html>'), 'the download is a web page'),
        ((404, b'gone'), 'HTTP Error 404'),
    ],
    ids=['breaks off', 'a page', 'gone'],
)
def test_invalid_downloads_are_not_kept(server, reply, said):
    assert said in error_line(serve(server, 'ravlt_t', *reply)) and server.kept() == []
    serve(server, 'ravlt_t', 200, WHOLE)
    assert LOAD('mmlinattn://ravlt_t')['state_dict']  # the next attempt downloads again


def test_an_unreachable_or_silent_server(server, monkeypatch, request):
    server.stop()
    socket.setdefaulttimeout(7)
    request.addfinalizer(lambda: socket.setdefaulttimeout(None))
    error_line('mmlinattn://ravlt_t')
    with socket.create_server(('127.0.0.1', 0)) as silent:
        entry = find_released('ravlt_t')._replace(link=f'http://127.0.0.1:{silent.getsockname()[1]}/a')
        monkeypatch.setattr(released, 'released_checkpoints', lambda: {'ravlt_t': entry})
        monkeypatch.setattr(download, 'TIMEOUT', 0.2)
        assert 'timed out' in error_line('mmlinattn://ravlt_t')
    assert socket.getdefaulttimeout() == 7 and server.kept() == []


def test_names_of_backbones_and_files(monkeypatch, tmp_path):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    table = released_checkpoints()
    backbones = {name for name, entry in table.items() if entry.bare}
    assert len(backbones) == 24 and len(table) == 24 + 45
    assert all(table[name].path == table[f'{name}_in1k'].path for name in backbones)
    assert len({entry.file_name.lower() for entry in table.values()}) == 45
    assert table['ravlt_b'].path == tmp_path / 'hub' / 'checkpoints' / 'mmlinattn' / 'RAVLT_B.pth'
    assert table['ravlt_b_cascade_3x'].path.name == 'Casmaskrcnn_b_3x_36_epoch.pth'
    assert table['inline_deit_t'].path.name == 'inline_deit_t.pth'  # its link ends in /?dl=1


def test_an_unknown_name_lists_the_known_ones_closest_first():
    with pytest.raises(CheckpointError, match="'ravlt_b_cascade_1x'; known names: ravlt_b_cascade_3x") as caught:
        find_released('ravlt_b_cascade_1x')
    known = str(caught.value).split('known names: ')[1].split(', ')
    assert sorted(known) == sorted(released_checkpoints())  # each once
