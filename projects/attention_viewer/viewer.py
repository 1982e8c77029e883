# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Compute and draw the attention maps of the page."""

import functools
from typing import NamedTuple

import cv2
import numpy as np
import torch
from mmengine.config import Config

from mmlinattn.tooling.analysis import loading
from mmlinattn.tooling.analysis.capture import BlockCall, watched
from mmlinattn.tooling.analysis.pictures import MAX_HEADS, collect_query, evenly_spaced, overlay
from mmlinattn.utils.errors import RunError

LONGEST, THUMB = 1024, 132  # pixels: longer side of an image, width of a drawn attention map


class ForwardPass(NamedTuple):
    """Image and attention calls of a forward pass."""

    picture: loading.Picture  # preprocessed image
    scale: tuple[float, float]  # (horizontal, vertical) factors from pixels of the upload to those of the image
    blocks: list[BlockCall]  # attention calls, from input to output


class AttentionViewer:
    """Attention maps of a model for uploaded images; the last two forward passes are cached.

    Args:
        cfg (Config): Detector, segmentor or classifier.
        checkpoint (str): As in :func:`~mmlinattn.tooling.analysis.loading.load_model`.
        device (str): Device of the model.
    """

    def __init__(self, cfg: Config, checkpoint: str, device: str = 'cpu') -> None:
        self.cfg, self.device = cfg, device
        self.model = loading.load_model(cfg, checkpoint, device)
        self._cached = functools.lru_cache(2)(self._run)

    def run(self, image: np.ndarray) -> ForwardPass:
        """Run the model on an image, (H, W, 3) uint8 RGB.

        Raises:
            RunError: The image is too small or too narrow.
        """
        if image.ndim != 3 or image.shape[2] != 3 or min(image.shape[:2]) < 8:
            raise RunError(f'image of shape {image.shape}: expected (H, W, 3) with at least 8 pixels per side')
        return self._cached(image.tobytes(), image.shape)

    def _run(self, pixels: bytes, shape: tuple) -> ForwardPass:
        small = resized(np.frombuffer(pixels, np.uint8).reshape(shape), LONGEST)
        if min(small.shape[:2]) < 2:
            raise RunError(f'image of {shape[1]}x{shape[0]} pixels: too narrow for {LONGEST} pixels on the longer side')
        picture = loading.prepare(self.cfg, self.model, np.ascontiguousarray(small[..., ::-1]), 'picture')
        blocks: list[BlockCall] = []
        with watched(self.model, blocks.append):
            self.model.backbone(picture.inputs.to(self.device))
        scale = small.shape[1] / shape[1], small.shape[0] / shape[0]  # sides are rounded separately
        return ForwardPass(picture, scale, blocks)

    def maps(self, forward: ForwardPass, x: float, y: float, local: bool = False) -> np.ndarray:
        """Draw the attention maps of the token at column ``x`` and row ``y`` in pixels of the upload.

        If ``local``, they include the convolutions of the values.

        Returns:
            ndarray: (h, w, 3) uint8 RGB, with one row per block: the mean over heads, then up to ``MAX_HEADS`` heads.

        Raises:
            RunError: The test pipeline crops that pixel away, or the keys of all blocks lie on no grid.
        """
        column, row = forward.picture.to_shown(x * forward.scale[0], y * forward.scale[1])
        with torch.no_grad():
            found = [
                collect_query(block, forward.picture, column, row, local) for block in forward.blocks if block.ratio
            ]
        if not found:
            raise RunError('the keys of this model have no grid')
        return mosaic(found, forward.picture, column, row)


def resized(image: np.ndarray, longest: int) -> np.ndarray:
    """Shrink an image (H, W, 3) so that its longer side is at most ``longest`` pixels, and the other at least one."""
    scale = longest / max(image.shape[:2])
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    return image if scale >= 1 else cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)


def mosaic(found: list, picture: loading.Picture, x: int, y: int) -> np.ndarray:
    """Draw the attention maps ``found``, see :meth:`AttentionViewer.maps`, by OpenCV, faster than Matplotlib.

    The token is at column ``x`` and row ``y`` in pixels of ``picture.shown``.
    """
    columns = 1 + max(min(len(maps.maps), MAX_HEADS) for maps in found)
    height = max(24, round(THUMB * picture.shown.shape[0] / picture.shown.shape[1]))
    label, head_line, gap, above = 150, 16, 4, 40  # space for the title of the page
    rows = above + len(found) * (height + head_line + gap)
    canvas = np.full((rows, label + columns * (THUMB + gap), 3), 255, np.uint8)

    def write(text, at, colour=(30, 30, 30)):
        cv2.putText(canvas, text, at, cv2.FONT_HERSHEY_SIMPLEX, 0.38, colour, 1, cv2.LINE_AA)

    mark = round(x * THUMB / picture.shown.shape[1]), round(y * height / picture.shown.shape[0])
    for i, maps in enumerate(found):
        top = above + i * (height + head_line + gap) + head_line
        write(maps.block.removeprefix('backbone.')[:22], (4, top + 14))
        write(f'{maps.mixer}, {maps.size[0]} x {maps.size[1]}', (4, top + 32))
        heads = evenly_spaced(len(maps.maps), MAX_HEADS)
        for j, head in enumerate([None, *heads]):
            drawn, peak = overlay(maps.mean if head is None else maps.maps[head], picture)
            thumb = cv2.resize((drawn * 255).astype(np.uint8), (THUMB, height), interpolation=cv2.INTER_AREA)
            cv2.drawMarker(thumb, mark, (0, 200, 0), cv2.MARKER_CROSS, 9, 2)
            left = label + j * (THUMB + gap)
            canvas[top : top + height, left : left + THUMB] = thumb
            write(f'{"mean" if head is None else f"head {head}"}, max {peak:.2g}', (left, top - 4))
    return canvas
