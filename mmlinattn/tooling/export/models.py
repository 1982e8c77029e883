# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Wrap models as graphs from image to result, describe them by metadata, and compare exported files with the model."""

import math
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import torch
import torch.nn.functional as F
from mmengine.config import Config
from torch import Tensor, nn

from ...ops.dispatch import size_oblivious
from ...utils.errors import RunError, described, printable
from ..class_names import class_names
from ..images import is_8_bit, preprocessor, resizing, test_pipeline
from .detectors import DetectorGraph, detector_graph
from .formats import FORMATS
from .replacements import StridedPools, as_convolutions, replace_modules

SMALLEST = 32  # pixels per side, the limit of the backbones
FIRST_PREDICTS = ('DAHead', 'EncHead')  # MMSegmentation's heads of several results that predict by the first
TOLERANCE = 1e-3  # standard deviations of an output; a graph that is wrong at a size is off by 0.3 and more
BOX_UNIT = 'of the image and of the best score, for 9 of 10 boxes'


class Sizes(NamedTuple):
    """Shape of the exported graph; for a ``dynamic`` graph also the smallest accepted side in pixels."""

    batch: int
    height: int
    width: int
    dynamic: bool = False
    smallest: int = SMALLEST
    channels: int = 3

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.channels, self.height, self.width

    def others(self) -> list[tuple[int, int, int, int]]:
        """Return two more shapes to check a dynamic graph with; [] for a fixed size.

        One is of a larger image in batch 1, the other of a smaller image (if allowed) in a larger batch.
        """
        if not self.dynamic:
            return []
        height, width = (max(self.smallest + 1, side * 5 // 8 + 1) for side in (self.height, self.width))
        return [(1, self.channels, self.height + 37, self.width + 18), (self.batch + 1, self.channels, height, width)]

    def check(self) -> None:
        """Raise a RunError if the batch is empty, or a side is too small."""
        if self.batch < 1:
            raise RunError(f'--batch={self.batch}: expected at least 1.')
        if min(self.height, self.width) < self.smallest:
            raise RunError(f'--shape {self.height} {self.width}: expected at least {self.smallest} pixels per side.')

    def describe(self) -> str:
        """Return the shapes that the graph accepts, in words."""
        of_any = f'(batch, {self.channels}, height, width), batch >= 1, height and width >= {self.smallest}'
        return f'image {of_any}' if self.dynamic else f'image {self.shape}, no other size'


class ExportableModel(nn.Module):
    """Model that maps a normalised image to its result, for export as a graph.

    Args:
        model (nn.Module): Model of MMPretrain, MMSegmentation or MMDetection with a backbone. It is changed in place:
            set to eval mode, with adaptive pools replaced.
        boxes (bool): Let detectors return boxes, see :func:`~mmlinattn.tooling.export.detectors.detector_graph`.

    Shape: (B, channels, H, W) -> scores (B, classes) of a classifier; labels (B, H, W) of a segmentor, and logits (B,
    classes, H, W) if it is tested in windows; feature maps of a detector's neck, else of its backbone; or boxes.

    Raises:
        RunError: The model is not a classifier, segmentor or detector with a backbone.
    """

    model: Any
    boxes: Optional[DetectorGraph]
    outputs: Optional[list[str]]  # names; None for the feature maps of a neck

    def __init__(self, model: Any, boxes: bool = False) -> None:
        super().__init__()
        if hasattr(model, 'decode_head') and hasattr(model, 'encode_decode'):
            self.task = 'segmentor'
        elif getattr(model, 'with_head', False) and hasattr(model, 'extract_feat') and hasattr(model, 'head'):
            self.task = 'classifier'
        elif hasattr(model, 'extract_feat') and hasattr(model, 'backbone'):
            self.task = 'detector'
        else:
            raise RunError(f'{type(model).__name__} is no classifier, segmentor or detector with a backbone.')
        model.eval()  # returns None in MMDetection's distillation
        model.requires_grad_(False)
        replace_modules(model)
        self.model, self.boxes, self.outputs = model, None, None
        if self.task == 'classifier':
            self.outputs = ['scores']
            self.activation = decision(self.head)['activation']
        elif self.task == 'segmentor':
            self.is_windowed = (getattr(model, 'test_cfg', None) or {}).get('mode') == 'slide'
            self.outputs = ['labels', 'logits'] if self.is_windowed else ['labels']
        elif boxes:
            padding = getattr(model, 'data_preprocessor', None)
            divisor, value = getattr(padding, 'pad_size_divisor', 1), getattr(padding, 'pad_value', 0)
            self.boxes = detector_graph(model, divisor, value)
            self.outputs = self.boxes.outputs

    def fold(self, convolutions: bool = False) -> None:
        """Merge training-time branches of the backbone (structural re-parameterisation, ``switch_to_deploy``), in
        place. With ``convolutions``, replace feed-forward networks too, see :func:`as_convolutions`."""
        if hasattr(self.model.backbone, 'switch_to_deploy'):
            with suppress(ValueError):  # altered layers stay as they are
                self.model.backbone.switch_to_deploy()
        if convolutions:
            replace_modules(self, as_convolutions)

    def forward(self, image: Tensor):
        with size_oblivious(), StridedPools():
            if self.boxes is not None:
                return self.boxes(image)
            if self.task == 'detector':
                return tuple(self.model.extract_feat(image))
            logits = self.model(image, mode='tensor')
            if isinstance(logits, tuple) and type(self.head).__name__ in FIRST_PREDICTS:
                logits = logits[0]
            if not isinstance(logits, Tensor):
                given = f'{type(self.head).__name__} gives a {type(logits).__name__}'
                raise RunError(f'{given}; a graph needs a head with one tensor of logits.')
            if self.task == 'classifier':
                return logits.sigmoid() if self.activation == 'sigmoid' else logits.softmax(1)
            logits = F.interpolate(logits, image.shape[2:], mode='bilinear', align_corners=self.model.align_corners)
            if logits.shape[1] > 1:
                labels = logits.argmax(1)
            else:
                labels = (logits[:, 0].sigmoid() > self.head.threshold).long()
            return (labels, logits) if self.is_windowed else labels

    @property
    def head(self) -> Any:
        """Head of a classifier or segmentor; in a cascade, the last one."""
        heads = self.model.decode_head if self.task == 'segmentor' else self.model.head
        return heads[-1] if isinstance(heads, nn.ModuleList) else heads

    def output_names(self, outputs) -> list[str]:
        return self.outputs or [f'feat{i}' for i in range(len(outputs))]

    def metadata(self) -> dict:
        """Return settings for applications that turn the outputs into labels."""
        if self.boxes is not None:
            return dict(self.boxes.metadata(), pad_size_divisor=1)
        return {} if self.task == 'detector' else decision(self.head)


def decision(head: Any) -> dict:
    """Return the activation and the decision rule of a head, as metadata of an exported file.

    Returns:
        dict: ``activation`` is ``'softmax'`` or ``'sigmoid'``. With softmax, the class of the largest score is
        predicted. With sigmoid, all classes with scores above ``threshold`` are, or the ``topk`` best if it is None. A
        segmentor of one output channel predicts the second class above ``threshold``.
    """
    if getattr(head, 'out_channels', None) == 1 and hasattr(head, 'threshold'):
        return dict(activation='sigmoid', threshold=head.threshold)
    if any('MultiLabel' in kind.__name__ for kind in type(head).__mro__):
        threshold, number = getattr(head, 'thr', None), getattr(head, 'topk', None)
        decides = {'topk': number} if threshold is None and number else {}
        return dict(activation='sigmoid', threshold=threshold, **decides)
    return dict(activation='softmax', threshold=None)


def _per_channel(values: Any, default: float, channels: int) -> list[float]:
    """Return mean or std per channel; configs may give one number for all."""
    values = default if values is None else values
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    return values * channels if len(values) == 1 else values


TURNS = ('bgr_to_rgb', 'rgb_to_bgr', 'to_rgb')  # each swaps the channels of MMCV's BGR images


def normalisation(cfg: Config) -> dict:
    """Return the settings of the data preprocessor with mean and std of MMCV's ``Normalize`` in the test pipeline.
    Raise a RunError if both normalise, or the pipeline by another transform."""
    given, steps = preprocessor(cfg), [step for step in test_pipeline(cfg) if 'Normalize' in str(step['type'])]
    if not steps:
        return given
    step, *more = steps
    mean, std = _per_channel(given.get('mean'), 0, 1), _per_channel(given.get('std'), 1, 1)
    is_neutral = not any(mean) and set(std) == {1} and not any(map(given.get, TURNS))
    if more or not is_neutral or 'torchvision' in str(step['type']):
        raise RunError(
            f'the test pipeline has {step["type"]} and the data preprocessor mean={given.get("mean")}: the file cannot '
            'say how to normalise. Write mean and std (of pixels from 0 to 255) into the data preprocessor alone.'
        )
    return {**given, **{key: step[key] for key in ('mean', 'std')}, 'to_rgb': step.get('to_rgb', True)}


def metadata(cfg: Config, task: str, sizes: Sizes, checkpoint_meta: Optional[dict], outputs: list[str]) -> dict:
    """Return metadata for applications that run the graph, as a dict for JSON. ``outputs`` are its names of outputs.

    These may be None: ``input_range`` of pixels if it depends on the image file, ``channel_order`` unless there are
    three channels, ``classes`` without names. ``windows`` (``crop_size``, ``stride``) are those that a segmentor is
    tested in, or None.
    """
    from ... import __version__

    given, test_cfg = normalisation(cfg), cfg.model.get('test_cfg') or {}
    is_windowed = test_cfg.get('mode') == 'slide'
    is_rgb = any(map(given.get, TURNS))
    at_test = given.get('test_cfg') or {}  # of MMSegmentation; its size_divisor is that of training
    return dict(
        mmlinattn=__version__,
        task=task,
        serves=sizes.describe(),
        outputs=outputs,
        input_range=[0, 255] if is_8_bit(cfg) else None,
        channel_order=('RGB' if is_rgb else 'BGR') if sizes.channels == 3 else None,
        mean=_per_channel(given.get('mean'), 0.0, sizes.channels),
        std=_per_channel(given.get('std'), 1.0, sizes.channels),
        **resizing(cfg),
        pad_size_divisor=given.get('pad_size_divisor') or at_test.get('size_divisor') or 1,
        pad_value=given.get('pad_val', given.get('pad_value')) or 0,
        windows={key: list(test_cfg[key]) for key in ('crop_size', 'stride')} if is_windowed else None,
        classes=class_names(cfg, checkpoint_meta),
    )


def deviation(outputs, expected) -> float:
    """Return the largest deviation of outputs from expected outputs, in standard deviations of these.

    Of constant outputs it is relative to their magnitude, of integers (labels) the fraction of different elements. It
    is infinite if shapes differ or values are not finite.
    """
    outputs, expected = ([t] if isinstance(t, Tensor) else list(t) for t in (outputs, expected))
    if [tuple(t.shape) for t in outputs] != [tuple(t.shape) for t in expected]:
        return math.inf
    found = []
    for out, truth in zip(outputs, expected):
        if not truth.is_floating_point():
            found.append((out != truth).double().mean().item())
            continue
        spread = truth.double().std(correction=min(1, truth.numel() - 1)).item() or truth.abs().max().item() or 1
        found.append((out.double() - truth.double()).abs().max().item() / spread)
    return max(found) if math.isfinite(sum(found)) else math.inf


def detection_deviation(outputs, expected) -> float:
    """Return the 0.9 quantile of the deviations between expected detections and their nearest output detections.

    Both arguments are results of a :class:`DetectorGraph`: boxes, scores, labels and, with masks, mask probabilities.
    Detections are compared with those of the same label.

    A deviation is the largest of three: corner / largest expected coordinate, score / best score, mask probability.
    Rounding may exchange or drop detections with nearly equal scores or overlaps; the quantile ignores these. Different
    shapes give infinity.
    """
    if [tuple(t.shape) for t in outputs] != [tuple(t.shape) for t in expected]:
        return math.inf
    found: list[Tensor] = []
    for (boxes, scores, labels, *masks), image in zip(zip(*outputs), zip(*expected)):
        valid = image[1] > 0
        truth = [part[valid] for part in image]
        if not valid.any():
            found.append((scores[:1] > 0).double() * math.inf if (scores > 0).any() else scores.new_zeros(0).double())
            continue
        distance = (truth[0][:, None].double() - boxes).abs().amax(-1) / truth[0].max().clamp(min=1)
        distance = distance.where(truth[2][:, None] == labels, math.inf)
        distance = torch.maximum(distance, (truth[1][:, None].double() - scores).abs() / truth[1].max())
        nearest, index = distance.min(1)
        for mask, other in zip(masks, truth[3:]):
            nearest = torch.maximum(nearest, (mask[index].double() - other).abs().amax((1, 2)))
        found.append(nearest)
    rows = torch.cat(found).nan_to_num(math.inf, math.inf).sort().values
    return rows[math.ceil(0.9 * len(rows)) - 1].item() if len(rows) else 0.0


class Export(NamedTuple):
    """Result of an export."""

    files: list[Path]
    metadata: dict  # see :func:`metadata`
    errors: dict[tuple, float]  # deviation from the model at each checked shape, in float32
    unit: str  # of the deviations
    precision: str  # default of the runtime on this machine
    default_errors: dict[tuple, float]  # deviations in that precision; empty if it is float32


@torch.no_grad()
def export_model(
    model: nn.Module,
    cfg: Config,
    target: Path,
    form: str,
    sizes: Sizes,
    checkpoint_meta: Optional[dict] = None,
    neck: bool = False,
) -> Export:
    """Export a model of a config in a format of ``FORMATS``, and compare the file with the model.

    ``target`` is written atomically, and only if no deviation exceeds :data:`TOLERANCE`. Detections are compared by
    :func:`detection_deviation` with a score threshold of 0, because scores on random images seldom reach the threshold.
    With ``neck``, a detector is exported up to its neck, even in formats that support boxes.

    Raises:
        RunError: The model cannot be exported, or the file deviates from it.
    """
    backend = FORMATS[form]
    exportable = ExportableModel(model, boxes=backend.holds_boxes and not neck)
    if neck and exportable.task != 'detector':
        raise RunError(f'--neck is for detectors; the config builds a {exportable.task}.')
    if sizes.dynamic and exportable.task != 'classifier':
        sizes = sizes._replace(smallest=backend.smallest_of_pyramids)
    sizes.check()
    images = [torch.randn(shape) for shape in (sizes.shape, *sizes.others())]
    boxes, score_thr = exportable.boxes, None
    compare: Callable[..., float] = deviation
    unit = 'standard deviations'
    if boxes is not None:
        compare, unit, score_thr, threshold = detection_deviation, BOX_UNIT, 0.0, boxes.score_thr.item()
        boxes.score_thr.zero_()  # so that there are boxes to compare, whatever the image
    try:
        expected = [exportable(image) for image in images]
    except TypeError as error:  # heads that want data samples beside the image (PointRend)
        raise RunError(f'{type(model).__name__} does not run on images alone: {described(error)}') from error
    exportable.fold(backend.prefers_convolutions)
    meta = metadata(cfg, exportable.task, sizes, checkpoint_meta, exportable.output_names(expected[0]))
    if boxes is not None:
        boxes.score_thr.fill_(threshold)
    meta.update(exportable.metadata())
    target = Path(target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix='.export-') as folder:
        part = Path(folder) / target.name
        try:
            backend.write(exportable, images[0], part, sizes.smallest if sizes.dynamic else None, meta)
            run = backend.load(part, score_thr)
            outputs = [run(image) for image in images]
        except Exception as error:  # each exporter and runtime has its own
            raise RunError(f'{form} cannot express this model: {printable(described(error))}') from error
        errors = {tuple(image.shape): compare(*pair) for image, *pair in zip(images, outputs, expected)}
        precision, default_errors = backend.default_precision(part), {}
        if precision != 'f32':
            run = backend.load(part, score_thr, precision)
            default_errors = {tuple(image.shape): compare(run(image), truth) for image, truth in zip(images, expected)}
        del run
        if max(errors.values()) > TOLERANCE:
            listed = ', '.join(f'{"x".join(map(str, shape))}: {error:.1e}' for shape, error in errors.items())
            text = f'the {form} graph deviates from the model by more than {TOLERANCE} {unit} ({listed})'
            raise RunError(f'{text}; {target} was not written.')
        files = [path.replace(target.parent / path.name) for path in sorted(Path(folder).iterdir())]
    return Export(files, meta, errors, unit, precision, default_errors)
