# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch


def is_traced() -> bool:
    """Whether a graph is being recorded (``torch.compile``, ``torch.export``, ``torch.jit.trace``).

    It is to hold the plain forms, which compilers fuse: nothing that writes into given memory or brings its own
    gradients.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
