# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""One-line errors and clean exit of the command-line tools."""

import errno
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any, Optional

import torch
from mmengine.registry import DATA_SAMPLERS, Registry

from ..engine.data.coco import load_coco
from ..engine.runner import leave_process_group
from ..utils.errors import RunError, closest, described, meant, printable, raising_object, say_last
from ..utils.files import PACKAGE
from ..utils.quietness import log_level
from .memory import keep_freed_memory
from .settings import accepted, takers

INTERRUPTED = 128 + signal.SIGINT  # exit status, as shells count


@contextmanager
def one_line_errors():
    """Print a RunError or CheckpointError as one line, without traceback, and exit with status 1."""
    try:
        yield
    except RunError as error:
        say_last(f'error: {printable(error)}')
        # Not sys.exit: waiting for data-loader workers and process groups could hang here.
        raise SystemExit(1) from None


@contextmanager
def quiet():
    """Silence warnings and logs of upstream models, exporters and tracers inside this context."""
    with warnings.catch_warnings(), log_level(logging.CRITICAL, logging.getLogger()):
        warnings.simplefilter('ignore')
        yield


@contextmanager
def writing(path, name: str = '--out'):
    """Convert an OSError inside this context to a RunError with the path and its name on the command line."""
    try:
        yield
    except OSError as error:
        raise RunError(f'{name} {str(path)!r} cannot be written: {error.strerror}.') from error


def check_out_file(out, *sources, name: str = '--out') -> None:
    """Make the folder of an output file before a tool works on ``sources``. Raise a RunError if ``out`` is a folder or
    one of ``sources``, or cannot be written. An existing file is not changed. ``name`` is that of the argument."""
    out = Path(out)
    for source in filter(os.path.exists, sources if out.exists() else ()):
        if out.samefile(source):
            raise RunError(f'{name} {str(out)!r} is {str(source)!r}, which is read; it would be lost.')
    with writing(out, name):
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent) if not out.exists() else out.open('ab'):
            pass


def console_command() -> str:
    """Return the command ``mmlinattn`` of this Python, or ``python -m mmlinattn`` if it is not on the path."""
    found = shutil.which('mmlinattn')
    is_own = found is not None and Path(found).parent == Path(sys.executable).parent
    return 'mmlinattn' if is_own else f'{sys.executable} -m mmlinattn'


def check_display(name: str = '--show') -> None:
    """Raise a RunError without a display: OpenCV would abort the process, and matplotlib wait for ever. ``name`` is the
    argument or setting that needs it."""
    if sys.platform == 'linux' and not (os.environ.get('DISPLAY') or os.environ.get('WAYLAND_DISPLAY')):
        raise RunError(f'{name}: there is no display (DISPLAY is not set).')


def check_device(name: Optional[str]) -> None:
    """Raise a RunError if the value of ``--device`` is no device, or this machine lacks it."""
    try:
        if name:
            torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise RunError(f'--device={name!r}: {described(error).splitlines()[0]}') from error


def notice(message: str) -> None:
    """Print one line to stderr, from one process per machine."""
    if int(os.environ.get('LOCAL_RANK', 0)) == 0:
        print(f'notice: {message}', file=sys.stderr, flush=True)


@contextmanager
def clean_end():
    """Context for the main function of a tool: keep freed memory; at the end, also by error or signal, end workers and
    process group.

    After Ctrl-C, print one line with the path of the last checkpoint and exit with status 130. Errors are raised again.
    A training sets ``work_dir`` of the yielded object, and ``since`` to 0 if it resumes from older checkpoints.
    """
    keep_freed_memory()
    run = SimpleNamespace(work_dir=None, since=time.time())
    try:
        yield run
        leave_process_group(failed=False)
    except BaseException as error:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler raises an error for each dead worker
        for child in multiprocessing.active_children():  # PyTorch would wait up to 5 s for each data-loader worker
            child.kill()
            child.join(5)
        leave_process_group(failed=True)
        if not isinstance(error, KeyboardInterrupt):
            raise
        if int(os.environ.get('RANK', os.environ.get('SLURM_PROCID', 0))) == 0:
            first = f'no checkpoint was written to {run.work_dir!r} yet; the same command starts again.'
            state = _resuming(run.work_dir, run.since) or first
            say_last(f'interrupted: {state}' if run.work_dir else 'interrupted.')
        raise SystemExit(INTERRUPTED) from None


