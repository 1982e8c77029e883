# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import http.client
import io
import logging
import re
import threading
import urllib.error
from types import SimpleNamespace

import pytest
import torch
from checkpoint_helpers import FileServer, released_ravlt, touch_when_loaded
from mmengine.runner import load_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader

from mmlinattn import __version__
from mmlinattn.backbones import RAVLT
from mmlinattn.checkpoints import (
    CheckpointError,
    download,
    find_released,
    register,
    released,
    released_checkpoints,
)

LOAD = CheckpointLoader.load_checkpoint


def saved(thing) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server, an empty cache and short waits; the published links lead to the server."""
    server = FileServer()
    register()
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'torch'))
    monkeypatch.setattr(download, 'RETRY_WAITS', (0.01, 0.01))
    table = {
        name: entry._replace(link=f'{server.root}/{entry.name}/?dl=1') for name, entry in released_checkpoints().items()
    }
    monkeypatch.setattr(released, 'released_checkpoints', lambda: table)
    server.cache = tmp_path / 'torch' / 'hub' / 'checkpoints'
    yield server
    server.stop()


def kept(server) -> list:
    """The files in the cache, lock files aside."""
    files = (path for path in server.cache.rglob('*') if path.is_file())
    return sorted(path.name for path in files if not path.name.endswith('.lock'))


def serve(server, name, *replies) -> str:
    server.replies[f'/{name}/?dl=1'] = list(replies)
    return f'mmlinattn://{name}'


def error_line(name) -> str:
    with pytest.raises(CheckpointError) as caught:
        LOAD(name, 'cpu')
    assert '\n' not in str(caught.value)
    return str(caught.value)


# names


def test_every_row_of_the_table_has_its_names():
    table = released_checkpoints()
    backbones = {name for name, entry in table.items() if entry.bare}
    assert len(backbones) == 24 and len(table) == 24 + 45
    assert all(f'{name}_in1k' in table for name in backbones)
    expected = (
        'ravlt_b ravlt_b_in1k ravlt_b_cascade_3x ravlt_t_retinanet_1x ravlt_t_maskrcnn_1x '
        'ravlt_s_maskrcnn_3x ravlt_t_fpn_80k ravlt_s_upernet_160k inline_pvt_t inline_swin_b '
        'inline_cswin_t inline_deit_t flatten_pvt_t flatten_pvt_v2_b0 flatten_swin_b_384 '
        'flatten_cswin_t'
    )
    assert set(expected.split()) <= set(table)


def test_cached_files_have_readable_names_that_do_not_collide():
    table = released_checkpoints()
    assert table['ravlt_b'].file_name == table['ravlt_b_in1k'].file_name == 'RAVLT_B.pth'
    assert table['ravlt_b_cascade_3x'].file_name == 'Casmaskrcnn_b_3x_36_epoch.pth'
    assert table['inline_deit_t'].file_name == 'inline_deit_t.pth'
    assert table['inline_deit_t_in1k'].file_name == 'inline_deit_t.pth'
    links = {}
    for entry in table.values():
        assert links.setdefault(entry.file_name.lower(), entry.link) == entry.link


def test_an_unknown_name_lists_the_known_ones_closest_first():
    with pytest.raises(CheckpointError) as caught:
        find_released('ravlt_b_cascade_1x')
    message = str(caught.value)
    assert "'ravlt_b_cascade_1x'" in message
    known = message.split('known names: ')[1].split(', ')
    assert known[0] == 'ravlt_b_cascade_3x' and sorted(known) == sorted(released_checkpoints())  # each once
    rest = [name for name in released_checkpoints() if name not in known[:5]]
    assert known[5:] == rest
    with pytest.raises(CheckpointError) as caught:
        find_released('flatten_cswin_x')
    assert all(name.startswith('flatten_') for name in str(caught.value).split('known names: ')[1].split(', ')[:5])
    with pytest.raises(CheckpointError) as caught:
        find_released('%%')  # like none
    listed = ', '.join(released_checkpoints())
    assert str(caught.value) == f"no published checkpoint is called '%%'; known names: {listed}"
    assert 'known names' in error_line('mmlinattn://resnet50')


# mmlinattn://


def test_first_download_then_the_cache(server):
    name = serve(server, 'ravlt_t', (200, saved({'model': released_ravlt()})))
    first = LOAD(name, 'cpu')
    assert kept(server) == ['RAVLT_T.pth']
    second = LOAD(name, 'cpu')
    assert len(server.requests) == 1
    assert first['state_dict'].keys() == second['state_dict'].keys()
    assert not any(key.startswith(('head', 'neck', 'layers')) for key in first['state_dict'])


def test_the_classifier_is_the_same_file_with_its_head(server):
    serve(server, 'ravlt_t', (200, saved({'model': released_ravlt()})))
    bare = LOAD('mmlinattn://ravlt_t', 'cpu')['state_dict']
    whole = LOAD('mmlinattn://ravlt_t_in1k', 'cpu')['state_dict']
    assert len(server.requests) == 1
    assert {f'backbone.{key}' for key in bare} == {k for k in whole if k.startswith('backbone.')}
    assert any(key.startswith('head.') for key in whole)


def test_a_whole_detector_keeps_its_parts_and_classes(server):
    state = {f'backbone.{key}': v for key, v in released_ravlt(dense=True).items()}
    state['neck.fpn_convs.0.conv.weight'] = torch.ones(1)
    checkpoint = {'state_dict': state, 'meta': {'CLASSES': ('cat',), 'epoch': 36}}
    name = serve(server, 'ravlt_b_cascade_3x', (200, saved(checkpoint)))
    loaded = LOAD(name, 'cpu')
    assert loaded['meta']['CLASSES'] == ('cat',)
    assert loaded['meta']['source'] == 'ravlt_b_cascade_3x'
    assert 'neck.fpn_convs.0.conv.weight' in loaded['state_dict']
    assert 'backbone.out_norms.3.weight' in loaded['state_dict']
    assert not any('RoPE' in key or 'layers.0.blocks' in key for key in loaded['state_dict'])


def test_a_file_put_there_by_hand_needs_no_server(server):
    path = find_released('ravlt_s').path
    assert path == server.cache / 'mmlinattn' / 'RAVLT_S.pth'
    path.parent.mkdir(parents=True)
    path.write_bytes(saved(released_ravlt()))
    server.stop()
    assert LOAD('mmlinattn://ravlt_s', 'cpu')['state_dict']


def test_it_initialises_a_backbone_and_a_plain_load(server):
    from checkpoint_helpers import ARCH

    released_state = released_ravlt()
    name = serve(server, 'ravlt_t', (200, saved({'model': released_state})))
    for by_init_cfg in (True, False):
        init_cfg = dict(type='Pretrained', checkpoint=name) if by_init_cfg else None
        model = RAVLT(ARCH, out_norm=False, init_cfg=init_cfg)
        if by_init_cfg:
            model.init_weights()
        else:
            load_checkpoint(model, name, strict=True)
        stem = model.patch_embeds[0].layers[0].weight
        assert torch.equal(stem, released_state['patch_embed.proj.0.weight'])


# trouble on the way


@pytest.mark.parametrize('status', [200, 500, 503, 408, 429])
def test_a_transfer_that_breaks_once_is_tried_again(server, status):
    whole = saved({'model': released_ravlt()})
    broken = (200, whole[:-100], len(whole)) if status == 200 else (status, b'busy')
    name = serve(server, 'ravlt_t', broken, (200, whole))
    assert LOAD(name, 'cpu')['state_dict']
    assert len(server.requests) == 2


def test_of_a_transfer_that_broke_nothing_is_left_in_the_file(server):
    """A first answer that was longer than the file, as of a server that fell over."""
    whole = saved({'w': torch.ones(2)})
    link, path = f'{server.root}/a.pth', server.cache / 'a.pth'
    server.replies['/a.pth'] = [(200, 9 * whole, 10 * len(whole)), (200, whole)]
    download.fetch(link, path)
    assert path.read_bytes() == whole and len(server.requests) == 2


def test_a_broken_transfer_is_never_kept(server):
    whole = saved({'model': released_ravlt()})
    name = serve(server, 'ravlt_t', (200, whole[:-100], len(whole)))
    message = error_line(name)
    entry = released.find_released('ravlt_t')
    assert entry.link in message and str(entry.path) in message
    assert f'broke off after {len(whole) - 100} of {len(whole)} bytes' in message
    assert len(server.requests) == 3 and kept(server) == []


def test_a_transfer_without_a_length_is_checked_by_reading_it(server):
    whole = saved({'model': released_ravlt()})
    name = serve(server, 'ravlt_t', (200, whole[:-100]))  # the server itself has half a file
    assert 'cut short' in error_line(name) and kept(server) == []


def test_a_web_page_is_never_kept(server):
    name = serve(server, 'ravlt_t', (200, b'<!DOCTYPE html><html>Please log in</html>'))
    message = error_line(name)
    entry = released.find_released('ravlt_t')
    assert 'web page' in message and entry.link in message and str(entry.path) in message
    assert kept(server) == []


def test_hostile_content_is_neither_run_nor_kept(server, tmp_path):
    marker = tmp_path / 'was_run'
    name = serve(server, 'ravlt_t', (200, saved({'model': touch_when_loaded(marker)})))
    assert 'refused' in error_line(name)
    assert not marker.exists() and kept(server) == []


def test_a_refusal_of_the_server_is_not_repeated(server):
    message = error_line('mmlinattn://ravlt_t')
    assert 'HTTP 404' in message and len(server.requests) == 1


def test_server_away(server):
    entry = released.find_released('ravlt_t')
    server.stop()
    message = error_line('mmlinattn://ravlt_t')
    assert entry.link in message and str(entry.path) in message and kept(server) == []


def test_a_cache_that_cannot_be_written(server, tmp_path):
    name = serve(server, 'ravlt_t', (200, saved({'model': released_ravlt()})))
    server.cache.parent.mkdir(parents=True)
    server.cache.write_text('a file where the folder should be')
    assert str(server.cache) in error_line(name)


def test_disk_full(server, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, 'No space left on device')

    name = serve(server, 'ravlt_t', (200, saved({'model': released_ravlt()})))
    monkeypatch.setattr(download.os, 'fsync', full)
    message = error_line(name)
    assert 'No space left' in message and 'RAVLT_T.pth' in message
    assert len(server.requests) == 1 and kept(server) == []


def test_of_many_at_once_one_downloads(server):
    serve(server, 'ravlt_t', (200, saved({'model': released_ravlt()})))
    entry, failures = released.find_released('ravlt_t'), []

    def fetch():
        try:
            download.fetch(entry.link, entry.path)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(server.requests) == 1


def test_progress_bar_only_where_it_is_seen(server, capsys):
    body = saved({'w': torch.ones(1)})
    server.replies = {'/a.pth': [(200, body)], '/b.pth': [(200, body)]}
    download.fetch(f'{server.root}/a.pth', server.cache / 'a.pth', progress=True)
    assert '━━━' in capsys.readouterr().out
    download.fetch(f'{server.root}/b.pth', server.cache / 'b.pth', progress=False)
    assert '━' not in capsys.readouterr().out


@pytest.mark.parametrize('length, total', [('6', 6), (None, None)])
def test_what_the_bar_shows(monkeypatch, length, total):
    shown = []

    class Bar:
        def __init__(self, *columns, disable):
            shown.append(disable)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            shown.append('closed')

        def add_task(self, name, total):
            shown.append((name, total))
            return 7

        def update(self, task, completed):
            shown.append((task, completed))

    class Response(io.BytesIO):
        headers = {'Content-Length': length} if length else {}

    monkeypatch.setattr(download, 'Progress', Bar)
    monkeypatch.setattr(download, '_CHUNK', 4)
    for progress in (True, False):
        monkeypatch.setattr(download, '_open', lambda link: Response(b'abcdef'))
        download._download('http://host/zoo/a.pth', io.BytesIO(), progress)
        assert shown == [not progress, ('a.pth', total), (7, 4), (7, 6), 'closed']
        shown.clear()


# http://


def test_links_with_a_file_name_are_cached_where_mmengine_does(server):
    server.replies['/zoo/r50.pth'] = [(200, saved({'w': torch.ones(2)}))]
    for _ in range(2):
        loaded = LOAD(f'{server.root}/zoo/r50.pth', lambda storage, _: storage)
        assert torch.equal(loaded['w'], torch.ones(2))
    assert kept(server) == ['r50.pth'] and len(server.requests) == 1


def test_links_without_a_file_name_do_not_share_one(server):
    links = ['/f/?id=0', '/f/?id=1', '/?id=0']
    for i, link in enumerate(links):
        server.replies[link] = [(200, saved({'w': torch.full((1,), i)}))]
    for i, link in enumerate(links):
        assert LOAD(server.root + link, 'cpu')['w'].item() == i
    names = [re.fullmatch(r'(\w+)-[0-9a-f]{8}\.pth', name)[1] for name in kept(server)]
    assert names == ['checkpoint', 'f', 'f']


def test_hostile_links_are_refused_also_through_the_model_zoos(server, tmp_path, monkeypatch):
    marker = tmp_path / 'was_run'
    link = f'{server.root}/resnet.pth'
    server.replies['/resnet.pth'] = [(200, saved(touch_when_loaded(marker)))]
    for zoo in ('get_torchvision_models', 'get_external_models', 'get_mmcls_models'):
        monkeypatch.setattr(f'mmengine.runner.checkpoint.{zoo}', lambda: {'resnet': link})
    for name in (link, 'torchvision://resnet', 'open-mmlab://resnet', 'mmcls://resnet'):
        assert 'refused' in error_line(name)
    assert not marker.exists() and kept(server) == []


def test_how_often_and_how_long_a_server_is_asked(monkeypatch, tmp_path):
    """Three times, after 1 and 4 seconds, 30 seconds each; the temporary file begins anew each time."""
    asked, waits, lines = [], [], []

    def urlopen(request, timeout):
        asked.append((request.full_url, request.get_header('User-agent'), timeout))
        raise OSError('away')

    monkeypatch.setattr(download.urllib.request, 'urlopen', urlopen)
    monkeypatch.setattr(download.time, 'sleep', waits.append)
    monkeypatch.setattr(
        download, 'print_log', lambda line, logger=None, level=None: lines.append((line, logger, level))
    )
    link, path = 'http://host/a.pth', tmp_path / 'new' / 'a.pth'
    with pytest.raises(CheckpointError) as found:
        download.fetch(link, path)
    assert str(found.value) == (
        f'cannot download {link} (away); check the connection, or fetch the file by other means and put it at {path}'
    )
    assert asked == 3 * [(link, f'mmlinattn/{__version__}', 30)] and waits == [1.0, 4.0]
    assert lines == [
        (f'Downloading {link} to {path}', 'current', None),
        (f'{link}: away; trying again in 1 s', 'current', logging.WARNING),
        (f'{link}: away; trying again in 4 s', 'current', logging.WARNING),
    ]
    assert [file.name for file in path.parent.iterdir()] in (['.a.pth.lock'], [])


def raising(error):
    def call():
        raise error

    return call


def http_error(code):
    return urllib.error.HTTPError('http://host', code, 'Reason', {}, None)


@pytest.mark.parametrize(
    'error, reason, may_pass',
    [
        *((http_error(code), f'HTTP {code} Reason', True) for code in (408, 429, 500, 503, 599)),
        *((http_error(code), f'HTTP {code} Reason', False) for code in (400, 403, 404, 409, 428, 499)),
        (urllib.error.URLError('no such host'), 'no such host', True),
        (OSError('reset'), 'reset', True),
        (TimeoutError(), 'TimeoutError', True),
        (http.client.IncompleteRead(b'x'), 'IncompleteRead(1 bytes read)', True),
        (ValueError('unknown url type'), 'unknown url type', False),
    ],
    ids=repr,
)
def test_which_errors_may_pass(error, reason, may_pass):
    with pytest.raises(download._LinkError) as found:
        download._network(raising(error))
    assert (str(found.value), found.value.may_pass) == (reason, may_pass)
    assert download._network(max, 3, 4) == 4


@pytest.mark.parametrize('length', [None, 'chunked', '6', '7'])
def test_what_was_announced_has_to_come(monkeypatch, length):
    """A server that announces nothing is believed: the file is read afterwards."""
    pieces, file, asked = [b'abc', b'def', b''], io.BytesIO(), []

    class Response:
        headers = {} if length is None else {'Content-Length': length}

        def read(self, size):
            asked.append(size)
            return pieces[len(asked) - 1]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            asked.append('closed')

    monkeypatch.setattr(download, '_open', lambda link: Response())
    if length == '7':
        with pytest.raises(download._LinkError, match='^the transfer broke off after 6 of 7 bytes$'):
            download._download('http://host/a.pth', file, False)
    else:
        download._download('http://host/a.pth', file, False)
    assert file.getvalue() == b'abcdef' and asked[-1] == 'closed'
    pieces[:], asked[:] = [b'abc'], []

    def breaks_off(self, size):
        if asked:
            raise ConnectionResetError('reset')
        asked.append(size)
        return pieces[0]

    monkeypatch.setattr(Response, 'read', breaks_off)
    with pytest.raises(download._LinkError, match='reset'):  # the link's error, which is tried again, not the disk's
        download._download('http://host/a.pth', file, False)


def test_lines_about_what_was_sent(server, monkeypatch):
    entry = released.find_released('ravlt_t')
    name = serve(server, 'ravlt_t', (200, b'<html>'))
    assert error_line(name) == (
        f'{entry.link} did not send a usable checkpoint: what it sent is a web page, not a checkpoint; nothing was '
        f'kept. Fetch the file by other means and put it at {entry.path}'
    )
    assert len(server.requests) == 1

    def full(*args):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(download, '_fetch', full)
    assert error_line(name) == f'cannot save {entry.link} as {entry.path}: No space left on device'


@pytest.mark.parametrize('is_terminal', [True, False])
def test_a_bar_for_a_terminal_only(monkeypatch, tmp_path, is_terminal):
    shown = []
    monkeypatch.setattr(download, '_fetch', lambda link, path, progress: shown.append(progress))
    monkeypatch.setattr(download.sys, 'stderr', SimpleNamespace(isatty=lambda: is_terminal))
    for progress in (None, True, False):
        download.fetch('http://host/a.pth', tmp_path / 'a.pth', progress)
    assert shown == [is_terminal, True, False]


def test_links_go_to_the_folder_and_the_bar_that_are_asked_for(monkeypatch, tmp_path):
    from mmlinattn.checkpoints import schemes

    fetched, loaded = [], []
    monkeypatch.setattr(schemes.download, 'fetch', lambda *args: fetched.append(args))
    monkeypatch.setattr(schemes, 'load_file', lambda *args: loaded.append(args) or 'loaded')
    monkeypatch.setenv('HOME', str(tmp_path))
    link, path = 'http://host/zoo/r50.pth?raw=1', tmp_path / 'mine' / 'r50.pth'
    assert schemes.load_from_http(link, 'cuda', '~/mine', False) == 'loaded'
    assert fetched == [(link, path, False)] and loaded == [(path, 'cuda')]
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'torch'))
    schemes.load_from_http(link)
    assert fetched[1:] == [(link, tmp_path / 'torch' / 'hub' / 'checkpoints' / 'r50.pth', None)]
    assert loaded[1][1] is None
    for other, begin in (
        ('http://host/a/b/', 'b-'),
        ('http://host', 'checkpoint-'),
        ('http://host/?id=1', 'checkpoint-'),
    ):
        assert re.fullmatch(begin + r'[0-9a-f]{8}\.pth', schemes._file_name(other))


def test_what_a_published_checkpoint_says_of_itself(monkeypatch, tmp_path):
    from mmlinattn.checkpoints import schemes

    monkeypatch.setattr(schemes.download, 'fetch', lambda link, path: None)
    link = released_checkpoints()['ravlt_t'].link
    read = []
    for meta, expected in ((dict(epoch=3, link='old'), dict(epoch=3)), ([1], {}), (None, {})):
        saved = dict(state_dict=released_ravlt(), meta=meta)
        monkeypatch.setattr(
            schemes, 'load_file', lambda path, location, saved=saved: read.append((path.name, location)) or saved
        )
        loaded = schemes.load_from_mmlinattn('mmlinattn://ravlt_t', 'meta')
        assert loaded['meta'] == dict(expected, source='ravlt_t', link=link)
    bare = schemes.load_from_mmlinattn('mmlinattn://ravlt_t')
    assert read == 3 * [('RAVLT_T.pth', 'meta')] + [('RAVLT_T.pth', None)]
    # of a published link, which metafiles have: the whole model, whatever name it has behind its fragment
    whole = schemes.load_from_http(f'{link}#/other.pth', 'cuda')
    assert read[4:] == [('RAVLT_T.pth', 'cuda')] and whole['meta']['source'] == 'ravlt_t_in1k'
    assert {f'backbone.{key}' for key in bare['state_dict']} < set(whole['state_dict'])


def test_errors_of_the_disk_without_a_reason(monkeypatch, tmp_path):
    def full(*args):
        raise OSError('of a network drive')

    monkeypatch.setattr(download, '_fetch', full)
    with pytest.raises(CheckpointError) as found:
        download.fetch('http://host/a.pth', tmp_path / 'a.pth')
    assert str(found.value) == f'cannot save http://host/a.pth as {tmp_path}/a.pth: of a network drive'


def test_links_of_others_and_links_with_a_name():
    entry = released_checkpoints()['inline_deit_t_in1k']
    assert released.link_with_name(entry) == f'{entry.link}#/inline_deit_t.pth'
    assert released.find_link(f'{entry.link}#/inline_deit_t.pth') == released.find_link(entry.link) == entry
    plain = released_checkpoints()['ravlt_b']
    assert released.link_with_name(plain) == plain.link
    assert released.find_link(plain.link).name == 'ravlt_b_in1k'  # whole, with its classifier
    assert released.find_link('http://host/a.pth') is None
