# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The model of a config with its weights, and images as its test pipeline makes them, for the analysis tools."""

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
from ..images import image_channels, transforms


class Picture(NamedTuple):
    """An image as the network sees it."""

    name: str  # of the file, without suffix
    shown: np.ndarray  # (h, w, 3) uint8 RGB, after resizing and cropping, before padding and normalisation
    inputs: Tensor  # (1, channels, H, W), what the backbone is given; H >= h and W >= w
    sample: object  # the data sample of the pipeline
    # takes levels from 0 to 1, (height, width), to what the pipeline makes of them, (h, w)
    pipeline: Callable[[np.ndarray], np.ndarray]
    size: tuple[int, int]  # width and height of the image as given

    def to_shown(self, x: float, y: float) -> tuple[int, int]:
        """Column and row in ``shown`` of a pixel of the image as given: where the pipeline leaves a spot there.

        Raises:
            RunError: The pixel is outside of the image, or of what the pipeline keeps of it.
        """
        width, height = self.size
        if not (0 <= x < width and 0 <= y < height):
            raise RunError(f'query {x:g} {y:g} is outside of {self.name} ({width} x {height} pixels).')
        scales = getattr(self.sample, 'scale_factor', None)
        if scales is None:
            scales = [seen / given for seen, given in zip(sorted(self.shown.shape[:2]), sorted(self.size))]
        radius = 2 / min(1, *scales)  # pixels that are left out by resizing lie in the spot of another one
        distance = (np.arange(width) - x) ** 2 + (np.arange(height)[:, None] - y) ** 2
        nothing, all_ = (self.pipeline(np.full((height, width), level)) for level in (0.0, 1.0))
        spot = self.pipeline(np.exp(-distance / radius**2)) - nothing
        row, column = np.argwhere(spot == spot.max()).mean(axis=0).round().astype(int)
        if spot[row, column] < 0.7 * (all_ - nothing)[row, column]:
            raise RunError(f'query {x:g} {y:g} of {self.name} is cropped away by the test pipeline.')
        return int(column), int(row)


def pixels_a_token(length: int, tokens: int) -> float:
    """Pixels of one of so many tokens along a side: a power of two where one fits, whose last token may reach over the
    border, else an equal share."""
    return next((float(2**i) for i in range(8) if -(-length // 2**i) == tokens), length / tokens)


def token_at(column: int, row: int, inputs: Tensor, size: tuple[int, int]) -> tuple[int, int]:
    """Row and column, in a map of ``size``, of the token that a pixel of the network's input belongs to."""
    sides = zip((row, column), inputs.shape[-2:], size)
    at = [min(int(pixel / pixels_a_token(length, tokens)), tokens - 1) for pixel, length, tokens in sides]
    return at[0], at[1]


def load_model(cfg: Config, checkpoint: str, device: str = 'cpu') -> nn.Module:
    """The model of a config in eval mode.

    Args:
        cfg (Config): Of a detector, segmentor or classifier.
        checkpoint (str): A file, URL or ``mmlinattn://NAME``; ``'none'`` initialises the weights at random, without any
            download.
        device (str): Where to.

    Returns:
        nn.Module: With ``dataset_meta``, as upstream's inferencers have it: ``classes``, None where nobody names them.

    Raises:
        RunError: The model cannot be built, or the checkpoint lacks weights of its backbone.
    """
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
    model.to(device).eval()  # which gives nothing back where MMDetection distils
    return model


# --- images ---------------------------------------------------------------------------------------------------------


def prepare(cfg: Config, model: Any, image: np.ndarray, name: str, shape: Optional[tuple[int, int]] = None) -> Picture:
    """An image as the test pipeline makes it, or resized to ``shape``.

    Args:
        cfg (Config): Of the model.
        model (nn.Module): Its data preprocessor pads and normalises.
        image (ndarray): As :func:`~mmlinattn.tooling.images.read_picture` gives it.
        name (str): Of the image.
        shape (tuple[int, int], optional): Height and width to resize to instead of what the pipeline does.

    Raises:
        RunError: The pipeline makes several images of one, or leaves nothing of this one, or the model takes other
            channels.
    """
    height, width = image.shape[:2]
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    steps = transforms(cfg) if shape is None else _resizing(cfg.default_scope, *shape)
    run = Compose([dict(step) for step in steps])

    def through(pixels):
        known = dict(img_path=name, img_id=0, img_shape=(height, width), ori_shape=(height, width), seg_fields=[])
        try:
            packed = run(dict(img=pixels, **known))
        except cv2.error as error:  # of a narrow image, where nothing is left of its short side
            raise RunError(f'the test pipeline cannot resize {name}, {width} x {height} pixels.') from error
        if not isinstance(packed.get('inputs'), Tensor) or packed['inputs'].dim() != 3:
            raise RunError('the test pipeline makes several images of one; give --shape H W.')
        return packed

    def alike(level):  # an image of the same kind
        most = np.iinfo(image.dtype).max if image.dtype.kind in 'iu' else 255
        level = (level * most).round().astype(image.dtype)
        level = level if image.ndim == 2 else np.repeat(level[..., None], image.shape[2], axis=2)
        return through(level)['inputs'][0].double().numpy()

    packed, taken = through(image), image_channels(cfg)
    if len(packed['inputs']) != taken:
        raise RunError(f'{name} has {len(packed["inputs"])} channels after the test pipeline, the model takes {taken}.')
    shown = _as_rgb(packed['inputs'].permute(1, 2, 0).double().numpy())
    data = model.data_preprocessor({key: [packed[key]] for key in ('inputs', 'data_samples')}, False)
    inputs = data['inputs']
    if min(inputs.shape[-2:]) < 32:
        raise RunError(f'{name} is {inputs.shape[-1]} x {inputs.shape[-2]} pixels for the network; 32 are the least.')
    return Picture(name, shown, inputs, data['data_samples'][0], alike, (width, height))


def _as_rgb(pixels: np.ndarray) -> np.ndarray:
    """(h, w, 3) uint8 to look at: grey for fewer than three channels, else the first three, which are BGR."""
    if pixels.max() > 255 or pixels.min() < 0 or 0 < pixels.max() <= 1:  # 16 bits, or normalised
        pixels = (pixels - pixels.min()) * (255 / max(np.ptp(pixels), 1e-9))
    pixels = pixels[..., 2::-1] if pixels.shape[2] > 2 else pixels[..., :1].repeat(3, axis=2)
    return np.ascontiguousarray(pixels).astype(np.uint8)


def _resizing(scope: str, height: int, width: int) -> list:
    pack, more = dict(
        mmdet=('PackDetInputs', dict(keep_ratio=False)),
        mmseg=('PackSegInputs', dict(keep_ratio=False)),
        mmpretrain=('PackInputs', {}),
    )[scope]
    return [dict(type='Resize', scale=(width, height), **more), dict(type=pack)]
