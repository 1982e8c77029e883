# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Count multiply-adds and peak activation memory of PyTorch code by module and kind, on CPU or meta tensors."""

import contextlib
import weakref
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...ops import dynamic_depthwise_conv2d, hallucinated_attention

CONV, LINEAR, PRODUCT = KINDS = ('convolution', 'linear', 'attention product')
_aten = torch.ops.aten
# Batched matmuls belong to attentions, except in F.linear (see _Functions): PyTorch uses them for non-contiguous rows.
_KIND_OF = {_aten.convolution: CONV, _aten._convolution: CONV, _aten.mm: LINEAR, _aten.addmm: LINEAR}


class OpCounter(TorchDispatchMode):
    """Context that counts multiply-adds by module name, with the formulas of ``torch.utils.flop_counter``.

    Unlike in ``FlopCounterMode``, some functions count as a whole (:class:`_Functions`), memory is measured, and names
    do not depend on the first module that is called.

    Args:
        model (nn.Module): Model that gives the names of its modules.

    Attributes:
        macs (Counter): Multiply-adds by (module name, kind), without those of submodules; for kinds see :data:`KINDS`.
        peak_bytes (int): Peak of the activations in bytes, without workspaces inside operations.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.macs: Counter = Counter()
        self.peak_bytes = 0
        self.kind_of_product = PRODUCT
        self._live_bytes = 0
        self._seen: set[int] = set()
        self._names = ['']
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        names = {module: name for name, module in self.model.named_modules()}

        def enter(module, args):
            self._names.append(names.get(module, self._names[-1]))

        def leave(module, args, out):
            self._names.pop()

        self._stack.callback(register_module_forward_pre_hook(enter).remove)
        self._stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        self._seen |= {t.untyped_storage()._cdata for t in (*self.model.parameters(), *self.model.buffers())}
        self._stack.enter_context(_Functions(self))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        return self._stack.__exit__(*error)

    def add(self, kind: str, macs: int) -> None:
        self.macs[self._names[-1], kind] += macs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry:
            operations = flop_registry[packet](*args, **kwargs, out_val=out)  # two a multiply-add
            self.add(_KIND_OF.get(packet, self.kind_of_product), operations // 2)
        elif str(packet) == 'torchvision.deform_conv2d':
            self.add(CONV, out.numel() * args[1][0].numel())
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor)
        return out

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._live_bytes -= size


class _Functions(TorchFunctionMode):
    """Function mode for functions with operations that the counter cannot classify or should not count as executed.

    - Every matmul inside ``linear`` counts as a linear layer.
    - ``scaled_dot_product_attention`` counts as the fused kernel: two matmuls, and no N x N attention map in memory.
      PyTorch would build it on meta tensors.
    - Hallucinated attention counts as in its paper, which builds the attention maps: two matmuls, a 3x3 convolution of
      half of them (intra-head), and a mixture of all (cross-head).
    - A convolution with predicted kernels counts as an ordinary convolution.
    """

    def __init__(self, count: OpCounter) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            self.count.kind_of_product = LINEAR
            out = func(*args, **kwargs)
            self.count.kind_of_product = PRODUCT
            return out
        if func is dynamic_depthwise_conv2d:
            x, kernels = args
            self.count.add(CONV, x.numel() * kernels.shape[-1] ** 2)
            return x.new_empty(x.shape)
        if func not in (F.scaled_dot_product_attention, hallucinated_attention):
            return func(*args, **kwargs)
        q, k, v = (*args, *map(kwargs.get, ('query', 'key', 'value')[len(args) :]))[:3]
        each = q.shape[-1] + v.shape[-1]  # multiply-adds of a query and a key
        if func is hallucinated_attention:
            half = args[3] // 2
            each += 9 * half if kwargs['intra'] is not None else 0
            each += half**2 if kwargs['cross'] is not None else 0
        self.count.add(PRODUCT, q.shape[:-1].numel() * k.shape[-2] * each)
        return q.new_empty((*q.shape[:-1], v.shape[-1]))
