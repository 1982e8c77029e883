# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""MMEngine's checkpoint loading, made safe, and ``mmlinattn://``.

Importing mmlinattn calls :func:`register`. From then on ``load_from``, ``--resume``, ``init_cfg``,
the test tools' argument and the inferencers, all of which go through MMEngine's CheckpointLoader,
read local files and downloads with :func:`~mmlinattn.checkpoints.safe.load_file`.
"""

import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Optional
from urllib.parse import urlsplit

import torch
from mmengine.runner import checkpoint as mmengine_checkpoint

from . import download, released
from .inert import make_inert
from .safe import allow_safe_globals, load_file
from .states import backbone_state, model_state

PREFIX = 'mmlinattn://'


def load_from_local(filename: str, map_location: Any = None) -> Any:
    """MMEngine's loader of local files: same arguments, safe reading, one-line errors."""
    return load_file(filename, map_location)


def load_from_http(
    filename: str,
    map_location: Any = None,
    model_dir: Optional[str] = None,
    progress: Optional[bool] = None,
) -> Any:
    """MMEngine's loader of http(s) links: same arguments and cache, safe reading.

    A link without a file name in it is kept under a name made from the link. One of a published checkpoint, as in our
    metafiles, is ``mmlinattn://NAME`` of that checkpoint: its layout is converted.
    """
    entry = released.find_link(filename)
    if entry is not None:
        return load_from_mmlinattn(PREFIX + entry.name, map_location)
    path = _kept_in(filename, model_dir)
    download.fetch(filename, path, progress)
    return load_file(path, map_location)


def local_path(source: str) -> Path:
    """The file that is read for a path, a link or ``mmlinattn://NAME``; of the last two, where it is kept.

    Raises:
        CheckpointError: For an unknown name.
    """
    if source.startswith(PREFIX):
        return released.find_released(source[len(PREFIX) :]).path
    if source.startswith(('http://', 'https://')):
        entry = released.find_link(source)
        return _kept_in(source) if entry is None else entry.path
    return Path(source).expanduser()


def _kept_in(link: str, model_dir: Optional[str] = None) -> Path:
    return Path(model_dir or os.path.join(torch.hub.get_dir(), 'checkpoints')).expanduser() / _file_name(link)


def _file_name(link: str) -> str:
    name = os.path.basename(urlsplit(link).path)
    if name:
        return name
    last_part = urlsplit(link).path.rstrip('/').rsplit('/', 1)[-1] or 'checkpoint'
    return f'{last_part}-{hashlib.sha256(link.encode()).hexdigest()[:8]}.pth'


def load_from_mmlinattn(filename: str, map_location: Any = None) -> dict:
    """The published checkpoint ``mmlinattn://NAME``, in the names of this project.

    Returns:
        ``dict(state_dict=..., meta=...)``: bare backbone keys for a backbone's name, those of the
        whole model for a config's stem. ``meta`` is the file's own, and its name and link.

    Raises:
        CheckpointError: the name is unknown, or the file can neither be found nor downloaded, or
            is not what it should be.
    """
    entry = released.find_released(filename[len(PREFIX) :])
    download.fetch(entry.link, entry.path)
    checkpoint = load_file(entry.path, map_location)
    if entry.bare:
        state = backbone_state(checkpoint, str(entry.path))[0]
    else:
        state = model_state(checkpoint, str(entry.path))[0]
    meta = checkpoint.get('meta') if isinstance(checkpoint, dict) else None
    meta = dict(meta) if isinstance(meta, dict) else {}
    return dict(state_dict=state, meta=dict(meta, source=entry.name, link=entry.link))


def _load_any(file: Any, map_location: Any = None, **_: Any) -> Any:
    """``load_file`` for a path or an open file."""
    if not hasattr(file, 'read'):
        return load_file(file, map_location)
    with tempfile.NamedTemporaryFile(suffix='.pth') as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        return load_file(copy.name, map_location)


class _SafeTorch:
    """The ``torch`` of MMEngine's loaders of other addresses (s3, pavi, ...), which may unpickle anything."""

    load = staticmethod(_load_any)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _guard_loader() -> None:
    """Let everything MMEngine loads, from any address, go through :func:`~mmlinattn.checkpoints.inert.make_inert`."""
    loader = mmengine_checkpoint.CheckpointLoader
    original = loader.__dict__['load_checkpoint'].__func__
    if getattr(original, 'is_guarded', False):
        return

    @functools.wraps(original)
    def load_checkpoint(cls, filename, *args, **kwargs):
        return make_inert(original(cls, filename, *args, **kwargs), str(filename))

    load_checkpoint.is_guarded = True
    loader.load_checkpoint = classmethod(load_checkpoint)


def register() -> None:
    """Make MMEngine's checkpoint loading safe in this process; calling it again does no harm."""
    allow_safe_globals()
    _guard_loader()
    mmengine_checkpoint.torch = _SafeTorch()
    if hasattr(mmengine_checkpoint, '_safe_torch_load'):  # onedl-mmengine; it unpickles anything where torch refuses
        mmengine_checkpoint._safe_torch_load = _load_any
    scheme = mmengine_checkpoint.CheckpointLoader.register_scheme
    scheme('', load_from_local, force=True)
    scheme(('http://', 'https://'), load_from_http, force=True)
    scheme(PREFIX, load_from_mmlinattn, force=True)
    # torchvision://, open-mmlab:// and mmcls:// call this function by name, not by scheme, and
    # the original unpickles whatever the server sends.
    mmengine_checkpoint.load_from_http = load_from_http
