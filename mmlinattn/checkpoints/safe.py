# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read checkpoints without running code in them.

A checkpoint is a pickle, and a pickle can run any code. PyTorch's ``weights_only`` loader builds only the types on its
allow-list. While a file is read, this module adds the harmless types that training frameworks store in checkpoints.
"""

import argparse
import codecs
import functools
import os
import pathlib
import pickle
import re
import threading
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler

from ..utils.errors import CheckpointError, CheckpointNotFoundError

_ZIP_START = b'PK\x03\x04'
_LEGACY_START = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
# keys of the weights in a file; the first one present is used
STATE_KEYS = ('state_dict', 'model', 'model_ema', 'state_dict_ema')


def _refused(name: str) -> pickle.UnpicklingError:
    """Return the error for an object that is not known to be harmless, with its name as in PyTorch's own errors."""
    return pickle.UnpicklingError(f'GLOBAL {name}')


class _ReadHistoryBuffer(HistoryBuffer):
    """Safe replacement of MMEngine's HistoryBuffer (a log of one scalar) while a checkpoint is read.

    MMEngine's ``__setstate__`` sets any attribute, and can replace functions of all buffers; this one takes only
    numbers. Copies and pickles of an instance are plain HistoryBuffers.
    """

    def __setstate__(self, state: Any) -> None:
        log, count = (np.asarray(state[f'_{kind}_history'], float) for kind in ('log', 'count'))
        super().__init__(log, count, int(state['max_length']))

    def __reduce__(self) -> tuple:
        return HistoryBuffer, (*self.data, self.max_length)


_FUNCTIONS = {name: getattr(HistoryBuffer, name) for name in ('min', 'max', 'mean', 'current')}
_FUNCTIONS.update((name, getattr(OneCycleParamScheduler, name)) for name in ('_annealing_cos', '_annealing_linear'))


def _known_attribute(owner: Any, name: str) -> Any:
    """Replace ``getattr`` inside a checkpoint: return one of six functions of MMEngine, and raise for every other name.

    Pickle protocol 2 stores a function of a class as ``getattr(class, name)``; MMEngine's checkpoints hold the four
    statistics of its HistoryBuffer. Allowing ``getattr`` itself would give access to every attribute of every allowed
    type.
    """
    if name not in _FUNCTIONS:
        raise _refused('builtins.getattr')
    return _FUNCTIONS[name]


def _numeric(dtype: np.dtype) -> np.dtype:
    if dtype.kind not in 'biufc':
        raise _refused(f'numpy.dtype[{dtype}]')
    return dtype


def _numpy_dtype(name: str, *flags: bool) -> np.dtype:
    return _numeric(np.dtype(name, *flags))


def _numpy_scalar(dtype: np.dtype, data: bytes) -> np.generic:
    return np.frombuffer(data, _numeric(dtype), count=1)[0]


def _numpy_array(*_: Any) -> np.ndarray:
    """Return an empty array; the unpickler fills it through ``__setstate__``."""
    return np.ndarray((0,), np.int8)


def _settings(*args: Any) -> OrderedDict:
    return OrderedDict(*(arg for arg in args if isinstance(arg, dict)))


def _stand_in(name: str, make: Callable) -> type:
    """Make a replacement of a pickled class, with the full name ``name``; constructing it returns ``make(*args)``."""
    module, _, kind = name.rpartition('.')
    return type(kind, (), {'__module__': module, '__new__': lambda cls, *args: make(*args)})


@functools.cache
def safe_globals() -> list[Any]:
    """Return the harmless types and functions for the allow-list of ``torch.load(weights_only=True)``.

    Types that could do harm, and those of packages that are rarely installed, have harmless substitutes of their names.
    """
    stand_ins: dict[str, Callable] = {
        'mmengine.logging.history_buffer.HistoryBuffer': _ReadHistoryBuffer,
        'builtins.getattr': _known_attribute,
        'builtins.bytes': lambda: b'',  # empty arrays in protocol 2
        f'{OneCycleParamScheduler.__module__}.OneCycleParamScheduler': object,
        'numpy.dtype': _numpy_dtype,
        'pathlib.PosixPath': pathlib.PurePosixPath,
        'pathlib._local.PosixPath': pathlib.PurePosixPath,
        'yacs.config.CfgNode': _settings,
        'addict.addict.Dict': _settings,
        'mmcv.utils.config.ConfigDict': _settings,
        'mmengine.config.config.ConfigDict': _settings,
    }
    for core in ('core', '_core'):  # renamed in NumPy 2; either reads files of both
        stand_ins[f'numpy.{core}.multiarray._reconstruct'] = _numpy_array
        stand_ins[f'numpy.{core}.multiarray.scalar'] = _numpy_scalar
    # PyTorch itself allows codecs.encode since 2.5 and set since 2.6
    known = [_ReadHistoryBuffer, argparse.Namespace, np.ndarray, codecs.encode, set]
    known += {type(np.dtype(code)) for code in '?bhilqBHILQefdgFDG'}
    return known + [_stand_in(name, make) for name, make in stand_ins.items()]


