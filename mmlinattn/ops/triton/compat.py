# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Which releases of Triton the kernels work with, and what is asked of them in different ways."""

import subprocess
import traceback
from typing import Optional

import triton
from torch.torch_version import TorchVersion

OLDEST = '3.0'  # comes with PyTorch 2.4


@triton.jit
def _nothing():
    pass


# ``triton.knobs`` says so since Triton 3.4, what ``triton.jit`` made says so in every release
INTERPRETED = not isinstance(_nothing, triton.JITFunction)


def too_old() -> Optional[str]:
    """Why this Triton does not serve, None if it does."""
    version = TorchVersion(triton.__version__)  # compared number by number
    return f'Triton {version} is older than {OLDEST}' if version < OLDEST else None


def is_compile_error(error: Exception) -> bool:
    """Whether Triton, or the compilers that it calls, say that a kernel cannot be had here.

    Errors of the GPU, of PyTorch's allocator, of a graph that is being captured, and of other code are none.
    """
    if isinstance(error, triton.TritonError):
        return True
    # passes of LLVM, a missing ptxas, C compiler or cache folder: errors of Python, which say by their place what
    # they are about
    if not isinstance(error, (RuntimeError, OSError, subprocess.CalledProcessError)):
        return False
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    places = {(frame.f_globals.get('__name__'), frame.f_code.co_name) for frame in frames}
    return ('triton.compiler.compiler', 'compile') in places or any(
        module == 'triton.runtime.build' for module, _ in places
    )
