# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convert published checkpoints to files that load with ``load_checkpoint(strict=True)``."""

import os
from pathlib import Path
from typing import Union

import torch
from mmengine.config import Config
from mmengine.runner import CheckpointLoader

from ..utils import atomic_write
from ..utils.building import build_model
from ..utils.errors import CheckpointError
from ..version import __version__
from .fit import Fit
from .loading import convert_state

PathLike = Union[str, 'os.PathLike[str]']


def convert_checkpoint(source: PathLike, target: PathLike, config: PathLike) -> Fit:
    """Write the weights of ``source`` to ``target``, renamed to the names in the model of ``config``.

    ``target`` is written atomically, and only if the comparison is complete. ``source`` is never overwritten.

    Args:
        source (str | Path): A file, URL or ``mmlinattn://NAME``.
        target (str | Path): The file to write.
        config (str | Path): Config of the model.

    Returns:
        Fit: The comparison of ``source`` with the model. If it is not complete, no file was written.

    Raises:
        RunError: ``source`` cannot be read (:class:`CheckpointError`) or has NaN or infinite weights, ``target`` is the
            same file, a folder, or cannot be written, or the model of ``config`` cannot be built.
    """
    target = Path(target).expanduser()
    if target.is_dir():
        raise CheckpointError(f'DST {target} is a folder; name a file in it')
    if target.exists() and os.path.exists(given := os.path.expanduser(source)) and target.samefile(given):
        raise CheckpointError(f'DST {target} is SRC itself, which is never overwritten')
    if not os.access(target.parent, os.W_OK):
        raise CheckpointError(f'the folder of DST {target} does not exist or cannot be written to')
    checkpoint = CheckpointLoader.load_checkpoint(str(source), 'cpu', logger='silent')
    model = build_model(Config.fromfile(config))
    fit = convert_state(checkpoint, str(source), model)
    if not fit.is_complete:
        return fit
    fit.check_values()
    model.load_state_dict(fit.weights)  # strict: key by key, or nothing is written
    meta: dict = dict(source=os.path.basename(source), config_name=os.path.basename(config))
    meta.update(mmlinattn_version=__version__, **_dataset_meta(checkpoint.get('meta') or {}))
    try:
        with atomic_write(target) as file:
            torch.save(dict(state_dict=fit.weights, meta=meta), file)
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as RuntimeError
        raise CheckpointError(f'cannot write {target}: {str(error).splitlines()[0]}') from error
    return fit


def _dataset_meta(meta: dict) -> dict:
    """Return ``dict(dataset_meta=...)`` with class names and colours for inferencers, or {} if ``meta`` has none.

    ``CLASSES`` and ``PALETTE`` of OpenMMLab 1.x files get their new names.
    """
    old_names = dict(CLASSES='classes', PALETTE='palette')
    names = {new: meta[old] for old, new in old_names.items() if meta.get(old) is not None}
    known = meta.get('dataset_meta') or names
    return dict(dataset_meta=known) if known else {}
