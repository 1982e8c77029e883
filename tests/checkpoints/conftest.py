# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest


@pytest.fixture
def server(monkeypatch, tmp_path):
    """HTTP server with an empty checkpoint cache, and a reply per path: (status, body) or (status, body, length)."""
    replies, requests, cache = {}, [], tmp_path / 'torch' / 'hub' / 'checkpoints'

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            status, body, *length = replies.get(self.path, (404, b'no such file'))
            self.send_response(status)
            self.send_header('Content-Length', str(length[0] if length else len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    def kept():  # lock files aside
        return sorted(path.name for path in cache.rglob('*') if path.is_file() and path.suffix != '.lock')

    def stop():
        http.shutdown()
        http.server_close()

    http = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'torch'))
    for variable in ('HF_ENDPOINT', 'HF_HUB_OFFLINE'):
        monkeypatch.delenv(variable, raising=False)
    root = f'http://127.0.0.1:{http.server_port}'
    yield SimpleNamespace(replies=replies, requests=requests, root=root, kept=kept, stop=stop)
    stop()