# remedies by the type of an error of upstream, the prefix of a module near the end of its traceback, and words of it;
# {name} is a local variable, or an attribute of self, in the traceback
ADVICE = {
    (ValueError, 'torch.nn.modules.batchnorm', 'Expected more than 1 value per channel'): (
        'BatchNorm cannot train on one image whose map is one pixel. Set train_dataloader.drop_last=True if the last '
        'batch of an epoch has one image, else a larger train_dataloader.batch_size, or a norm_cfg of another type, '
        'such as GN'
    ),
    (AssertionError, 'mmseg.models.data_preprocessor', 'The image size in a batch should be the same'): (
        'Images of one batch differ in size. Set batch_size=1 in val_dataloader and test_dataloader, or resize to one '
        'size in the pipeline'
    ),
    (RuntimeError, 'torch.utils.data._utils.collate', 'stack expects each tensor to be equal size'): (
        'Images of one batch differ in size. Set batch_size=1 in that dataloader, or resize or crop to one size in the '
        'pipeline'
    ),
    (ValueError, 'mmseg.datasets', 'is not a subset of classes'): (
        "metainfo.classes can only choose among the classes of this data set. For others set type='BaseSegDataset' of "
        'each data set (with reduce_zero_label=True if 0 is no class)'
    ),
    (KeyError, 'mmseg.evaluation', 'gt_sem_seg'): (
        'The images have no masks: add LoadAnnotations to the pipeline, or set test_evaluator.format_only=True and '
        'output_dir to write predictions only, as demo.py does'
    ),
    (RuntimeError, '', 'selected index k out of range'): (  # raised by an operator
        'The detector has fewer boxes: lower max_per_img or max_per_image in its test_cfg'
    ),
    (ValueError, 'mmpretrain.evaluation', 'accuracy is unavailable since the number of categories'): (
        'Set topk=(1,) in val_evaluator, test_evaluator and the head'
    ),
    (ValueError, 'mmdet.evaluation', 'inhomogeneous shape'): (
        "metric='proposal_fast' of CocoMetric fails with NumPy 1.24 and newer: set metric='proposal'"
    ),
    (IndexError, 'mmdet.evaluation', 'list index out of range'): (
        'num_classes of the head is more than the categories of the annotation file that metainfo.classes names: set '
        'it to their number in each head, or name all classes'
    ),
    (TypeError, 'mmengine.optim', 'None is not a callable object'): (
        'optim_wrapper.optimizer={optimizer_cfg}: type is no known optimizer'
    ),
    (KeyError, 'mmcv.cnn.bricks', 'Cannot find None in registry'): (
        'type={layer_type} of a layer, such as norm_cfg, is in no registry'
    ),
    (TypeError, 'mmcv.image', 'Scale must be a number or tuple of int'): (
        'A scale is a list; write it in brackets, scale="(96,96)"'
    ),
    (ValueError, 'mmengine.optim', 'base_wd should not be None'): (
        'paramwise_cfg has *_decay_mult: set optim_wrapper.optimizer.weight_decay, too'
    ),
    (RuntimeError, 'torch.nn.functional', 'weight tensor should be defined'): (
        'class_weight of a loss: expected a number for each class of its head'
    ),
    (AssertionError, 'mmpretrain.', 'Cannot generate one-hot format labels'): (
        'Mixed images need data_preprocessor=dict(num_classes=...), the number of the head'
    ),
    (TypeError, 'mmengine.registry', "unexpected keyword argument 'pretrained'"): (
        'Weights of a backbone go into its init_cfg=dict(type="Pretrained", checkpoint=...)'
    ),
    (Exception, 'mmcv.image', '!_src.empty()'): (
        'OpenCV cannot read an image. If a transform of your own reads them, leave --show-dir out'
    ),
    (IndexError, 'torch.nn.functional', 'is out of bounds.'): (
        'A label is beyond num_classes of the head: in a mask that DataCheckHook did not open '
        '(custom_hooks.DataCheckHook.num_images=100000 opens more, and names the file), or as padding, if '
        'data_preprocessor.seg_pad_val differs from ignore_index'
    ),
    (IndexError, 'mmseg.models.losses', 'is out of bounds for dimension'): (
        "MMSegmentation 1.2's CrossEntropyLoss looks ignored pixels, and padding, up in class_weight: leave it out, or "
        'use FocalLoss'
    ),
}
_NEAR = 4  # innermost frames of a traceback that are searched for the module


def _modules(error: BaseException) -> list[str]:
    return [str(frame.f_globals.get('__name__', '')) for frame, _ in walk_tb(error.__traceback__)]


def _values(error: BaseException, *names: str) -> Iterator[Any]:
    """Yield the local variables, and attributes of ``self``, of these names in a traceback, innermost frame first."""
    for frame, _ in reversed([*walk_tb(error.__traceback__)]):
        for known in (frame.f_locals, getattr(frame.f_locals.get('self'), '__dict__', {})):
            yield from (known[name] for name in names if name in known)


