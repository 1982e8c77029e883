# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Build the model of a config with weights, and preprocess images by its test pipeline."""

from typing import Any, Callable, NamedTuple, Optional

import cv2
import numpy as np
from mmcv.transforms import Compose
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import init_default_scope
from torch import Tensor, nn

from ...checkpoints.loading import trained_model
from ...utils.building import build_model
from ...utils.errors import RunError
from ..class_names import class_names
from ..images import image_channels, split_pipeline, test_pipeline


class Picture(NamedTuple):
    """Preprocessed image.

    Attributes:
        name: Name of the file, without suffix.
        shown: (h, w, 3) uint8 RGB, resized and cropped, without padding and normalisation.
        inputs: (1, channels, H, W), input of the backbone; H >= h and W >= w.
        sample: Data sample of the test pipeline.
        pipeline: Test pipeline for grey levels in [0, 1], (height, width) -> (h, w).
        size: Width and height of the original image in pixels.
    """

    name: str
    shown: np.ndarray
    inputs: Tensor
    sample: object
    pipeline: Callable[[np.ndarray], np.ndarray]
    size: tuple[int, int]

    def to_shown(self, x: float, y: float) -> tuple[int, int]:
        """Return (column, row) in :attr:`shown` of the pixel (x, y) of the original image: the test pipeline transforms
        an image with a bright spot there. Raise a RunError if the pixel is outside the image or cropped away."""
        width, height = self.size
        if not (0 <= x < width and 0 <= y < height):
            raise RunError(f'query {x:g} {y:g} is outside of {self.name} ({width} x {height} pixels).')
        scales = getattr(self.sample, 'scale_factor', None)
        if scales is None:
            scales = [side / original for side, original in zip(sorted(self.shown.shape[:2]), sorted(self.size))]
        radius = 2 / min(1, *scales)  # large enough for nearest-neighbour resizing to keep part of the spot
        distance = (np.arange(width) - x) ** 2 + (np.arange(height)[:, None] - y) ** 2
        black, white = (self.pipeline(np.full((height, width), level)) for level in (0.0, 1.0))
        spot = self.pipeline(np.exp(-distance / radius**2)) - black
        row, column = np.argwhere(spot == spot.max()).mean(axis=0).round().astype(int)
        if spot[row, column] < 0.7 * (white - black)[row, column]:
            raise RunError(f'query {x:g} {y:g} of {self.name} is cropped away by the test pipeline.')
        return int(column), int(row)


def pixels_a_token(length: int, tokens: int) -> float:
    """Return the size in pixels of a token along one side of the image: the power of two that divides ``length`` pixels
    into ``tokens`` tokens, the last one possibly cropped, else ``length / tokens``."""
    return next((float(2**i) for i in range(8) if -(-length // 2**i) == tokens), length / tokens)


def token_at(column: int, row: int, inputs: Tensor, size: tuple[int, int]) -> tuple[int, int]:
    """Return (row, column) of the token that contains a pixel of the ``inputs`` of the backbone, (1, C, H, W), in a
    feature map of ``size`` (height, width)."""
    sides = zip((row, column), inputs.shape[-2:], size)
    at = [min(int(pixel / pixels_a_token(length, tokens)), tokens - 1) for pixel, length, tokens in sides]
    return at[0], at[1]


def load_model(cfg: Config, checkpoint: str, device: str = 'cpu') -> nn.Module:
    """Build the model of a config in eval mode, with the weights of a checkpoint (``'none'``: random ones). Raise a
    RunError if it has no backbone, or the checkpoint lacks weights of it. ``dataset_meta['classes']`` is set."""
    if 'backbone' not in (cfg.get('model') or {}):
        raise RunError('the config has no model.backbone to look into.')
    model: Any
    if checkpoint.lower() == 'none':
        model, meta = build_model(cfg), None
        model.init_weights()
    else:
        model, meta = trained_model(cfg, checkpoint, part='backbone.')
    model = revert_sync_batchnorm(model)
    model.dataset_meta = dict(classes=class_names(cfg, meta))
    model.to(device).eval()  # not chained: distillers of MMDetection return None
    return model


# --- images ---------------------------------------------------------------------------------------------------------


def prepare(cfg: Config, model: Any, image: np.ndarray, name: str, shape: Optional[tuple[int, int]] = None) -> Picture:
    """Preprocess an ``image`` (h, w) or (h, w, C) by the test pipeline, or by resizing to ``shape`` (height, width);
    then by the model's own preprocessor. An image that does not fit model or pipeline raises a RunError."""
    height, width = image.shape[:2]
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    if shape is None and not test_pipeline(cfg):
        raise RunError('the config has no test_dataloader.dataset.pipeline; give --shape H W.')
    steps = split_pipeline(cfg)[1] if shape is None else _resizing(cfg.default_scope, *shape)
    run = Compose([dict(step) for step in steps])

    def transform(pixels):
        known = dict(img_path=name, img_id=0, img_shape=(height, width), ori_shape=(height, width), seg_fields=[])
        try:
            packed = run(dict(img=pixels, **known))
        except cv2.error as error:  # the short side of a narrow image becomes zero
            raise RunError(f'the test pipeline cannot resize {name}, {width} x {height} pixels.') from error
        if not isinstance(packed.get('inputs'), Tensor) or packed['inputs'].dim() != 3:
            raise RunError('the test pipeline makes several images of one; give --shape H W.')
        return packed

    def transform_levels(levels):  # an image of the same dtype and channels
        white = np.iinfo(image.dtype).max if image.dtype.kind in 'iu' else 255
        levels = (levels * white).round().astype(image.dtype)
        levels = levels if image.ndim == 2 else np.repeat(levels[..., None], image.shape[2], axis=2)
        return transform(levels)['inputs'][0].double().numpy()

    packed, channels = transform(image), image_channels(cfg)
    found = len(packed['inputs'])
    if found != channels:
        raise RunError(f'{name} has {found} channels after the test pipeline, the model takes {channels}.')
    shown = _as_rgb(packed['inputs'].permute(1, 2, 0).double().numpy())
    data = model.data_preprocessor({key: [packed[key]] for key in ('inputs', 'data_samples')}, False)
    inputs = data['inputs']
    if min(inputs.shape[-2:]) < 32:
        raise RunError(f'{name} is {inputs.shape[-1]} x {inputs.shape[-2]} pixels for the network; 32 are the least.')
    return Picture(name, shown, inputs, data['data_samples'][0], transform_levels, (width, height))


def _as_rgb(pixels: np.ndarray) -> np.ndarray:
    """Return the first three channels, taken as BGR, or the first one as grey, in uint8 RGB (h, w, 3) for display."""
    if pixels.max() > 255 or pixels.min() < 0 or 0 < pixels.max() <= 1:  # 16 bits, or normalised
        pixels = (pixels - pixels.min()) * (255 / max(np.ptp(pixels), 1e-9))
    pixels = pixels[..., 2::-1] if pixels.shape[2] > 2 else pixels[..., :1].repeat(3, axis=2)
    return np.ascontiguousarray(pixels).astype(np.uint8)


def _resizing(scope: str, height: int, width: int) -> list:
    """Return the transforms that resize an image and pack it for the models of ``scope`` (``'mmdet'``, ...)."""
    pack = dict(mmdet='PackDetInputs', mmseg='PackSegInputs', mmpretrain='PackInputs')[scope]
    more = {} if scope == 'mmpretrain' else dict(keep_ratio=False)
    return [dict(type='Resize', scale=(width, height), **more), dict(type=pack)]
