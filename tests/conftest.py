# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Fixtures of all tests. Helpers are the package ``helpers`` beside this file."""

import contextlib
import ctypes
import functools
import gc
import multiprocessing
import random
import sys
from types import SimpleNamespace

import mmengine.config.config as config_module
import mmengine.config.utils as config_utils
import mmengine.runner.loops as loops_module
import mmengine.runner.runner as runner_module
import numpy as np
import pytest
import torch
from mmengine.utils import ManagerMixin
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from mmlinattn import ops


def forget_instances(kind=ManagerMixin) -> None:
    """Clear MMEngine's instances by name: default scope, loggers, message hubs, visualisers."""
    for child in kind.__subclasses__():
        child._instance_dict.clear()
        forget_instances(child)


def end_workers() -> None:
    """Shut down the workers of unread loaders. In a garbage cycle, each takes five seconds to end."""
    if multiprocessing.active_children():
        for kept in gc.get_objects():
            if type(kept) is _MultiProcessingDataLoaderIter:
                kept._shutdown_workers()


class SignalStack(ctypes.Structure):
    """``stack_t`` of Linux: the stack of signal handlers of a thread."""

    _fields_ = [('sp', ctypes.c_void_p), ('flags', ctypes.c_int), ('size', ctypes.c_size_t)]


@contextlib.contextmanager
def kept_signal_stack():
    """Restore the stack of signal handlers at the end of this context.

    OpenVINO's kernels for bfloat16 replace it by memory that they unmap: the next signal with a handler, of a loader
    worker that ends for example, would kill the process without a word.
    """
    if sys.platform != 'linux':
        yield
        return
    set_stack, kept = ctypes.CDLL(None).sigaltstack, SignalStack()
    set_stack(None, ctypes.byref(kept))
    yield
    set_stack(ctypes.byref(kept), None)


@pytest.fixture(autouse=True)
def independent():
    """Start each test with the same random seed, without a default scope or workers."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with kept_signal_stack():
        yield
    end_workers()
    # a Runner of the same config in the same second would take them for its own, with this test's closed output
    forget_instances()


@pytest.fixture
def fast_forms():
    """Test the fast backends also under ``MMLINATTN_OPS=reference``."""
    with ops.use('auto'):
        yield


# for each upstream base of a config MMEngine reads the project's whole model index, over a second, and imports
# pkg_resources again
config_utils.load = functools.cache(config_utils.load)
config_module.is_installed = functools.cache(config_module.is_installed)
# each Runner asks compilers for their versions, in processes of their own
runner_module.collect_env = functools.cache(runner_module.collect_env)


# compilers, exporters and configs make so many objects that looking for cycles among them took an eighth of the time
gc.set_threshold(100_000, 50, 100)


def pytest_collection_finish(session):
    """Freeze imported objects, as MMEngine's data sets collect garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    """Run slow tests last, and the longest files first, so that the processes end together."""
    if 'exhaustive' not in config.option.markexpr:
        left = [item for item in items if item.get_closest_marker('exhaustive')]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    longest = 'test_pairs', 'test_swap', 'test_stopping', 'test_rounds'
    items.sort(key=lambda item: (bool(item.get_closest_marker('slow')), item.path.stem not in longest))


# iteration-based loops sleep for two seconds before each epoch of their loader
loops_module.time = SimpleNamespace(sleep=lambda seconds: None)
