# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Reading checkpoint files without running anything that is in them.

A checkpoint is a pickle, and a pickle can run any code. Everything here goes through PyTorch's
``weights_only`` loader, which builds only what is on a list. The list is extended by the few
harmless types that training frameworks leave in their checkpoints next to the weights.
"""

import argparse
import codecs
import functools
import mmap
import os
import pathlib
import pickle
import re
import types
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler import param_scheduler
from mmengine.utils import digit_version
from torch import _weights_only_unpickler as torch_unpickler

from ..utils.errors import CheckpointError, CheckpointNotFoundError
from .limits import MAX_EXPANSION, why_too_large

_ZIP_START = b'PK\x03\x04'
_LEGACY_START = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
# PyTorch's list has bytearray, which takes a length: ten bytes of pickle that fill the memory with zeros.
_BYTE_ARRAY = b'\nbytearray\n'
_ASKS_FOR_MEMORY = 'was refused: it asks for bytearray, which no checkpoint needs'
# Older versions have no list to extend (or one that takes no (object, name) pairs).
_TORCH_HAS_ALLOW_LIST = digit_version(torch.__version__) >= digit_version('2.6.0')


class _OneCycleOwner:
    """Stands in for MMEngine's one-cycle schedulers, of which checkpoints hold a static method."""


def _known_attribute(owner: Any, name: str) -> Any:
    """What ``getattr`` may answer inside a checkpoint: six functions of MMEngine, nothing else.

    Protocol 2 pickles a function defined inside a class as ``getattr(class, name)``, and every
    checkpoint of MMEngine holds four of them (the statistics of its HistoryBuffer). ``getattr``
    itself would open every attribute of every listed type, so it never is on the list.
    """
    if owner in (HistoryBuffer, _ReadHistoryBuffer) and name in ('min', 'max', 'mean', 'current'):
        return getattr(HistoryBuffer, name)
    if owner is _OneCycleOwner and name in ('_annealing_cos', '_annealing_linear'):
        return getattr(param_scheduler.OneCycleParamScheduler, name)
    raise pickle.UnpicklingError('Unsupported global: GLOBAL builtins.getattr')


class _ReadHistoryBuffer(HistoryBuffer):
    """MMEngine's log buffer as it is read: its own ``__setstate__`` takes any attribute, and functions for all buffers.

    Once read it is a plain HistoryBuffer.
    """

    def __setstate__(self, state: Any) -> None:
        arrays = [state.get(f'_{kind}_history') for kind in ('log', 'count')] if isinstance(state, dict) else [None]
        max_length = state.get('max_length', 0) if isinstance(state, dict) else 0
        is_history = all(isinstance(array, np.ndarray) and array.ndim == 1 for array in arrays)
        if not is_history or type(max_length) is not int or not len(arrays[0]) == len(arrays[1]) <= max_length:
            raise pickle.UnpicklingError('a log buffer (HistoryBuffer) without a log in it')
        self._log_history, self._count_history = arrays
        self.max_length = max_length
        self._set_default_statistics()
        self.__class__ = HistoryBuffer


def _numeric(dtype: np.dtype) -> np.dtype:
    if dtype.kind not in 'biufc':
        raise pickle.UnpicklingError(f'Unsupported global: GLOBAL numpy.dtype[{dtype}]')
    return dtype


def _numpy_dtype(name: str, *flags: bool) -> np.dtype:
    return _numeric(np.dtype(name, *flags))


def _numpy_scalar(dtype: np.dtype, data: bytes) -> np.generic:
    return np.frombuffer(data, _numeric(dtype), count=1)[0]


def _numpy_array(*_: Any) -> np.ndarray:
    """An empty array, which the unpickler then fills through ``__setstate__``."""
    return np.ndarray((0,), np.int8)


@functools.cache
def safe_globals() -> tuple[tuple[Any, str], ...]:
    """The harmless types, each with the name under which a checkpoint asks for it.

    Where the named object does more than hold data, or its package is usually not installed, an
    inert object answers to its name.
    """
    numeric_types = {type(np.dtype(code)) for code in '?bhilqBHILQefdgFDG'}
    one_cycle = ('OneCycleParamScheduler', 'OneCycleLR')
    config_types = (
        'yacs.config.CfgNode',
        'addict.addict.Dict',
        'mmcv.utils.config.ConfigDict',
        'mmengine.config.config.ConfigDict',
    )
    return (
        (_ReadHistoryBuffer, 'mmengine.logging.history_buffer.HistoryBuffer'),
        (_known_attribute, 'builtins.getattr'),
        *((_OneCycleOwner, f'{param_scheduler.__name__}.{name}') for name in one_cycle),
        (np.ndarray, 'numpy.ndarray'),
        (_numpy_dtype, 'numpy.dtype'),
        *((kind, f'{kind.__module__}.{kind.__qualname__}') for kind in numeric_types),
        # NumPy 2 moved numpy.core to numpy._core; files of both ages are read by both.
        *((_numpy_array, f'numpy.{core}.multiarray._reconstruct') for core in ('core', '_core')),
        *((_numpy_scalar, f'numpy.{core}.multiarray.scalar') for core in ('core', '_core')),
        (argparse.Namespace, 'argparse.Namespace'),
        *((pathlib.PurePosixPath, f'{mod}.PosixPath') for mod in ('pathlib', 'pathlib._local')),
        # Dicts with attribute access; the unpickler fills exact dict types only.
        *((OrderedDict, name) for name in config_types),
    )


