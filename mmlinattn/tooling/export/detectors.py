# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Export MMDetection's single-stage and two-stage detectors, from image to boxes, as graphs of dynamic size.

Networks are the modules of MMDetection. Only the selection of boxes is rewritten: MMDetection loops over images and
filters by masks, so that shapes depend on data. Here every shape follows from the shape of the image.
"""

from typing import Any, Optional

import torch
import torchvision
from torch import Tensor, nn

from ...ops.tokens import as_tensor, round_up, unflatten
from ...utils.errors import RunError
from .onnx_nodes import nms_mask

INSTEAD = 'MMDeploy may have a writer for it; --neck writes the backbone and neck alone'


class DetectorGraph(nn.Module):
    """Detector of MMDetection, in eval mode, that maps normalised images to boxes, without shapes that depend on data.

    Height and width are padded to multiples of ``divisor``. ``test_cfg`` has the score threshold.

    Shape: (B, C, H, W) -> boxes (B, N, 4), corners x1, y1, x2, y2 in pixels of the image; scores (B, N), best first;
    labels (B, N), int64; of detectors with masks, masks (B, N, h, w): probabilities in a grid over each box. N is
    ``max_per_img``. Rows beyond the detections have score 0, label -1 and zeros.

    Raises:
        RunError: A module of the detector is not supported.
    """

    score_thr: Tensor

    def __init__(self, model: Any, test_cfg: Any, divisor: int = 1, pad_value: float = 0.0) -> None:
        super().__init__()
        self.model, self.divisor, self.pad_value = model, divisor, pad_value
        self.outputs = ['boxes', 'scores', 'labels']
        # a buffer: exported files keep it by name, and their check can lower it
        self.register_buffer('score_thr', torch.tensor(float((test_cfg or {}).get('score_thr', 0))))

    def metadata(self) -> dict:
        """Return the score threshold of the graph, and the mask threshold for the application."""
        model: Any = self.model
        masks = model.roi_head.test_cfg.mask_thr_binary if 'masks' in self.outputs else None
        return dict(score_threshold=round(self.score_thr.item(), 6), mask_threshold=masks)

    def features(self, image: Tensor) -> tuple[Tensor, ...]:
        """Pad the images and return their feature maps."""
        if self.divisor > 1:
            # OpenVINO 2026.4 drops a colour conversion before a Pad of dynamic width
            batch, channels, height, width = image.shape
            more_rows, more_columns = (round_up(side, self.divisor) - side for side in (height, width))
            columns = image.new_full((batch, channels, height, more_columns), self.pad_value)
            rows = image.new_full((batch, channels, more_rows, width + more_columns), self.pad_value)
            image = torch.cat((torch.cat((image, columns), dim=3), rows), dim=2)
        return tuple(self.model.extract_feat(image))


class SingleStage(DetectorGraph):
    """Detectors that select boxes as :class:`mmdet.models.BaseDenseHead` does: RetinaNet, FCOS, ATSS, RTMDet."""

    def __init__(self, model: Any, **options) -> None:
        from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
        from mmdet.models.detectors import SingleStageDetector

        head = model.bbox_head
        _check_methods(model, SingleStageDetector, 'predict')
        _check_methods(head, BaseDenseHead, *SELECTION)
        super().__init__(model, head.test_cfg, **options)
        self.candidates = Candidates(head, head.test_cfg)
        self.selection = Selection(head, head.test_cfg)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        boxes, scores, labels, _ = self.candidates(self.features(image), image.shape[2:], self.score_thr)
        return self.selection(boxes, scores, labels)


class TwoStage(DetectorGraph):
    """Faster, Mask and Cascade (Mask) R-CNN."""

    def __init__(self, model: Any, **options) -> None:
        from mmdet.models.dense_heads import RPNHead
        from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
        from mmdet.models.detectors import TwoStageDetector
        from mmdet.models.roi_heads import BBoxHead, CascadeRoIHead, FCNMaskHead, SingleRoIExtractor, StandardRoIHead

        rpn, roi = model.rpn_head, model.roi_head
        _check_methods(model, TwoStageDetector, 'predict')
        _check_methods(rpn, BaseDenseHead, *SELECTION[:2])
        _check_methods(rpn, RPNHead, *SELECTION[2:])
        _check(type(roi) in (StandardRoIHead, CascadeRoIHead) and not roi.with_shared_head, roi)
        super().__init__(model, roi.test_cfg, **options)
        self.proposals = Candidates(rpn, rpn.test_cfg)
        self.selected_proposals = Selection(rpn, rpn.test_cfg)

        def stages(parts) -> list:
            return list(parts) if isinstance(parts, nn.ModuleList) else [parts]

        self.box_heads, self.box_extractors = stages(roi.bbox_head), stages(roi.bbox_roi_extractor)
        for head in self.box_heads:
            _check_methods(head, BBoxHead, 'predict_by_feat', '_predict_by_feat_single', 'regress_by_class')
            _check(head.with_reg and not head.custom_cls_channels, head)
            _check_coder(head.bbox_coder)
        self.mask_heads, self.mask_extractors = [], []
        if roi.with_mask:
            self.mask_heads, self.mask_extractors = stages(roi.mask_head), stages(roi.mask_roi_extractor)
            self.outputs = [*self.outputs, 'masks']
        for head in self.mask_heads:
            _check_methods(head, FCNMaskHead, 'predict_by_feat', '_predict_by_feat_single')
        for extractor in self.box_extractors + self.mask_extractors:
            layers = getattr(extractor, 'roi_layers', ())
            is_known = all(type(layer).__name__ == 'RoIAlign' and layer.pool_mode == 'avg' for layer in layers)
            _check(type(extractor) is SingleRoIExtractor and is_known, extractor)
        self.selection = Selection(roi, roi.test_cfg)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        feats, size = self.features(image), image.shape[2:]
        boxes, scores, _, levels = self.proposals(feats, size, 0)
        rois, found, _ = self.selected_proposals(boxes, scores, levels.expand_as(scores))
        boxes, scores = self.classify(feats, rois, size)
        scores = scores.masked_fill((scores <= self.score_thr) | (found <= 0)[..., None], 0)
        boxes = boxes.expand(-1, -1, scores.shape[2], -1)
        labels = torch.arange(scores.shape[2], device=scores.device).expand_as(scores)
        boxes, scores, labels = self.selection(boxes.flatten(1, 2), scores.flatten(1), labels.flatten(1))
        if not self.mask_heads:
            return boxes, scores, labels
        return boxes, scores, labels, self.masks(feats, boxes, labels)

    def classify(self, feats: tuple[Tensor, ...], rois: Tensor, size) -> tuple[Tensor, Tensor]:
        """Return boxes (B, N, classes or 1, 4) and scores (B, N, classes) for regions of interest (B, N, 4).

        Each stage of a cascade except the last refines the regions; logits are averaged over the stages.
        """
        logits = []
        for i, (head, extractor) in enumerate(zip(self.box_heads, self.box_extractors)):
            scores, deltas = (unflatten(x, 0, rois.shape[:2]) for x in head(pool(extractor, feats, rois)))
            logits.append(scores)
            boxes = decode(head.bbox_coder, rois, deltas, size)
            if i + 1 < len(self.box_heads):
                best = scores[..., :-1].argmax(-1)
                index = _as_index(best * int(not head.reg_class_agnostic), 4)
                rois = boxes.gather(2, index[:, :, None])[:, :, 0]
        return boxes, torch.stack(logits).mean(0).softmax(-1)[..., :-1]

    def masks(self, feats: tuple[Tensor, ...], boxes: Tensor, labels: Tensor) -> Tensor:
        """Return mask probabilities (B, N, h, w) in a grid over each box, averaged over the stages of a cascade."""
        found = []
        for head, extractor in zip(self.mask_heads, self.mask_extractors):
            masks = head(pool(extractor, feats, boxes)).sigmoid()  # (B N, classes, h, w)
            channel = labels.flatten().clamp(min=0) * int(not head.class_agnostic)
            found.append(masks.gather(1, channel[:, None, None, None].expand(-1, 1, *masks.shape[2:]))[:, 0])
        masks = unflatten(torch.stack(found).mean(0), 0, labels.shape)
        return masks.masked_fill(labels[..., None, None] < 0, 0)


def detector_graph(model: Any, divisor: int = 1, pad_value: float = 0.0) -> DetectorGraph:
    """Return the :class:`DetectorGraph` of a detector.

    Args:
        model (Any): Detector of MMDetection.
        divisor (int): The graph pads images at the bottom and right to multiples of this number of pixels.
        pad_value (float): Value of the padding, in normalised pixel values.

    Raises:
        RunError: A module of the detector is not supported.
    """
    kind = TwoStage if hasattr(model, 'roi_head') and hasattr(model, 'rpn_head') else SingleStage
    if kind is SingleStage:
        _check(hasattr(model, 'bbox_head'), getattr(model, 'panoptic_head', getattr(model, 'mask_head', model)))
    return kind(model, divisor=divisor, pad_value=pad_value)


# --- parts ------------------------------------------------------------------------------------------------------------

SELECTION = ('predict', 'predict_by_feat', '_predict_by_feat_single', '_bbox_post_process')


def _check(is_known: bool, part: Any) -> None:
    if not is_known:
        raise RunError(f'there is no ONNX writer for {type(part).__name__} as it is configured. {INSTEAD}.')


def _check_methods(part: Any, base: type, *names: str) -> None:
    _check(isinstance(part, base) and all(getattr(type(part), name) is getattr(base, name) for name in names), part)


def _check_coder(coder: Any) -> None:
    from mmdet.models.task_modules.coders import DeltaXYWHBBoxCoder, DistancePointBBoxCoder

    _check(type(coder) in (DeltaXYWHBBoxCoder, DistancePointBBoxCoder), coder)


class Candidates(nn.Module):
    """Select and decode the best anchors or points in each level of a dense head.

    Shape: feature maps, image size and score threshold -> boxes (B, N, 4), scores (B, N) with 0 up to the threshold,
    labels (B, N), levels (N).
    """

    def __init__(self, head: Any, test_cfg: Any) -> None:
        super().__init__()
        _check_coder(head.bbox_coder)
        _check(not getattr(head.loss_cls, 'custom_cls_channels', False) and test_cfg.get('nms_pre', -1) > 0, head)
        self.head, self.num_best = head, test_cfg.nms_pre

    def forward(self, feats: tuple[Tensor, ...], size, score_thr) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        head: Any = self.head
        logits, deltas, *factors = head(feats)
        priors = head.prior_generator.grid_priors(
            [level.shape[2:] for level in logits], dtype=logits[0].dtype, device=logits[0].device
        )
        levels = [self.best_of_level(score_thr, *level) for level in zip(logits, deltas, priors, *factors)]
        found = [torch.cat(parts, dim=1) for parts in zip(*levels)]
        boxes = decode(head.bbox_coder, found[0], found[1], size)[:, :, 0]
        numbers = [torch.full_like(level[2][0], i, dtype=torch.long) for i, level in enumerate(levels)]
        return boxes, found[2], found[3], torch.cat(numbers)

    def best_of_level(
        self, score_thr, logits: Tensor, deltas: Tensor, priors: Tensor, factors: Optional[Tensor] = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return priors, box deltas, scores and labels of the k best predictions in one level, each (B, k, ...)."""
        head: Any = self.head
        logits, deltas = _rows(logits, head.cls_out_channels), _rows(deltas, head.bbox_coder.encode_size)
        scores = logits.sigmoid() if head.use_sigmoid_cls else logits.softmax(-1)[..., :-1]
        classes = scores.shape[2]
        scores, index = best(scores.masked_fill(scores <= score_thr, 0).flatten(1), self.num_best)
        anchor = torch.div(index, classes, rounding_mode='floor')
        if factors is not None:
            scores = scores * _rows(factors, 1)[..., 0].sigmoid().gather(1, anchor)
        return priors[anchor], deltas.gather(1, _as_index(anchor, deltas.shape[2])), scores, index - anchor * classes


