# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Count parameters, multiply-adds and activation memory of a config's model on meta tensors."""

import re
from collections import Counter
from typing import Any, NamedTuple, Optional

import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from torch import nn

from ...utils.building import build_model
from ...utils.errors import RunError, described
from ..images import image_channels, test_size
from .counting import CONV, KINDS, LINEAR, OpCounter

SHAPES = {'mmdet': (800, 1280), 'mmseg': (512, 2048), 'mmpretrain': (224, 224)}
MASK_ROIS = 100  # of MMDetection 2.x's get_flops, used by the papers; 3.x agrees except for cascades


class Cost(NamedTuple):
    """Cost of one forward pass of a model with batch size 1."""

    shape: tuple  # height and width of the image
    params: dict  # number of parameters by part, in the order of the forward pass
    macs: Counter  # multiply-adds by (part, kind); for kinds see mmlinattn.tooling.analysis.counting.KINDS
    peak_bytes: int  # estimated peak of the activations in float32
    notes: list  # conventions of the count, one line each

    @property
    def total_params(self) -> int:
        return sum(self.params.values())

    def total_macs(self, *kinds: str) -> int:
        """Return the multiply-adds of the given operation types, or of all types by default."""
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

    Args:
        cfg (Config): Config of a detector, segmentor or classifier.
        shape (tuple[int, int], optional): (height, width) of the image, both >= 32; by default that of :data:`SHAPES`,
            or the test size of a classifier.

    Raises:
        RunError: The shape is below 32x32, or the forward pass depends on values, as meta tensors have none. Two-stage
            detectors with an RPN are counted part by part instead.
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
        model = revert_sync_batchnorm(build_model(cfg)).to('meta')
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
        raise RunError(
            f'{type(model).__name__} cannot be counted: it does not run on an image without values ({described(error)})'
        ) from error
    params: Counter = Counter()
    for name, parameter in model.named_parameters():
        params[part_of(name)] += parameter.numel()
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
    """Run a two-stage detector on the largest number of proposals in the config, and return notes on it.

    Empty features replace those of the pooled regions, as these depend on values.
    """
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
