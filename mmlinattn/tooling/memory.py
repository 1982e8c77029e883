# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import ctypes
import os

VARIABLE = 'MMLINATTN_KEEP_MEMORY'
# glibc's malloc.h: M_TRIM_THRESHOLD, and M_MMAP_MAX
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep freed memory for the next tensors, instead of returning it to the system.

    By default it returns large blocks, and each new feature map needs page faults: a fifth of the time of a
    forward pass on a CPU. ``MMLINATTN_KEEP_MEMORY=0`` and settings of malloc in the environment (``MALLOC_*``,
    ``GLIBC_TUNABLES``) leave malloc as it is. Other allocators and systems are left alone.

    Returns:
        bool: True if malloc was set.
    """
    if os.environ.get(VARIABLE) == '0' or any(name.startswith(('MALLOC_', 'GLIBC_TUNABLES')) for name in os.environ):
        return False
    try:
        libc = ctypes.CDLL('libc.so.6')
    except OSError:  # no glibc
        return False
    return bool(libc.mallopt(_MMAP_MAX, 0) and libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1))
