# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Time, peak memory and work of a callable; nothing in here knows a model."""

import gc
import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Optional

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

MIB = 2**20


def interleaved_times(
    calls: dict[str, Callable], repeats: int, device: str = 'cpu', clock: Callable = time.perf_counter
) -> dict[str, float]:
    """Return the median seconds of each call.

    The calls take turns, so that load by other programs affects all of them. With one thread,
    ``clock=time.process_time`` leaves out other programs.
    """
    seconds = defaultdict(list)
    for call in calls.values():
        call()  # warm-up: kernels chosen, memory mapped
    for _ in range(repeats):
        for name, call in calls.items():
            synchronise(device)
            start = clock()
            call()
            synchronise(device)
            seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def interleaved_minima(
    cases: dict[str, tuple[Callable, Callable]], repeats: int, max_seconds: float
) -> dict[str, float]:
    """Return the shortest seconds of each call, for shared machines: interruptions only make a call longer.

    Args:
        cases: By name, a function that makes the argument of the call, untimed, and the call.
        repeats: Rounds, after one to warm up; the calls take turns.
        max_seconds: No further round of a case that has taken this long in all.
    """
    shortest, total = {}, dict.fromkeys(cases, 0.0)
    for i in range(repeats + 1):
        for name, (prepare, call) in cases.items():
            if i > 1 and total[name] > max_seconds:
                continue
            argument = prepare()
            start = time.perf_counter()
            call(argument)
            seconds = time.perf_counter() - start
            total[name] += seconds
            # the first is the warm-up: kernels chosen, memory mapped
            shortest[name] = min(seconds, shortest.get(name, seconds)) if i != 1 else seconds
    return shortest


def synchronise(device: str) -> None:
    if device == 'cuda':
        torch.cuda.synchronize()


def matmul_call(device: str, dtype: torch.dtype, size: Optional[int] = None):
    """Return a function that multiplies two large matrices, and its number of multiply-adds.

    Its time tells the speed of the machine. ``size`` is the number of rows and columns; by default it suits the device.
    """
    size = size or (8192 if device == 'cuda' else 1536)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return (lambda: a @ b), size**3


# --- fresh processes ----------------------------------------------------------------------------

# glibc's malloc, by environment variables that it reads when a process starts
KEEP_MEMORY = dict(MALLOC_MMAP_THRESHOLD_=str(2**33), MALLOC_TRIM_THRESHOLD_=str(2**34), MALLOC_TOP_PAD_=str(2**26))
RETURN_MEMORY = dict(MALLOC_MMAP_THRESHOLD_=str(2**16), MALLOC_TRIM_THRESHOLD_=str(2**16), MALLOC_ARENA_MAX='1')


@contextmanager
def fresh_process(environment: Optional[dict] = None) -> Iterator[Callable]:
    """Context that starts a process with additional environment variables, and yields a function that calls functions
    in it."""
    # a fork would inherit our memory, and malloc as it was configured
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn')) as pool:

        def call(function: Callable, *arguments):
            # the process starts with the first call and takes the variables that are set then
            before = dict(os.environ)
            os.environ.update(environment or {})
            try:
                future = pool.submit(function, *arguments)
            finally:
                os.environ.clear()
                os.environ.update(before)
            return future.result()

        yield call


def in_fresh_process(function: Callable, *arguments, environment: Optional[dict] = None):
    """Call a module's function in a new process with more environment variables, and return its result."""
    with fresh_process(environment) as call:
        return call(function, *arguments)


# --- memory -------------------------------------------------------------------------------------


def _status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path('/proc/self/status').read_text().splitlines():
        if line.startswith(field + ':'):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _reset_high_water() -> bool:
    """Forget the largest resident size so far (Linux). Return False if that is not allowed."""
    try:
        Path('/proc/self/clear_refs').write_text('5')
    except OSError:
        return False
    return True


def _rss_growth(prepare: Callable, arguments: tuple, threads: int) -> int:
    torch.set_num_threads(threads)
    small, large = prepare(*arguments)
    small()  # libraries and thread pools are loaded and started at a size that needs little memory
    gc.collect()
    if _reset_high_water():
        before = _status('VmRSS')
        large()
        return _status('VmHWM') - before
    unit = 1 if platform.system() == 'Darwin' else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    large()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before


def peak_rss(prepare: Callable, arguments: tuple, threads: int) -> int:
    """Return the largest growth of the resident memory during a call in bytes, measured in a new process.

    Weights, inputs, code and thread stacks are there before and do not count. Outputs, temporaries, copies of
    weights and gradients do. malloc gives freed memory back at once: the amount it would keep varies by a fifth from
    run to run.

    Args:
        prepare: A function of a module, called with ``arguments`` in the new process; returns a call of small size to
            warm up with, and the call to measure.
        arguments: Picklable.
        threads: Threads of PyTorch.
    """
    return in_fresh_process(_rss_growth, prepare, arguments, threads, environment=RETURN_MEMORY)


def peak_cuda(call: Callable) -> int:
    """Return the largest growth of allocated CUDA memory during a call in bytes."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# --- work -------------------------------------------------------------------------------------


def multiply_adds(build: Callable[[], torch.nn.Module], *shape: int) -> int:
    """Count the multiply-adds of matrix products, convolutions and attention in a forward pass.

    Nothing is computed: only shapes pass through the model that ``build`` returns.
    """
    # the reference of softmax attention consists of operations that the counter knows
    with FakeTensorMode(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model = build().eval()
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(shape))
    return counter.get_total_flops() // 2


# the first hit counts, in this order
GROUPS = {
    'softmax attention': ('scaled_dot_product', 'flash_attention', 'efficient_attention'),
    'matrix products': ('::mm', '::addmm', '::bmm', '::baddbmm', '::linear', '_linear_pointwise'),
    'convolutions': ('conv',),
    'norms': ('_norm', 'batch_norm', 'layer_norm'),
    'copies': ('copy', 'clone', 'cat', 'stack', 'contiguous', '::pad', '::_to', '::to', 'fill_'),
}


def group_of(name: str, shapes: Optional[list]) -> str:
    for group, parts in GROUPS.items():
        if any(part in name for part in parts):
            if group == 'convolutions':
                weights = [s for s in shapes or [] if len(s) == 4]
                depthwise = any(s[1] == 1 and s[0] > 1 and s[2] > 1 for s in weights)
                return 'depth-wise convolutions' if depthwise else 'dense convolutions'
            return group
    return 'element-wise and reductions'


def breakdown(call: Callable, device: str = 'cpu') -> dict[str, float]:
    """Profile a call, and return the fraction of its time in each group of operations, largest first."""
    activities = [ProfilerActivity.CPU]
    if device == 'cuda':
        activities.append(ProfilerActivity.CUDA)
    call()
    with profile(activities=activities, record_shapes=True) as profiler:
        call()
        synchronise(device)
    total = defaultdict(float)
    field = 'self_device_time_total' if device == 'cuda' else 'self_cpu_time_total'
    for event in profiler.key_averages(group_by_input_shape=True):
        # on CUDA the operator that launched a kernel carries its time; kernels are listed besides
        if event.key.startswith('aten::') or device == 'cpu':
            total[group_of(event.key, event.input_shapes)] += getattr(event, field)
    whole = sum(total.values()) or 1.0
    return {g: t / whole for g, t in sorted(total.items(), key=lambda item: -item[1])}
