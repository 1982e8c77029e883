# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Scenes of overlapping shapes with exact visible masks, and the class names of the data sets.

The class tuples are what a config wants in ``metainfo=dict(classes=...)``; entry ``i`` is the
label ``i`` of a model trained on the data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

from .textures import BACKGROUNDS, BAND_STRENGTH, FILLS, contrasting_colour, draw_background, draw_fill

SHAPES = ('disc', 'square', 'triangle', 'star', 'cross', 'heart')
UNLABELLED_SHAPE = 'ring'
"""A seventh form, for pixels that belong to no class (value 0 of the ADE20K layout)."""

COCO_CLASSES = SHAPES
ADE_CLASSES = BACKGROUNDS + SHAPES
ADE20K_NAMES = (
    'wall', 'building', 'sky', 'floor', 'tree', 'ceiling', 'road', 'bed ', 'windowpane', 'grass',
)  # fmt: skip
"""MMSegmentation's own names of the labels that ``ADE_CLASSES`` names: its ``ADE20KDataset``
takes no others, ``BaseSegDataset`` takes any. The blank in ``'bed '`` is MMSegmentation's."""
IMAGENET_CLASSES = tuple(f'{fill} {shape}' for shape in SHAPES for fill in FILLS)
CLASSES = dict(coco=COCO_CLASSES, ade=ADE_CLASSES, imagenet=IMAGENET_CLASSES)

MAX_SHAPES = 5
DIAMETERS = (0.18, 0.5)  # of the shorter side of the image
MIN_DIAMETER = 12.0  # pixels; below it the forms cannot be told apart
MIN_VISIBLE = 0.7  # of a shape's area, after clipping at the border and occlusion
MAX_TURN = 0.5  # radians; with full turns a square is a diamond, and minutes of training tell fewer forms apart
TINTED = 0.95
MIN_SIDE, MAX_SIDE = 64, 8192

_SUPERSAMPLING = 8
_PLACEMENT_TRIES = 12


class Scene(NamedTuple):
    """One image and its ground truth; ``N`` shapes, back to front.

    Attributes:
        image: ``(H, W, 3)`` uint8, RGB.
        masks: ``(N, H, W)`` bool, the *visible* pixels of each shape; no two overlap.
        labels: ``(N,)`` int64, index of each shape in the ``kinds`` asked for.
        background: Name of the background, one of ``BACKGROUNDS``.
    """

    image: np.ndarray
    masks: np.ndarray
    labels: np.ndarray
    background: str


def draw_scene(
    rng: np.random.Generator,
    size: tuple[int, int],
    *,
    num_shapes: int | None = None,
    kinds: Sequence[str] = SHAPES,
    fills: Sequence[str] = FILLS,
    diameters: tuple[float, float] = DIAMETERS,
    min_visible: float = MIN_VISIBLE,
    tinted: float = TINTED,
    backgrounds: Sequence[str] = BACKGROUNDS,
    muted: bool = False,
    band_strength: float = BAND_STRENGTH,
) -> Scene:
    """Draw an image of shapes, each of which covers those drawn before it.

    A place where a shape would be, or leave another one, less than ``min_visible`` visible is not
    taken, so that everything in the image is annotated. Where no place is found after a few
    tries the image gets fewer shapes; the first one always finds a place.

    Args:
        rng: Source of randomness.
        size: Width and height in pixels, each in ``[MIN_SIDE, MAX_SIDE]``.
        num_shapes: How many shapes; drawn from 1 to ``MAX_SHAPES`` if None. 0 gives a background.
        kinds: Forms to choose from: ``SHAPES`` and ``UNLABELLED_SHAPE``.
        fills: Surfaces to choose from, of ``FILLS``; repeat one to see it more often.
        diameters: Smallest and largest diameter, as a fraction of the image's shorter side.
        min_visible: Least visible fraction of a shape's area.
        tinted: Fraction of the shapes that have a colour typical of their form; the others have any colour.
        backgrounds: Backgrounds to choose from, of ``BACKGROUNDS``.
        muted: Backgrounds are pale and have a colour typical of their kind, in place of any colour.
        band_strength: How far the bands of a striped fill go towards black or white.

    Returns:
        The image with its ground truth.

    Examples:
        >>> scene = draw_scene(np.random.default_rng(0), (160, 120), num_shapes=3)
        >>> scene.image.shape, scene.image.dtype
        ((120, 160, 3), dtype('uint8'))
    """
    width, height = size
    background = backgrounds[int(rng.integers(len(backgrounds)))]
    canvas, ends = draw_background(rng, size, background, muted)
    if num_shapes is None:
        num_shapes = int(rng.integers(1, MAX_SHAPES + 1))

    owner = np.zeros((height, width), np.uint8)  # 0: background, i: the i-th shape
    needed = np.zeros(1)  # fewest pixels that must stay visible, per owner
    visible = np.zeros(1)
    labels: list[int] = []
    colours: list[np.ndarray] = []
    for _ in range(num_shapes):
        for tries_left in reversed(range(_PLACEMENT_TRIES)):
            label = int(rng.integers(len(kinds)))
            diameter = max(MIN_DIAMETER, rng.uniform(*diameters) * min(size))
            coverage = _coverage(rng, kinds[label], diameter)
            centred = not labels and not tries_left  # where a shape is wholly visible
            window, patch = _place(rng, size, coverage.shape[0], centred)
            clipped = coverage[patch] / np.float32(255)
            mask = clipped >= 0.5
            full, seen = np.count_nonzero(coverage >= 127.5), np.count_nonzero(mask)
            lost = np.bincount(owner[window][mask], minlength=len(visible))
            left = visible - lost
            left[0], needed[0] = seen, min_visible * full
            if (left >= needed).all():
                break
        else:
            continue
        visible, needed = np.append(left, seen), np.append(needed, min_visible * full)
        labels.append(label)
        owner[window][mask] = len(labels)
        hue = tuple(_FORMS).index(kinds[label]) / len(_FORMS) if rng.random() < tinted else None
        colours.append(contrasting_colour(rng, ends, colours, hue))
        fill = fills[int(rng.integers(len(fills)))]
        surface = draw_fill(rng, coverage.shape[0], colours[-1], fill, diameter, band_strength)[patch]
        target = canvas[window]
        target += (surface - target) * clipped[..., None]

    canvas += rng.normal(0, rng.uniform(1, 5), (height, width, 1)).astype(np.float32)
    image = np.clip(np.rint(canvas), 0, 255).astype(np.uint8)
    masks = owner[None] == np.arange(1, len(labels) + 1, dtype=np.uint8)[:, None, None]
    return Scene(image, masks, np.array(labels, np.int64), background)