def advice_for(error: BaseException) -> str:
    """Return the remedy of :data:`ADVICE` for an error, or ''."""
    for (kind, origin, words), remedy in ADVICE.items():
        if not isinstance(error, kind) or words not in str(error):
            continue
        if any(name.startswith(origin) for name in _modules(error)[-_NEAR:]):
            return re.sub(r'\{(\w+)\}', lambda found: repr(next(_values(error, found[1]), None)), remedy)
    return ''


def _spelling(error: BaseException, kinds: list) -> str:
    """Return the remedy of an unknown argument of the classes ``kinds``, or of an unknown registered name; or ''."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if found and found[1] == '_delete_':
        return 'It goes into a dict that replaces one of the same key in _base_; take it out elsewhere'
    registry = next((each for each in _values(error, 'registry') if isinstance(each, Registry)), None)
    if found and found[1] == 'seed' and registry is not None and registry.name == DATA_SAMPLERS.name:
        return 'MMEngine passes seed to each sampler: add it to the arguments of the class'
    if found:
        name, kind = found[1], kinds[0] if kinds else None
        near, others = (closest(name, accepted(kind)[0]), takers(name, kind)) if kind else (None, [])
        parts = [f'{name!r} is an argument of {", ".join(others)}.'] if others else []
        of_type = 'Of a dict whose type you changed, _delete_=True leaves out the keys of the inherited type'
        return ' '.join([f'Did you mean {near!r}?', *parts] if near else [*parts, of_type])
    found = re.match(r'(\S+) is not in the \S+ registry', str(error.args[0]) if error.args else '')
    if not found or registry is None:
        return ''
    name = found[1].rpartition('.')[2]
    scopes = [part.scope for part in registry.root.children.values() if name in part.module_dict]
    if scopes:
        return f'It is of another project: write {scopes[0]}.{name}'
    near_by = [registry, *registry.children.values(), *filter(None, [registry.parent])]
    return meant(name, {known for each in near_by for known in each.module_dict}).strip()


def _resuming(work_dir: Optional[str], since: float = 0.0) -> str:
    """Name the last checkpoint of a work dir if ``last_checkpoint`` was written after ``since``, or return ''."""
    with suppress(OSError, ValueError, TypeError):
        pointer = Path(str(work_dir), 'last_checkpoint')
        if work_dir is not None and pointer.stat().st_mtime >= since - 1:  # file systems round down
            path = pointer.read_text().strip()
            return f'the last checkpoint is {path!r}; the same command with --resume continues.' if path else ''
    return ''


def world_error(error: BaseException) -> str:
    """Describe an error of files, memory, processes or loading data in the middle of a run; '' for other errors."""
    text, modules = str(error), _modules(error)
    if isinstance(error, RuntimeError) and text.startswith('DataLoader worker (pid'):
        return (
            f'{text.splitlines()[0]} The system killed a loader worker, mostly for memory: set num_workers or '
            'batch_size lower, or give /dev/shm more room'
        )
    if re.match(r'Caught (\w+) in DataLoader worker process \d+\.\n', text):  # then the traceback of the worker
        last = next((line for line in reversed(text.splitlines()) if line.strip()), '')
        places = re.findall(r'File "([^"]+)", line (\d+), in (?!wrapper|__call__|fetch|<)(\w+)', text)
        where = '{}:{}, {}'.format(*places[-1]) if places else 'a worker'
        return f'loading data failed: {last} (at {where}, in a loader worker)'
    if any(name.startswith('torch.utils.data._utils.fetch') for name in modules):
        infos = [each for each in _values(error, 'results', 'data_info') if isinstance(each, dict)]
        path = next((f', image {each["img_path"]}' for each in infos if isinstance(each.get('img_path'), str)), '')
        return f'loading data failed: {described(error)} (in {raising_object(error)}{path})'
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return f'{described(error).splitlines()[0]} Set a smaller batch_size, --amp, or with_cp=True of the backbone'
    if isinstance(error, OSError):
        return described(error)
    is_group = any(name.startswith('torch.distributed') for name in modules) and isinstance(error, RuntimeError)
    return f'a process of the run was lost: {described(error).splitlines()[0]}' if is_group else ''


def _building_message(error: BaseException, building: list, runner: Any) -> str:
    """Describe an error in the set-up of a run; ``building`` are the frames of MMEngine's builders in its traceback."""
    innermost = [kind for kind in (frame.f_locals.get('obj_cls') for frame in building) if kind is not None][-1:]
    text = ': '.join([*(getattr(kind, '__name__', str(kind)) for kind in innermost), described(error)])
    if runner is not None and not building:
        text += f' (in {raising_object(error)})'
    *_, (raising, _) = walk_tb(error.__traceback__)
    # an error in the constructor of the object itself, and not of what it reads by
    is_argument = isinstance(error, FileNotFoundError) or (
        raising.f_code.co_name == '__init__' and type(raising.f_locals.get('self')) in innermost
    )
    # the annotation file or class folder that was being read
    read = () if is_argument else _values(error, 'local_path', 'ann_file', 'data_prefix')
    paths = (path.get('img_path') if isinstance(path, dict) else path for path in read)
    file = next((path for path in paths if isinstance(path, str) and os.path.exists(path)), '')
    is_coco = file and innermost and hasattr(innermost[0], 'COCOAPI')  # MMDetection's data sets in COCO's layout
    content, problem = load_coco(file) if is_coco else ({}, '')
    if file:
        text += f'; {file} {problem}' if problem else f', in reading {file}'
    if 'need at least one array to concatenate' in text:  # MMEngine's serialisation
        dataset = next((each for each in _values(error, 'self') if hasattr(each, 'data_prefix')), None)
        values = [(key, getattr(dataset, key, None)) for key in _SELECTING]
        choice = ', '.join(f'{key}={value!r:.150}' for key, value in values if value) or 'its settings'
        kind = f'{innermost[0].__name__}: ' if innermost else ''
        names = ', '.join(str(each.get('name')) for each in content.get('categories', ()))
        text = f'{kind}the data set holds no image with {choice}'
        text += f'; the categories of {file} are {names:.300}' if names else ''
    near = _spelling(error, innermost)
    return f'{text}. {near}' if near else text


