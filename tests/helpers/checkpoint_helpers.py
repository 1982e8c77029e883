# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Hostile files, state dicts with released keys, and an HTTP server."""

import http.server
import io
import os
import threading
from pathlib import Path

import torch

from helpers import goldens
from mmlinattn.backbones import RAVLT

ARCH = dict(RAVLT.arch_zoo['tiny'], embed_dims=(8, 16, 32, 64))


class Hostile:
    """Object that calls ``function(*args)`` when it is unpickled."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def touch_when_loaded(marker: Path) -> Hostile:
    """Return an object that creates the file ``marker`` when it is unpickled."""
    return Hostile(os.system, f'touch {marker}')


def saved(thing) -> bytes:
    """Return the bytes of ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def released_ravlt(dense: bool = False) -> dict:
    """Return a random state dict with the released keys of RAVLT-T and an eighth of its channels.

    Args:
        dense: Keys of a detection backbone, in place of a classifier.
    """
    released = goldens.info('ravlt_det_t_256x320' if dense else 'ravlt_t')['state']
    generator, state = torch.Generator().manual_seed(0), {}
    for key, (_, shape) in released.items():
        small = [size if size < 8 else size // 8 for size in shape]  # kernel sizes and image channels stay
        state[key] = torch.rand(small, generator=generator) + 0.5 if shape else torch.tensor(7)
    return state


class FileServer:
    """HTTP server on this machine, with one reply per path: (status, body) or (status, body, Content-Length)."""

    def __init__(self):
        self.replies: dict[str, tuple] = {}
        self.requests: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(handler):
                self.requests.append(handler.path)
                status, body, *length = self.replies.get(handler.path, (404, b'no such file'))
                handler.send_response(status)
                handler.send_header('Content-Length', str(length[0] if length else len(body)))
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(handler, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.root = f'http://127.0.0.1:{self._server.server_port}'
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()
