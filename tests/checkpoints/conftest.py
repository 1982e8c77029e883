# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
from helpers.checkpoint_helpers import FileServer


@pytest.fixture
def server(monkeypatch, tmp_path):
    """HTTP server on this machine, with an empty checkpoint cache."""
    server = FileServer()
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    for variable in ('HF_ENDPOINT', 'HF_HUB_OFFLINE'):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'torch'))
    server.cache = tmp_path / 'torch' / 'hub' / 'checkpoints'
    # lock files aside
    server.kept = lambda: sorted(p.name for p in server.cache.rglob('*') if p.is_file() and p.suffix != '.lock')
    yield server
    server.stop()