def are_sides(size: Sequence[int]) -> bool:
    """Whether an image may have this width and height."""
    return len(size) == 2 and all(MIN_SIDE <= side <= MAX_SIDE for side in size)


def _place(rng: np.random.Generator, size: tuple[int, int], side: int, centred: bool) -> list[tuple[slice, slice]]:
    """Put a square patch so that its centre lies in the image; it may cross the border.

    Returns:
        The window of the image that it covers, and the part of the patch that lies there.
    """
    width, height = size
    x, y = (width // 2, height // 2) if centred else rng.integers(0, size)
    left, top = int(x) - side // 2, int(y) - side // 2
    x0, x1, y0, y1 = max(left, 0), min(left + side, width), max(top, 0), min(top + side, height)
    return [(slice(y0, y1), slice(x0, x1)), (slice(y0 - top, y1 - top), slice(x0 - left, x1 - left))]


def _coverage(rng: np.random.Generator, kind: str, diameter: float) -> np.ndarray:
    """Draw a turned and slightly stretched form; (side, side) float32, 255 = pixel all covered."""
    angle = rng.uniform(-MAX_TURN, MAX_TURN)
    stretch = np.exp(rng.uniform(-0.12, 0.12))
    scale = np.diag([min(1.0, stretch), min(1.0, 1 / stretch)])  # narrower or lower, never beyond the unit circle
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    side = int(np.ceil(diameter)) + 3
    shift_bits = 4
    outlines = []
    for outline in _FORMS[kind]:
        points = (outline @ scale @ turn.T) * (diameter / 2) + side / 2
        # A pixel's centre is at a whole number for OpenCV, at a half for us.
        fine = (points * _SUPERSAMPLING - 0.5) * (1 << shift_bits)
        outlines.append(np.rint(fine).astype(np.int32))
    fine_side = side * _SUPERSAMPLING
    fine = np.zeros((fine_side, fine_side), np.uint8)
    cv2.fillPoly(fine, outlines, 255, shift=shift_bits)  # even-odd: an inner outline is a hole
    return cv2.resize(fine.astype(np.float32), (side, side), interpolation=cv2.INTER_AREA)


def _circle(radius: float, points: int) -> np.ndarray:
    angles = np.linspace(0, 2 * np.pi, points, endpoint=False)
    return radius * np.stack([np.sin(angles), -np.cos(angles)], axis=1)


def _star(points: int, inner: float) -> np.ndarray:
    outline = _circle(1.0, 2 * points)
    outline[1::2] *= inner
    return outline


def _cross(arm: float) -> np.ndarray:
    end = np.sqrt(1 - arm**2)
    quarter = np.array([[arm, -arm], [arm, -end], [-arm, -end]])
    turns = [np.linalg.matrix_power(np.array([[0, 1], [-1, 0]]), i) for i in range(4)]
    return np.concatenate([quarter @ turn.T for turn in turns])


def _heart() -> np.ndarray:
    t = np.linspace(0, 2 * np.pi, 72, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    outline = np.stack([x, y - (y.max() + y.min()) / 2], axis=1)
    return outline / np.linalg.norm(outline, axis=1).max()


# Outlines within the unit circle; more than one outline per form makes holes.
_FORMS = {
    'disc': (_circle(1.0, 72),),
    'square': (_circle(1.0, 8)[1::2],),  # every second of eight points: sides level, not corners
    'triangle': (_circle(1.0, 3),),
    'star': (_star(5, 0.42),),
    'cross': (_cross(0.3),),
    'heart': (_heart(),),
    UNLABELLED_SHAPE: (_circle(1.0, 72), _circle(0.6, 72)),
}
