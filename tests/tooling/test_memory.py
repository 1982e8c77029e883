# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from mmlinattn.tooling.memory import keep_freed_memory

kept = keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**25)  # 128 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# up to 8 grow the heap: freed remainders of an alignment, of at most 7 per size, keep holes apart in glibc's cache
print(kept, min(faults() for _ in range(32)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason="of glibc's malloc")
@pytest.mark.parametrize(
    ('variables', 'expected'),
    [
        ({}, True),
        ({'MMLINATTN_KEEP_MEMORY': '0'}, False),
        ({'MALLOC_TRIM_THRESHOLD_': '131072'}, False),
        ({'GLIBC_TUNABLES': 'glibc.malloc.trim_threshold=131072'}, False),
    ],
    ids=str,
)
def test_freed_memory_is_kept(variables, expected):
    """Count page faults of a tensor of 128 MiB: none in kept memory, else one per page (4 KiB or 2 MiB)."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(('MALLOC_', 'GLIBC_', 'MMLINATTN_KEEP'))}
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM], env={**environ, **variables}, capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    assert kept == str(expected)
    assert int(faults) < 16 if expected else int(faults) >= 32
