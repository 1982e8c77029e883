# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The private APIs of PyTorch that the package uses. Where a release lacks one, a public function replaces it."""

from typing import Any

import torch
from torch import overrides
from torch.autograd import forward_ad
from torch.fx.experimental import _config, symbolic_shapes
from torch.nn.modules import module as _module
from torch.utils._device import DeviceContext

# oneDNN's operators with a fused activation or sum, which torch.compile uses on CPUs
_mkldnn = torch.ops.mkldnn
LINEAR: Any = getattr(_mkldnn, '_linear_pointwise', None)
CONV: Any = getattr(_mkldnn, '_convolution_pointwise', None)
HAS_ONEDNN = None not in (LINEAR, CONV)
CAN_BE_SIZE_OBLIVIOUS = hasattr(_config, 'backed_size_oblivious')  # since torch 2.6


# whether oneDNN multiplies bfloat16 natively on this CPU (AVX-512 BF16, AMX)
has_bfloat16_units: Any = getattr(_mkldnn, '_is_mkldnn_bf16_supported', bool)
# how many dispatch modes, which count or record every operation, are on; the innermost torch.func transform
num_modes: Any = torch._C._len_torch_dispatch_stack
innermost_transform: Any = torch._C._functorch.peek_interpreter_stack
forward_mode: Any = forward_ad  # whose level is 0 or more where derivatives are taken forward
is_batched: Any = torch._C._functorch.is_legacy_batchedtensor  # by ``torch.autograd.grad(..., is_grads_batched=True)``
is_exporting: Any = getattr(torch.compiler, 'is_exporting', torch.compiler.is_compiling)  # since torch 2.7


def has_global_hooks() -> bool:
    """Whether every module of the process has hooks. ``_has_any_global_hook`` is newer than PyTorch 2.4."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def has_function_modes() -> bool:
    """Whether functions of PyTorch are watched or replaced; ``torch.device`` as a context does neither."""
    return any(type(mode) is not DeviceContext for mode in overrides._get_current_function_mode_stack())


def has_static_value(size) -> bool:
    """Whether a size is a number now, not something that a graph leaves open."""
    check = getattr(symbolic_shapes, 'has_static_value', None)  # since torch 2.5
    return type(size) is int if check is None else check(size)


def is_surely_above_one(size) -> bool:
    return symbolic_shapes.statically_known_true(size > 1)


def size_oblivious():
    """A context in which ``torch.export`` does not ask whether an open size is 1."""
    return _config.patch(  # type: ignore[attr-defined]
        backed_size_oblivious=True
    )


# the gradient of ReLU in one pass, into given memory
RELU_BACKWARD = torch.ops.aten.threshold_backward.grad_input
