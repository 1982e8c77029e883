# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Replace the loaders of MMEngine's CheckpointLoader by safe ones, and add ``mmlinattn://`` addresses.

``import mmlinattn`` calls :func:`register`. All users of the CheckpointLoader (``load_from``, ``--resume``,
``init_cfg``, test tools, inferencers) then read files with :func:`~mmlinattn.checkpoints.safe.load_file`. The loaders
take MMEngine's arguments and raise CheckpointError.
"""

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from mmengine.runner import (
    CheckpointLoader,
    get_deprecated_model_names,
    get_external_models,
    get_torchvision_models,
)

from ..utils.errors import CheckpointError
from ..utils.private_apis import checkpoint_loaders
from . import download, released
from .fit import some
from .safe import load_file
from .states import backbone_state, model_state

PREFIX = 'mmlinattn://'
_ZOOS = {
    'torchvision': get_torchvision_models,
    'modelzoo': get_torchvision_models,
    'open-mmlab': get_external_models,
    'openmmlab': get_external_models,
}


def load_from_local(filename: str, map_location: Any = None) -> Any:
    return load_file(filename, map_location)


def load_from_http(filename: str, map_location: Any = None) -> Any:
    """Load a checkpoint from a URL, through PyTorch's download cache.

    The URL of a released whole model is loaded as ``mmlinattn://NAME``. If the URL has no file name, the cached file
    gets a name made from the URL.
    """
    entry = released.find_link(filename)
    if entry is not None:
        return load_from_mmlinattn(PREFIX + entry.name, map_location)
    folder, _, name = urlsplit(filename).path.rpartition('/')
    if not name:  # links of shares: .../f/6d05c49ed42b/?dl=1
        name = f'{os.path.basename(folder) or "checkpoint"}-{hashlib.sha256(filename.encode()).hexdigest()[:8]}.pth'
    path = Path(torch.hub.get_dir(), 'checkpoints', name)
    download.fetch(filename, path)
    return load_file(path, map_location)


def load_from_mmlinattn(filename: str, map_location: Any = None) -> dict:
    """Load the published checkpoint ``mmlinattn://NAME``, with its weights renamed to those of this project.

    ``HF_ENDPOINT`` names a mirror of Hugging Face's hub. ``HF_HUB_OFFLINE=1`` allows cached files only.

    Returns:
        dict: ``state_dict``, of the backbone if NAME is a backbone's, and of the whole model if NAME is a config name;
            ``meta`` of the file, with ``source`` (NAME) and ``link`` added.

    Raises:
        CheckpointError: The name is unknown, or the file cannot be downloaded or read.
    """
    entry = released.find_released(filename[len(PREFIX) :])
    link = download.mirrored(entry.link)
    if download.is_offline() and not entry.path.exists():
        raise CheckpointError(
            f'HF_HUB_OFFLINE={os.environ["HF_HUB_OFFLINE"]!r} forbids downloads and {filename} is not cached; fetch '
            f'{link} by other means and put it at {entry.path}'
        )
    download.fetch(link, entry.path)
    checkpoint = load_file(entry.path, map_location)
    convert = backbone_state if entry.bare else model_state
    state = convert(checkpoint, str(entry.path))[0]
    return dict(state_dict=state, meta={**(checkpoint.get('meta') or {}), 'source': entry.name, 'link': entry.link})


def load_from_zoo(filename: str, map_location: Any = None) -> Any:
    """Load ``torchvision://NAME`` or ``open-mmlab://NAME`` from the URL in MMEngine's tables."""
    zoo, _, name = filename.partition('://')
    models = _ZOOS[zoo]()
    if 'mmlab' in zoo:
        name = get_deprecated_model_names().get(name, name)
    if name not in models:
        raise CheckpointError(f'{filename}: {zoo} has no model {name!r}; it has {some(sorted(models), 10)}')
    return load_from_http(models[name], map_location)


def load_from_elsewhere(filename: str, map_location: Any = None) -> Any:
    """Raise a CheckpointError for any address such as ``s3://``: MMEngine's loaders unpickle these without a check."""
    raise CheckpointError(f'{filename} is not read after `import mmlinattn`: download the file and give its path')


def register() -> None:
    """Replace MMEngine's own checkpoint loaders in this process by safe ones.

    Loaders that other packages registered for other addresses stay. Repeated calls have no further effect.
    """
    unsafe = [prefix for prefix, loader in checkpoint_loaders().items() if loader.__module__.startswith('mmengine.')]
    for prefixes, loader in {
        tuple(unsafe): load_from_elsewhere,
        '': load_from_local,
        ('http://', 'https://'): load_from_http,
        PREFIX: load_from_mmlinattn,
        tuple(f'{zoo}://' for zoo in _ZOOS): load_from_zoo,
    }.items():
        CheckpointLoader.register_scheme(prefixes, loader, force=True)
