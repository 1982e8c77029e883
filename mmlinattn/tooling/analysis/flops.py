# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Count parameters, multiply-adds and activation memory of a config's model on meta tensors."""

import contextlib
import re
import weakref
from collections import Counter
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...ops import dynamic_depthwise_conv2d, hallucinated_attention
from ...utils.building import build_model
from ...utils.errors import RunError, described
from ..images import image_channels, test_size

CONV, LINEAR, PRODUCT = KINDS = ('convolution', 'linear', 'attention product')
_aten = torch.ops.aten
# Batched matmuls belong to attentions, except in F.linear (see _Functions): PyTorch uses them for non-contiguous rows.
_KIND_OF = {_aten.convolution: CONV, _aten._convolution: CONV, _aten.mm: LINEAR, _aten.addmm: LINEAR}
SHAPES = {'mmdet': (800, 1280), 'mmseg': (512, 2048), 'mmpretrain': (224, 224)}
MASK_ROIS = 100  # of MMDetection 2.x's get_flops, used by the papers; 3.x agrees except for cascades


class Cost(NamedTuple):
    """Cost of one forward pass of a model with batch size 1.

    Attributes:
        shape: Height and width of the image in pixels.
        params: Number of parameters by part (:func:`part_of`), in the order of the forward pass.
        macs: Multiply-adds by (part, kind of operation), with the kinds :data:`KINDS`.
        peak_bytes: Estimated peak memory of the activations in float32.
        notes: Conventions of the count, one line each.
    """

    shape: tuple
    params: dict
    macs: Counter
    peak_bytes: int
    notes: list

    @property
    def total_params(self) -> int:
        return sum(self.params.values())

    def total_macs(self, *kinds: str) -> int:
        """Return the multiply-adds of the given ``kinds`` of operations, or of all by default."""
        return sum(macs for (_, kind), macs in self.macs.items() if kind in (kinds or KINDS))

    @property
    def layer_macs(self) -> int:
        """Multiply-adds of convolutions and linear layers only, to compare with counters that hook layers."""
        return self.total_macs(CONV, LINEAR)


def part_of(name: str) -> str:
    """Return the part of a model (``backbone.stage1``, ``neck``, ...) that has a module or parameter ``name``."""
    stage = re.match(r'backbone\.(?:module\.)?(stages\.|patch_embeds\.|position_tables\.|out_norms\.|layer)(\d+)', name)
    if stage:  # layers of upstream's ResNet count from one
        return f'backbone.stage{int(stage[2]) + (stage[1] != "layer")}'
    head = re.match(r'roi_head\.(\w+)', name)
    return head[0] if head else name.partition('.')[0] or 'model'


def count_model(cfg: Config, shape: Optional[tuple] = None) -> Cost:
    """Count parameters, multiply-adds and activation memory of the model of a config.

    The default ``shape`` (height, width) is that of :data:`SHAPES`, or the test size of a classifier.

    Raises:
        RunError: The shape is below 32x32, or the forward pass depends on values, as meta tensors have none.
    """
    scope = cfg.get('default_scope', 'mmpretrain')
    tested = test_size(cfg) if scope == 'mmpretrain' else None
    shape = tuple(shape or tested or SHAPES.get(scope, SHAPES['mmpretrain']))
    if min(shape) < 32:
        raise RunError(f'--shape {shape[0]} {shape[1]}: expected at least 32 pixels per side.')
    try:
        with torch.device('meta'):
            model = revert_sync_batchnorm(build_model(cfg))
    except RunError:  # constructors of adapters need tensors with values
        model = revert_sync_batchnorm(build_model(cfg))
    params: Counter = Counter()
    for name, parameter in model.named_parameters():
        params[part_of(name)] += parameter.numel()
    model.to('meta')  # this separates shared parameters
    model.eval()  # not chained: distillers of MMDetection return None
    image = torch.empty(1, image_channels(cfg), *shape, device='meta')
    notes = ['one multiply-add is one operation; norms, activations, pooling and resizing are not counted']
    count = OpCounter(model)
    try:
        with torch.no_grad(), count:
            if hasattr(model, 'roi_head'):
                notes += run_two_stage(model, image)
            else:
                model(image, mode='tensor')
    except Exception as error:  # the forward pass takes data samples, or reads values
        reason = f'it does not run on an image without values ({described(error)})'
        raise RunError(f'{type(model).__name__} cannot be counted: {reason}') from error
    macs: Counter = Counter()
    for (name, kind), number in count.macs.items():
        macs[part_of(name), kind] += number
    for part in params:
        if part == 'auxiliary_head':
            notes.append('the auxiliary head has parameters but does not run at test time')
        elif part.endswith('head') and part not in {name for name, _ in macs}:
            notes.append(f'{part} did not run; its operations are missing')
    return Cost(shape, dict(params), macs, count.peak_bytes, notes)


def run_two_stage(model: Any, image: torch.Tensor) -> list:
    """Run a two-stage detector on the largest number of proposals in the config, and return notes on it. Empty features
    replace the features of pooled regions, which depend on values. ``image`` is (1, C, H, W)."""
    features = model.extract_feat(image)
    model.rpn_head(features)
    roi_head = model.roi_head
    num_rois = model.test_cfg.rpn.max_per_img
    notes = [f'RoI heads: {num_rois} proposals for boxes (test_cfg.rpn.max_per_img), {MASK_ROIS} for masks, each stage']
    pairs = [(num_rois, roi_head.bbox_head, roi_head.bbox_roi_extractor)]
    if roi_head.with_mask:
        pairs.append((MASK_ROIS, roi_head.mask_head, roi_head.mask_roi_extractor or roi_head.bbox_roi_extractor))
    for rois, heads, extractors in pairs:
        # cascades have one head and one extractor per stage
        stages = zip(heads, extractors) if isinstance(heads, nn.ModuleList) else [(heads, extractors)]
        for head, extractor in stages:
            head(features[0].new_empty(rois, extractor.out_channels, *extractor.roi_layers[0].output_size))
    return notes


# --- counting ---------------------------------------------------------------------------------------------------------


class OpCounter(TorchDispatchMode):
    """Context that counts multiply-adds by module name of ``model``, with the formulas of ``torch.utils.flop_counter``.

    Unlike in ``FlopCounterMode``, some functions count as a whole (:class:`_Functions`), memory is measured, and names
    do not depend on the first module that is called.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.macs: Counter = Counter()  # by (module name, one of KINDS), without those of submodules
        self.peak_bytes = 0  # of the activations, without workspaces inside operations
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
        if key not in self._seen:
            self._seen.add(key)
            self._live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._live_bytes -= size


class _Functions(TorchFunctionMode):
    """Function mode for functions that the counter cannot classify or should not count as executed.

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