def allow_safe_globals() -> None:
    """Let every ``torch.load`` of this process build :func:`safe_globals`, MMEngine's included.

    Where PyTorch has no such list (before 2.6) this does nothing, and :func:`load_file` brings its
    own unpickler.
    """
    if _TORCH_HAS_ALLOW_LIST:
        allowed = torch.serialization.get_safe_globals()
        if getattr in allowed:  # advice against MMEngine's error on PyTorch 2.6; it opens every attribute
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals([thing for thing in allowed if thing is not getattr])
        torch.serialization.add_safe_globals(list(safe_globals()))


class _ListedUnpickler(pickle.Unpickler):
    """The same list for PyTorch before 2.6, whose own safe loader builds tensors only."""

    def find_class(self, module: str, name: str) -> Any:
        # Python 2 names, which protocol 2 writes; reading them back is the base class's business.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        listed = {
            **torch_unpickler._get_allowed_globals(),
            # What PyTorch's own list has gained since.
            '_codecs.encode': codecs.encode,
            'collections.Counter': Counter,
        }
        listed.update((path, thing) for thing, path in safe_globals())
        if f'{module}.{name}' not in listed:
            raise pickle.UnpicklingError(f'Unsupported global: GLOBAL {module}.{name}')
        return listed[f'{module}.{name}']


_LISTED_PICKLE = types.SimpleNamespace(
    __name__=__name__,
    Unpickler=_ListedUnpickler,
    UnpicklingError=pickle.UnpicklingError,
    load=lambda file, **kwargs: _ListedUnpickler(file, **kwargs).load(),
)


def _torch_load(path: Path, map_location: Any) -> Any:
    if not _TORCH_HAS_ALLOW_LIST:
        return torch.load(path, map_location=map_location, pickle_module=_LISTED_PICKLE, weights_only=False)
    allow_safe_globals()
    return torch.load(path, map_location=map_location, weights_only=True)


def _why_not_a_checkpoint(path: Path) -> Optional[str]:
    """What the file is if ``torch.save`` cannot have written it, by its first bytes."""
    with open(path, 'rb') as file:
        head = file.read(256)
    text = head.lstrip().lower()
    if not head:
        return 'is empty'
    if text.startswith(b'version https://git-lfs'):
        return 'is a git-lfs pointer, not the file itself (run "git lfs pull")'
    if text.startswith((b'<!doctype', b'<html', b'<head', b'<?xml')):
        return 'is a web page, not a checkpoint'
    if head.startswith(_ZIP_START):
        if not zipfile.is_zipfile(path):
            return 'is cut short: the end of the file is missing'
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            size = sum(entry.file_size for entry in archive.infolist())
            if size > MAX_EXPANSION * max(path.stat().st_size, 1 << 16):
                return f'declares {size} bytes of contents in a file of {path.stat().st_size}'
            if len(set(names)) < len(names):
                return 'is a zip archive with two entries of one name, of which readers take either'
            if any(name.endswith('/constants.pkl') for name in names):
                return 'is a TorchScript program, not a checkpoint'
            if not any(name.endswith('data.pkl') for name in names):
                return 'is a zip archive, but not a checkpoint'
            if any(_BYTE_ARRAY in archive.read(name) for name in names if name.endswith('data.pkl')):
                return _ASKS_FOR_MEMORY
        return None
    if len(head) < len(_LEGACY_START) and _LEGACY_START.startswith(head):
        return 'is cut short: the end of the file is missing'
    if not head.startswith(_LEGACY_START):
        return 'is not a checkpoint written by torch.save (it was not opened)'
    with open(path, 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _ASKS_FOR_MEMORY if content.find(_BYTE_ARRAY) >= 0 else None


def _refused_global(error: BaseException) -> Optional[str]:
    match = re.search(r'(?:unsupported global:?|unsupported) GLOBAL (\S+)', str(error), re.I)
    return match and match.group(1)


def load_file(path: Union[str, os.PathLike], map_location: Any = 'cpu') -> Any:
    """Read a checkpoint file; nothing in it is run.

    Args:
        path: a file written by ``torch.save``, in its zip or its older format.
        map_location: as in :func:`torch.load`. Defaults to ``'cpu'``.

    Returns:
        The saved object: tensors, plain Python data, and the types of :func:`safe_globals`.

    Raises:
        CheckpointError: in one line that names the file: it does not exist (then a
            :class:`CheckpointNotFoundError`), is no checkpoint, is cut short or damaged, or asks
            for something that is not known to be harmless.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise CheckpointError(f'checkpoint {path} is a folder, not a file')
    if not path.exists():
        raise CheckpointNotFoundError(f'checkpoint {path} does not exist')
    if not path.is_file():
        raise CheckpointError(f'checkpoint {path} is a pipe, a socket or a device, not a file')
    try:
        reason = _why_not_a_checkpoint(path)
        if reason:
            raise CheckpointError(f'{path} {reason}')
        with warnings.catch_warnings():
            # A pickle of another protocol is refused below or loads; either way no news.
            warnings.filterwarnings('ignore', message='Detected pickle protocol')
            loaded = _torch_load(path, map_location)
        reason = why_too_large(loaded, path.stat().st_size)
        if reason:
            raise CheckpointError(f'{path} {reason}')
        return loaded
    except CheckpointError:
        raise
    except MemoryError as error:
        raise CheckpointError(f'{path} does not fit into memory, or declares more than it holds') from error
    except Exception as error:
        refused = _refused_global(error)
        if refused:
            raise CheckpointError(
                f'{path} was refused: it asks for {refused}, which is not known to be harmless '
                '(a checkpoint can hide code); nothing of it was run'
            ) from None
        # What PyTorch's loader says of the file comes last, after advice on its own list.
        lines = [line.strip() for line in str(error).rpartition('WeightsUnpickler error:')[2].splitlines()]
        detail = next(filter(None, lines), '')
        raise CheckpointError(
            f'{path} cannot be read ({type(error).__name__}: {detail[:200]}); the file may be cut short or damaged'
        ) from error