_LIST = threading.Lock()  # one list per process: threads take turns


@contextmanager
def _listed() -> Iterator[None]:
    """Add :func:`safe_globals` to PyTorch's allow-list while the context is open.

    Entries that the process added stay allowed, except ``getattr`` and HistoryBuffer, which have safe substitutes.
    Adding ``getattr`` is a common but unsafe advice for MMEngine's error with PyTorch 2.6.
    """
    with _LIST:
        theirs = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([thing for thing in theirs if thing not in (getattr, HistoryBuffer)])
        torch.serialization.add_safe_globals(safe_globals())
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(theirs)


def _why_not_a_checkpoint(path: Path) -> Optional[str]:
    """Return a reason, read from the first bytes, why ``torch.save`` cannot have written the file; None if it may
    have."""
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
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith('/constants.pkl') for name in names):
            return 'is a TorchScript program, not a checkpoint'
        return None if any(name.endswith('data.pkl') for name in names) else 'is a zip archive, but not a checkpoint'
    if not head.startswith(_LEGACY_START):
        return 'is not a checkpoint written by torch.save (it was not opened)'
    return None


def load_file(path: Union[str, os.PathLike], map_location: Any = 'cpu', name: Optional[str] = None) -> Any:
    """Read a checkpoint file without running code in it, now or later in MMEngine.

    Args:
        path (str | Path): A file written by ``torch.save``, in its zip or its older format.
        map_location: As in :func:`torch.load`.
        name (str, optional): Name of the file in messages. Defaults to the path.

    Returns:
        dict | Tensor | ndarray: Tensors, plain Python data and the types of :func:`safe_globals`. ``meta['config']`` is
        removed, because ``Runner.resume`` would run it; MMEngine itself writes ``meta['cfg']``.

    Raises:
        CheckpointError: The file does not exist (:class:`CheckpointNotFoundError`), is no checkpoint, is cut short or
            damaged, or asks for a type that is not known to be harmless. The message is one line.
    """
    path = Path(path).expanduser()
    name = name or str(path)
    if not path.exists():
        raise CheckpointNotFoundError(f'checkpoint {name} does not exist')
    if not path.is_file():
        raise CheckpointError(f'checkpoint {name} is a folder or a device, not a file')
    try:
        reason = _why_not_a_checkpoint(path)
        if reason:
            raise CheckpointError(f'{name} {reason}')
        with warnings.catch_warnings():
            # a pickle of another protocol loads or raises below
            warnings.filterwarnings('ignore', message='Detected pickle protocol')
            with _listed():
                checkpoint = torch.load(path, map_location, weights_only=True)
        return _plain(checkpoint, name)
    except (CheckpointError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        refused = re.search(r'GLOBAL (\S+)', str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if refused:
            raise CheckpointError(
                f'{name} was refused: it asks for {refused[1]}, which is not known to be harmless '
                '(a checkpoint can hide code); nothing was run'
            ) from None
        raise CheckpointError(
            f'{name} cannot be read ({type(error).__name__}); the file may be cut short or damaged, or pickled '
            'with protocol 4 or 5'
        ) from error


def _plain(checkpoint: Any, name: str) -> Any:
    """Check a loaded checkpoint, and return it without ``meta['config']``, which MMEngine would execute.

    Attributes of its containers are deleted, as they could replace methods. A single tensor or array is returned
    unchanged. ``name`` is the file in messages.

    Raises:
        CheckpointError: The checkpoint, its ``state_dict`` or its ``meta`` is no dict, or a key is no printable string.
    """
    if isinstance(checkpoint, (torch.Tensor, np.ndarray)):  # tables of embeddings, which some models load
        return checkpoint
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f'{name} holds a {type(checkpoint).__name__}, not a state dict')
    stack, seen = [checkpoint], set()
    while stack:
        node = stack.pop()
        if isinstance(node, (dict, list, tuple, set)) and id(node) not in seen:
            seen.add(id(node))
            stack.extend(dict.values(node) if isinstance(node, dict) else node)
            # an attribute of a dict, as settings have them, could replace a method: the `pop` below
            attributes = getattr(node, '__dict__', {})
            for attribute in attributes.keys() - {'_metadata'}:
                del attributes[attribute]
    for part in ('state_dict', 'meta'):
        if not isinstance(checkpoint.get(part) or {}, dict):
            raise CheckpointError(f'{part} of {name} is a {type(checkpoint[part]).__name__}, not a dict')
    for state in (checkpoint, *map(checkpoint.get, STATE_KEYS), checkpoint.get('ema_state_dict')):
        for key in state if isinstance(state, dict) else ():
            if not isinstance(key, str) or not key.isprintable():  # keys are printed in messages
                raise CheckpointError(f'{name} has a key that is no printable string: {key!r:.80}')
    if checkpoint.get('meta'):
        checkpoint['meta'].pop('config', None)
    return checkpoint