_SELECTING = ('data_prefix', 'img_suffix', 'ann_file', 'filter_cfg', 'metainfo')  # settings that choose images


def _setup_message(error: BaseException, config: str, whole: bool, work_dir: Optional[str], runner: Any) -> str:
    """Return the line for an error, or '' to raise it unchanged; arguments as of :func:`setup_errors`."""
    advice = advice_for(error)
    if advice:
        return f'{config}: {described(error).splitlines()[-1]}. {advice}.'
    # MMEngine's builders: build_from_cfg, Runner.build_train_loop and so on
    codes = [(frame, frame.f_code) for frame, _ in walk_tb(error.__traceback__)]
    building = [each for each, code in codes if 'mmengine' in code.co_filename and code.co_name.startswith('build_')]
    if not (whole or building):
        world = world_error(error)
        if world:
            text = '; '.join(filter(None, (world, _resuming(work_dir))))
            return f'{config}: {text} (MMLINATTN_TRACEBACK=1 shows where)'
        if isinstance(error, ValueError) and Path(codes[-1][1].co_filename).is_relative_to(PACKAGE):
            return f'{config}: {error}'
        if getattr(runner, 'has_stepped', True):
            return ''
    text = _building_message(error, building, runner)
    return f'{config} cannot be run: {text} (MMLINATTN_TRACEBACK=1 shows where)'


@contextmanager
def setup_errors(config: str, whole: bool = True, work_dir: Optional[str] = None, runner: Any = None):
    """Convert an error in the set-up of a run to a RunError of one line: the error, then a remedy if one is known.

    MMEngine raises errors of any type while it builds a model, data set, optimizer or hook from wrong arguments.

    Args:
        config (str): The config file, for messages.
        whole (bool): Convert all errors. If False, only errors while MMEngine builds something, errors in
            :data:`ADVICE`, errors of :func:`world_error`, and ValueErrors of this package are converted.
        work_dir (str, optional): Folder of a training. Errors of :func:`world_error`, and a notice before unchanged
            errors, name its last checkpoint.
        runner (ToolRunner, optional): Convert all errors until its first iteration is done.

    Raises:
        RunError: The message names the class under construction, if any, and the reason. With ``MMLINATTN_TRACEBACK=1``
            the error is raised unchanged.
    """
    try:
        yield
    except RunError as error:
        advice = advice_for(error.__cause__) if error.__cause__ else ''
        if advice and advice not in str(error):
            raise RunError(f'{error} {advice}.') from error.__cause__
        raise
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # MMEngine turns one in formatting into a SyntaxError
            raise error.__context__ from None
        if os.environ.get('MMLINATTN_TRACEBACK') == '1':
            raise
        message = _setup_message(error, config, whole, work_dir, runner)
        if message:
            raise RunError(message) from error
        last = _resuming(work_dir)
        if last:
            notice(last)
        raise
