# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the checkpoint tests share: hostile files, released-like state dicts, a small server."""

import http.server
import io
import os
import threading
from pathlib import Path

import torch

ARCH = dict(
    embed_dims=(8, 16, 24, 32),
    depths=(1, 1, 2, 1),
    num_heads=(1, 2, 3, 4),
    layer_scales=(1, 1, 1, 1),
)


class Hostile:
    """Unpickling it calls ``function(*args)``."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def touch_when_loaded(marker: Path) -> Hostile:
    return Hostile(os.system, f'touch {marker}')


def saved(thing) -> bytes:
    """What ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def released_ravlt(dense: bool = False) -> dict:
    """A random state dict in the released RAVLT layout: a classifier, or a dense backbone."""
    generator = torch.Generator().manual_seed(0)
    state = {}

    def add(name, *shape, bias=True):
        state[f'{name}.weight'] = torch.randn(shape, generator=generator)
        if bias:
            state[f'{name}.bias'] = torch.randn(shape[0], generator=generator)

    def add_norm(name, width, batch=False):
        add(name, width)
        if batch:
            state[f'{name}.running_mean'] = torch.randn(width, generator=generator)
            state[f'{name}.running_var'] = torch.rand(width, generator=generator) + 0.5
            state[f'{name}.num_batches_tracked'] = torch.tensor(7)

    dims, last = ARCH['embed_dims'], len(ARCH['depths']) - 1
    stem = (3, dims[0] // 2, dims[0] // 2, dims[0] // 2, dims[0])
    for i in range(4):
        add(f'patch_embed.proj.{3 * i}', stem[i + 1], stem[i], 3, 3)
        add_norm(f'patch_embed.proj.{3 * i + 1}', stem[i + 1], batch=True)
    for i, (c, depth, heads) in enumerate(zip(dims, ARCH['depths'], ARCH['num_heads'])):
        state[f'layers.{i}.RoPE.angle'] = torch.ones(c // heads // 2)
        for j in range(depth):
            block, hidden = f'layers.{i}.blocks.{j}', int(3.5 * c)
            for k in (1, 2):
                state[f'{block}.gamma_{k}'] = torch.randn(1, c, 1, 1, generator=generator)
                add_norm(f'{block}.norm{k}.norm', c)
            add(f'{block}.attn.qkvo', 4 * c, c, 1, 1)
            add(f'{block}.attn.lepe', c, 1, 5, 5)
            add(f'{block}.attn.proj', c, c, 1, 1)
            add(f'{block}.ffn.fc1', hidden, c, 1, 1)
            add(f'{block}.ffn.fc2', c, hidden, 1, 1)
            add(f'{block}.ffn.dwconv', hidden, 1, 3, 3)
            add(f'{block}.pos', c, 1, 3, 3)
        if i < last:
            add(f'layers.{i}.downsample.reduction', dims[i + 1], c, 3, 3)
            add_norm(f'layers.{i}.downsample.norm', dims[i + 1], batch=True)
        if dense:
            add_norm(f'extra_norms.{i}.norm', c)
    if not dense:
        add('proj', 40, dims[-1], 1, 1)
        add_norm('norm', 40, batch=True)
        add('head', 10, 40, 1, 1)
    return state


class FileServer:
    """An HTTP server on this machine that answers each path with the next of its replies.

    A reply is ``(status, body)`` or ``(status, body, announced_length)``; the last one repeats.
    """

    def __init__(self):
        self.replies: dict[str, list] = {}
        self.requests: list[str] = []
        lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(handler):
                with lock:
                    self.requests.append(handler.path)
                    queue = self.replies.get(handler.path, [(404, b'no such file')])
                    status, body, *length = queue.pop(0) if len(queue) > 1 else queue[0]
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