class Selection(nn.Module):
    """Non-maximum suppression within each class, then selection of the best boxes, as in MMCV's ``batched_nms``.

    Shape: boxes (B, N, 4), scores (B, N), labels (B, N) -> the same three tensors for the ``max_per_img`` best boxes.
    """

    def __init__(self, part: Any, test_cfg: Any) -> None:
        super().__init__()
        nms = dict(test_cfg.get('nms') or {})
        known = nms.pop('type', 'nms') in ('nms', torchvision.ops.nms) and test_cfg.get('max_per_img', -1) > 0
        nms.pop('split_thr', None)
        self.class_agnostic = nms.pop('class_agnostic', False)
        self.iou_threshold = nms.pop('iou_threshold', nms.pop('iou_thr', None))
        _check(known and self.iou_threshold is not None and not nms, part)
        self.num_best, self.smallest = test_cfg.max_per_img, test_cfg.get('min_bbox_size', -1)

    def forward(self, boxes: Tensor, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.smallest >= 0:
            sides = boxes[..., 2:] - boxes[..., :2]
            scores = scores.masked_fill(sides.amin(-1) <= self.smallest, 0)
        shifted = boxes
        if not self.class_agnostic:  # boxes of different classes do not overlap, as upstream does
            largest = boxes.masked_fill((scores <= 0)[..., None], 0).amax((1, 2))
            shifted = boxes + (labels.to(boxes.dtype) * (largest[:, None] + 1))[..., None]
        kept = nms_mask(shifted, scores, float(self.iou_threshold), self.num_best)
        scores, index = best(scores * kept, self.num_best)
        missing = scores <= 0
        boxes = boxes.gather(1, _as_index(index, 4)).masked_fill(missing[..., None], 0)
        return boxes, scores, labels.gather(1, index).masked_fill(missing, -1)


def best(scores: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the ``number`` best scores of (B, N) and their indices, both (B, number); missing entries have score 0."""
    available = scores.shape[1]
    padding = number if not isinstance(available, int) else max(0, number - available)
    if padding:
        scores = torch.cat((scores, scores.new_zeros(scores.shape[0], padding)), dim=1)
    values, index = scores.topk(number)
    return values, index.clamp(max=available - 1)


def decode(coder: Any, priors: Tensor, deltas: Tensor, size) -> Tensor:
    """Decode deltas (B, N, 4 or 4 classes) at points (B, N, 2) or anchors (B, N, 4) to (B, N, 1 or classes, 4).

    Boxes are clipped to ``size``, (height, width) of the image, if the coder clips.
    """
    from mmdet.models.task_modules.coders.delta_xywh_bbox_coder import delta2bbox
    from mmdet.structures.bbox import distance2bbox

    flat = priors.flatten(0, 1), deltas.flatten(0, 1)
    if priors.shape[-1] == 2:
        boxes = distance2bbox(*flat)
    else:
        clamps = dict(clip_border=False, add_ctr_clamp=coder.add_ctr_clamp, ctr_clamp=coder.ctr_clamp)
        boxes = delta2bbox(*flat, means=coder.means, stds=coder.stds, **clamps)
    boxes = boxes.reshape(*deltas.shape[:2], -1, 4)
    if not coder.clip_border:
        return boxes
    height, width = (as_tensor(side, boxes, boxes.dtype) for side in size)
    return torch.minimum(boxes.clamp(min=0), torch.stack((width, height, width, height)))


def pool(extractor: Any, feats: tuple[Tensor, ...], rois: Tensor) -> Tensor:
    """Pool features of regions (B, N, 4), each from the pyramid level for its size, to (B N, C, h, w).

    All regions are pooled at every level, so that no shape depends on data. Regions that belong to another level shrink
    to a point there, and cost almost nothing.
    """
    feats = feats[: extractor.num_inputs]
    image = torch.arange(rois.shape[0], device=rois.device, dtype=rois.dtype)[:, None, None]
    rois = torch.cat((image.expand(-1, rois.shape[1], -1), rois), dim=2).flatten(0, 1)
    level = extractor.map_roi_levels(rois, len(feats))
    pooled: Any = None
    for i, (layer, feat) in enumerate(zip(extractor.roi_layers, feats)):
        here = (level == i)[:, None]
        settings = layer.output_size, layer.spatial_scale, layer.sampling_ratio, layer.aligned
        found = torchvision.ops.roi_align(feat, rois.masked_fill(~here, 0), *settings)
        pooled = found if pooled is None else torch.where(here[..., None, None], found, pooled)
    # PyTorch takes no sample of a region without height or width, OpenVINO takes one
    has_area = (rois[:, 3:] > rois[:, 1:3]).all(dim=1)
    return torch.where(has_area[:, None, None, None], pooled, 0)


def _rows(level: Tensor, width: int) -> Tensor:
    """Flatten a head's output to a row for each anchor: (B, A width, H, W) -> (B, H W A, width)."""
    return level.permute(0, 2, 3, 1).reshape(level.shape[0], -1, width)


def _as_index(index: Tensor, width: int) -> Tensor:
    """Expand indices to gather whole rows: (..., k) -> (..., k, width)."""
    return index[..., None].expand(*index.shape, width)
