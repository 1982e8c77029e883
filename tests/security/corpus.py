# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Files that a stranger might send as a checkpoint, one entry a file, and what may become of each.

Every file that carries code would create ``marker`` if it ran. Files derive from ``saved``, what MMEngine saves of
:class:`engine_toys.ToyModel` after one epoch.
"""

import builtins
import copy
import functools
import gzip
import importlib
import io
import json
import marshal
import operator
import os
import pickle
import runpy
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from checkpoint_helpers import Hostile, touch_when_loaded
from mmengine.logging import HistoryBuffer
from torch import nn

REFUSED, DATA = 'refused in one line', 'loaded as data'


class Entry(NamedTuple):
    """A file of the corpus.

    Attributes:
        write: ``write(path, saved, marker)`` makes the file.
        load: what reading it has to come to.
        fit: what loading it into a model through our own checks has to come to.
        resume: what resuming from it has to come to.
        suffix: of its name.
    """

    write: Callable
    load: str
    fit: str
    resume: str
    suffix: str = '.pth'


ENTRIES: dict[str, Entry] = {}


def entry(name, load=REFUSED, fit=None, resume=None, suffix='.pth'):
    fit = fit or load
    resume = resume or fit

    def add(write):
        ENTRIES[name] = Entry(write, load, fit, resume, suffix)
        return write

    return add


def saved_with(name, change, load=DATA, fit=None, resume=None, **kwargs):
    """An entry that is the saved checkpoint after ``change(checkpoint, marker)``."""

    @entry(name, load, fit, resume)
    def write(path, saved, marker):
        checkpoint = copy.deepcopy(saved)
        replaced = change(checkpoint, marker)
        torch.save(checkpoint if replaced is None else replaced[0], path, **kwargs)


def at(*keys, value):
    """A change that puts ``value``, or what ``value(marker)`` gives, at a place of the checkpoint."""

    def change(checkpoint, marker):
        node = checkpoint
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value(marker) if callable(value) and not isinstance(value, type) else value

    return change


def instead(value):
    return lambda checkpoint, marker: [value(marker) if callable(value) else value]


# Code in the pickle, by place.
for place in (
    ('state_dict', 'layer.weight'),
    ('meta', 'dataset_meta'),
    ('message_hub', 'runtime_info', 'x'),
    ('optimizer', 'state'),
    ('ema_state_dict',),
    ('anything',),
):
    saved_with(f'os.system in {".".join(place)}', at(*place, value=touch_when_loaded), REFUSED)
    saved_with(
        f'os.system in {".".join(place)}, old format',
        at(*place, value=touch_when_loaded),
        REFUSED,
        _use_new_zipfile_serialization=False,
    )
saved_with('os.system as the whole', instead(touch_when_loaded), REFUSED)

# Code in the pickle, by function.
OPEN = 'open({!r}, "w").close()'
FUNCTIONS = {
    'eval': lambda marker: Hostile(eval, OPEN.format(str(marker))),
    'exec': lambda marker: Hostile(exec, OPEN.format(str(marker))),
    'open': lambda marker: Hostile(builtins.open, str(marker), 'w'),
    'subprocess.Popen': lambda marker: Hostile(subprocess.Popen, ['touch', str(marker)]),
    'os.mkdir': lambda marker: Hostile(os.mkdir, str(marker)),
    'shutil.rmtree': lambda marker: Hostile(shutil.rmtree, str(marker.parent / 'precious')),
    '__import__': lambda marker: Hostile(__import__, 'os'),
    'importlib.import_module': lambda marker: Hostile(importlib.import_module, 'antigravity'),
    'runpy.run_path': lambda marker: Hostile(runpy.run_path, str(marker.parent / 'program.py')),
    'getattr': lambda marker: Hostile(getattr, subprocess.Popen, '__init__'),
    'getattr of a listed class': lambda marker: Hostile(getattr, HistoryBuffer, '__init__'),
    'operator.attrgetter': lambda marker: Hostile(operator.attrgetter, 'system'),
    'functools.partial': lambda marker: functools.partial(os.system, f'touch {marker}'),
    'torch.load': lambda marker: Hostile(torch.load, str(marker)),
    'pickle.loads': lambda marker: Hostile(pickle.loads, pickle.dumps(touch_when_loaded(marker))),
    'numpy.load': lambda marker: Hostile(np.load, str(marker)),
    'a module': lambda marker: nn.Linear(1, 1),
    'an array of objects': lambda marker: np.array([touch_when_loaded(marker)], dtype=object),
    'a class as data': lambda marker: subprocess.Popen,
}
for name, make in FUNCTIONS.items():
    saved_with(f'call of {name}', at('meta', 'x', value=make), REFUSED)

# Other containers of the same code.
for protocol in range(6):

    @entry(f'a plain pickle of protocol {protocol}', suffix='.pkl')
    def write(path, saved, marker, protocol=protocol):
        path.write_bytes(pickle.dumps({'state_dict': touch_when_loaded(marker)}, protocol))

    if protocol > 2:
        saved_with(
            f'torch.save by protocol {protocol}', at('x', value=touch_when_loaded), REFUSED, pickle_protocol=protocol
        )


def hostile_zip(marker, **kwargs) -> bytes:
    content = io.BytesIO()
    torch.save({'state_dict': touch_when_loaded(marker)}, content, **kwargs)
    return content.getvalue()


@entry('a tar archive of a pickle', suffix='.pth.tar')
def write_tar(path, saved, marker):
    content = pickle.dumps(touch_when_loaded(marker))
    with tarfile.open(path, 'w') as archive:
        for name in ('sys_info', 'pickle', 'storages', 'tensors'):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@entry('a checkpoint in a zip archive', suffix='.zip')
def write_zip_in_zip(path, saved, marker):
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('model/weights.pth', hostile_zip(marker))


@entry('an archive with two pickles')
def write_two_pickles(path, saved, marker):
    torch.save(saved, path)
    with zipfile.ZipFile(path, 'a') as archive, zipfile.ZipFile(io.BytesIO(hostile_zip(marker))) as hostile:
        name = next(name for name in archive.namelist() if name.endswith('/data.pkl'))
        archive.writestr(name, hostile.read('archive/data.pkl'))


@entry('a gzip of a pickle', suffix='.pth.gz')
def write_gzip(path, saved, marker):
    path.write_bytes(gzip.compress(pickle.dumps(touch_when_loaded(marker))))


@entry('a NumPy archive of objects', suffix='.npz')
def write_npz(path, saved, marker):
    np.savez(path, weights=np.array([touch_when_loaded(marker)], dtype=object))


@entry('a NumPy file of objects', suffix='.npy')
def write_npy(path, saved, marker):
    np.save(path, np.array([touch_when_loaded(marker)], dtype=object))


@entry('safetensors in name only', suffix='.safetensors')
def write_false_safetensors(path, saved, marker):
    path.write_bytes(pickle.dumps(touch_when_loaded(marker)))


@entry('safetensors', suffix='.safetensors')
def write_safetensors(path, saved, marker):
    header = json.dumps({'w': dict(dtype='F32', shape=[1], data_offsets=[0, 4])}).encode()
    path.write_bytes(struct.pack('<Q', len(header)) + header + bytes(4))


@entry('a TorchScript program', suffix='.pt')
def write_script(path, saved, marker):
    torch.jit.save(torch.jit.trace(nn.Linear(4, 1), torch.ones(1, 4)), path)


@entry('a safetensors name on torch.save', DATA, suffix='.safetensors')
def write_misnamed(path, saved, marker):
    torch.save(saved, path)


@entry('marshalled code', suffix='.pyc')
def write_marshal(path, saved, marker):
    path.write_bytes(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(compile('1', 'x', 'exec')))


@entry('a Python program')
def write_program(path, saved, marker):
    path.write_text(OPEN.format(str(marker)))


@entry('a web page')
def write_page(path, saved, marker):
    path.write_text('<!DOCTYPE html><script>alert(1)</script>')


@entry('nothing')
def write_nothing(path, saved, marker):
    path.touch()


@entry('noise')
def write_noise(path, saved, marker):
    path.write_bytes(np.random.RandomState(0).bytes(5000))


for kept in (0.0005, 0.3, 0.95):
    for form in ('zip', 'old'):

        @entry(f'{form} format cut at {kept}')
        def write_cut(path, saved, marker, kept=kept, form=form):
            torch.save(saved, path, _use_new_zipfile_serialization=form == 'zip')
            content = path.read_bytes()
            path.write_bytes(content[: int(kept * len(content)) + 1])


# What is no regular file.
@entry('a pipe')
def write_pipe(path, saved, marker):
    os.mkfifo(path)


@entry('a link to a pipe')
def write_pipe_link(path, saved, marker):
    os.mkfifo(path.with_suffix('.pipe'))
    path.symlink_to(path.with_suffix('.pipe'))


@entry('a link to a device')
def write_device(path, saved, marker):
    path.symlink_to('/dev/zero')


@entry('a link to itself')
def write_loop(path, saved, marker):
    path.symlink_to(path)


@entry('a folder')
def write_folder(path, saved, marker):
    path.mkdir()


@entry('a link to a checkpoint', DATA)
def write_link(path, saved, marker):
    torch.save(saved, path.with_suffix('.real'))
    path.symlink_to(path.with_suffix('.real'))


# What runs, or would, after the file was read.
TEXTS = {
    'a call': 'import os\nos.system("touch {marker}")\n',
    'a base': '_base_ = "{folder}/program.py"\n',
    'an import': 'custom_imports = dict(imports=["program"])\n',
    'a variable': 'x = "{{{{$NO_SUCH:";open("{marker}","w");"}}}}"\n',
}
for name, text in TEXTS.items():

    def with_text(marker, text=text):
        return text.format(marker=marker, folder=marker.parent)

    saved_with(f'meta.config with {name}', at('meta', 'config', value=with_text))
    saved_with(f'meta.cfg with {name}', at('meta', 'cfg', value=with_text))
    saved_with(f"the hub's cfg with {name}", at('message_hub', 'runtime_info', 'cfg', value=with_text))
INFO = ('message_hub', 'runtime_info')
saved_with('best_ckpt elsewhere', at(*INFO, 'best_ckpt', value=lambda marker: str(marker.parent / 'precious')))
saved_with('keep_ckpt_ids elsewhere', at(*INFO, 'keep_ckpt_ids', value=['/../../precious']))


# Data of another form than MMEngine expects.
saved_with('a list', instead([torch.ones(1)]), REFUSED)
saved_with('None', instead(None), REFUSED)
saved_with('a string', instead('weights'), REFUSED)
saved_with('an empty dict', instead({}), DATA, REFUSED)
saved_with('an empty state dict', instead({'state_dict': {}}), DATA, REFUSED)
saved_with('weights of another model', instead({'state_dict': {'w': torch.ones(2)}}), DATA, REFUSED)
saved_with('another shape', at('state_dict', 'layer.weight', value=torch.ones(2, 4)), DATA, REFUSED)
saved_with('a state dict that is a list', at('state_dict', value=[1]), REFUSED)
saved_with('a weight that is a string', at('state_dict', 'layer.weight', value='one'), DATA, REFUSED)
saved_with('meta that is a list', at('meta', value=[1]), REFUSED)
saved_with('keys that are numbers', instead({1: torch.ones(1), (2,): torch.ones(1)}), REFUSED)
saved_with('keys that clear the screen', at('state_dict', '\x1b[2J\x1b]0;x\x07', value=torch.ones(1)), REFUSED)
saved_with('a log scalar that clears the screen', at('message_hub', 'log_scalars', 'train/\x1b[2J', value=1), REFUSED)
saved_with('class names that clear the screen', at('meta', 'dataset_meta', value={'classes': ('\x1b[2J', '\x07')}))
saved_with('a key of a million parts', at('state_dict', 'module.' * 1000000, value=torch.ones(1)), REFUSED)


def nested(depth):
    node = []
    for _ in range(depth):
        node = [node]
    return node


def laughs(_):
    node = ['ha']
    for _ in range(60):
        node = [node, node]
    return node


def endless(_):
    node = []
    node.append(node)
    return node


def shadowed(_):
    state = OrderedDict(w=torch.ones(1))
    state.get = torch._utils._rebuild_tensor_v2  # on PyTorch's own list, so that it can be read
    return state


saved_with('nested 150 deep', at('meta', 'x', value=nested(150)), REFUSED)
saved_with('a list that contains itself', at('meta', 'x', value=endless), REFUSED)
saved_with('a list of two of itself, 60 times', at('meta', 'x', value=laughs), REFUSED)
saved_with('a dict with a method of its own', at('state_dict', value=shadowed), REFUSED)

# Sizes.
saved_with('a byte array of 10 TB', at('x', value=lambda _: Hostile(bytearray, 10**13)), REFUSED)
saved_with('an array of 800 GB', at('x', value=lambda _: Hostile(np.ndarray, (10**11,))), REFUSED)
saved_with('one number 2 ** 40 times', at('state_dict', 'layer.weight', value=torch.ones(1).expand(2**40)), REFUSED)
saved_with('a meta tensor of 4 EB', at('state_dict', 'x', value=torch.empty(2**60, device='meta')), REFUSED)


@entry('a compressed archive of 400 MB of zeros')
def write_bomb(path, saved, marker):
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('archive/data.pkl', pickle.dumps({}, 2))
        archive.writestr('archive/data/0', bytes(400 << 20))


@entry('a tensor of more numbers than its storage')
def write_short_storage(path, saved, marker):
    torch.save({'w': torch.ones(4096)}, path)
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, 'w') as new:
        for name, content in entries.items():
            new.writestr(name, content[:8] if name.endswith('/data/0') else content)


# Weights that are no real numbers.
KINDS = {
    'integers': torch.ones(1, 4, dtype=torch.int64),
    'truth values': torch.ones(1, 4, dtype=torch.bool),
    'complex numbers': torch.ones(1, 4, dtype=torch.complex64),
    'a sparse matrix': torch.ones(1, 4).to_sparse(),
    'a meta tensor': torch.empty(1, 4, device='meta'),
    'a quantized tensor': torch.quantize_per_tensor(torch.ones(1, 4), 0.1, 0, torch.qint8),
    'NaN': torch.full((1, 4), float('nan')),
    'infinity': torch.tensor([[1, 1, float('inf'), 1]]),
}
for name, weight in KINDS.items():
    saved_with(f'weights: {name}', at('state_dict', 'layer.weight', value=weight), DATA, REFUSED)


# Fine to load from, not to resume from.
def log_buffer(**attributes):
    buffer = HistoryBuffer([1.0], [1])
    vars(buffer).update(attributes)
    return buffer


SCHEDULE = dict(param_name='lr', last_step=1, by_epoch=True, begin=0, end=10)
for name, change in {
    'no meta': lambda checkpoint, _: [{k: v for k, v in checkpoint.items() if k != 'meta'}],
    'no hub': lambda checkpoint, _: [{k: v for k, v in checkpoint.items() if k != 'message_hub'}],
    'an epoch below zero': at('meta', 'epoch', value=-5),
    'an epoch that is text': at('meta', 'epoch', value='1; rm'),
    'an epoch beyond the end': at('meta', 'epoch', value=10**12),
    'an iteration that is a list': at('meta', 'iter', value=[1]),
    'a seed that is text': at('meta', 'seed', value='\x1b[2J'),
    'a seed below zero': at('meta', 'seed', value=-1),
    'a hub that is a list': at('message_hub', value=[]),
    'a hub without logs': at('message_hub', value=dict(runtime_info={}, resumed_keys={})),
    'a score that is text': at(*INFO, 'best_score', value='best'),
    'an optimizer that is text': at('optimizer', value='SGD'),
    'an optimizer of another model': at('optimizer', 'param_groups', value=[]),
    'a learning rate that is text': lambda checkpoint, _: checkpoint['optimizer']['param_groups'][0].update(lr='1'),
    'a learning rate of NaN': lambda checkpoint, _: checkpoint['optimizer']['param_groups'][0].update(lr=float('nan')),
    'a momentum of another shape': at('optimizer', 'state', value={0: dict(momentum_buffer=torch.ones(7))}),
    'a momentum of NaN': at('optimizer', 'state', value={0: dict(momentum_buffer=torch.full((1, 4), float('nan')))}),
    'a schedule that is text': at('param_schedulers', value=['x']),
    'a schedule with a method': at('param_schedulers', value=[dict(SCHEDULE, step=1)]),
    'a schedule of NaN': at('param_schedulers', value=[dict(SCHEDULE, base_values=[float('nan')])]),
}.items():
    saved_with(f'resume: {name}', change, DATA, DATA, REFUSED)
saved_with('a log that is a number', at('message_hub', 'log_scalars', 'train/loss', value=3))
saved_with('a log buffer of text', at('message_hub', 'log_scalars', 'x', value=log_buffer(_log_history='x')), REFUSED)
saved_with(
    'a log buffer with methods',
    at('message_hub', 'log_scalars', 'x', value=log_buffer(statistics_methods={'mean': HistoryBuffer.max}, update=1)),
)

# Files that are as they should be.
saved_with('as MMEngine saves it', lambda checkpoint, _: None)
saved_with('as MMEngine saves it, old format', lambda checkpoint, _: None, _use_new_zipfile_serialization=False)
saved_with('a bare state dict', lambda checkpoint, _: [checkpoint['state_dict']], DATA, DATA, REFUSED)
saved_with(
    'a state dict of several processes',
    lambda checkpoint, _: [{'state_dict': {f'module.{k}': v for k, v in checkpoint['state_dict'].items()}}],
    DATA,
    DATA,
    REFUSED,
)


def build(folder: Path, saved: dict, marker: Path) -> dict[str, Path]:
    """Write every file of the corpus; the names of the entries with their paths."""
    (folder / 'precious').mkdir()
    (folder / 'program.py').write_text(OPEN.format(str(marker)))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20000)  # pickling what is nested deeply
    try:
        paths = {}
        for number, (name, file) in enumerate(ENTRIES.items()):
            paths[name] = folder / f'{number}{file.suffix}'
            file.write(paths[name], saved, marker)
            # numpy adds its own suffix
            assert os.path.lexists(paths[name]), name
    finally:
        sys.setrecursionlimit(limit)
    return paths
