# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Draw scenes of overlapping shapes with exact visible masks, and name the classes of the data sets.

The class tuples are for ``metainfo=dict(classes=...)`` of a config; entry ``i`` is label ``i``.
"""

import colorsys
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

BACKGROUNDS = ('gradient', 'clouds', 'stripes', 'checker')
FILLS = ('plain', 'striped')
SHAPES = ('disc', 'square', 'triangle', 'star', 'cross', 'heart')
UNLABELLED_SHAPE = 'ring'  # pixels without class, value 0 of the ADE20K layout

COCO_CLASSES = SHAPES
ADE_CLASSES = BACKGROUNDS + SHAPES
ADE20K_NAMES = (
    'wall', 'building', 'sky', 'floor', 'tree', 'ceiling', 'road', 'bed ', 'windowpane', 'grass',
)  # fmt: skip
"""Names of the labels of ``ADE_CLASSES`` in MMSegmentation's ``ADE20KDataset``, with its blank in ``'bed '``."""
IMAGENET_CLASSES = tuple(f'{fill} {shape}' for shape in SHAPES for fill in FILLS)
CLASSES = dict(coco=COCO_CLASSES, ade=ADE_CLASSES, imagenet=IMAGENET_CLASSES)

MAX_SHAPES = 5
MIN_DIAMETER = 12.0  # pixels; smaller shapes look alike
MIN_VISIBLE = 0.7  # least visible fraction of a shape's pixels
MAX_ROTATION = 0.5  # radians; a square by 45 degrees is a diamond, and needs longer training

_PLACEMENT_TRIES = 12


class Scene(NamedTuple):
    """Image and ground truth of ``N`` shapes, from back to front.

    Attributes:
        image (np.ndarray): (H, W, 3) uint8, RGB.
        masks (np.ndarray): (N, H, W) bool, the *visible* pixels of each shape; no two overlap.
        labels (np.ndarray): (N,) int64, index of each shape in ``kinds`` of :func:`draw_scene`.
        background (str): One of :data:`BACKGROUNDS`.
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
    fill: str = 'plain',
    diameters: tuple[float, float] = (0.18, 0.5),
    tinted: float = 0.95,
    backgrounds: Sequence[str] = BACKGROUNDS,
) -> Scene:
    """Draw an image of shapes; later shapes occlude earlier ones.

    A position that would hide more than ``1 - MIN_VISIBLE`` of another shape is rejected. After too many rejections the
    image gets fewer shapes.

    Args:
        rng: Random generator.
        size: Width and height in pixels, at least 64.
        num_shapes: Number of shapes, by default drawn from 1 to ``MAX_SHAPES``.
        kinds: Shapes to draw, of ``SHAPES`` and ``UNLABELLED_SHAPE``.
        fill: Texture of the shapes, one of ``FILLS``.
        backgrounds: Backgrounds to draw, of ``BACKGROUNDS``.
        diameters: Smallest and largest diameter, as a fraction of the image's shorter side.
        tinted: Fraction of the shapes in the typical colour of their class; others have a random colour.

    Examples:
        >>> scene = draw_scene(np.random.default_rng(0), (160, 120), num_shapes=3)
        >>> scene.image.shape, scene.image.dtype
        ((120, 160, 3), dtype('uint8'))
    """
    background = backgrounds[int(rng.integers(len(backgrounds)))]
    canvas, colours = draw_background(rng, size, background)
    if num_shapes is None:
        num_shapes = int(rng.integers(1, MAX_SHAPES + 1))

    owner = np.zeros(canvas.shape[:2], np.uint8)  # 0: background, i: the i-th shape
    labels: list[int] = []
    areas: list[int] = []
    for _ in range(num_shapes):
        for _ in range(_PLACEMENT_TRIES):
            label = int(rng.integers(len(kinds)))
            diameter = max(MIN_DIAMETER, rng.uniform(*diameters) * min(size))
            coverage = _coverage(rng, kinds[label], diameter, size)
            mask = coverage >= 0.5
            visible = np.bincount(owner[~mask], minlength=len(areas) + 1)[1:]
            if (visible >= MIN_VISIBLE * np.array(areas)).all():
                break
        else:
            continue
        labels.append(label)
        areas.append(int(np.count_nonzero(mask)))
        owner[mask] = len(labels)
        hue = tuple(_POLYGONS).index(kinds[label]) / len(_POLYGONS) if rng.random() < tinted else None
        colours.append(contrasting_colour(rng, colours, hue))
        canvas += (draw_fill(rng, size, colours[-1], fill, diameter) - canvas) * coverage[..., None]

    canvas += rng.normal(0, rng.uniform(1, 5), (*owner.shape, 1))
    image = np.clip(np.rint(canvas), 0, 255).astype(np.uint8)
    masks = owner[None] == np.arange(1, len(labels) + 1, dtype=np.uint8)[:, None, None]
    return Scene(image, masks, np.array(labels, np.int64), background)


def _coverage(rng: np.random.Generator, kind: str, diameter: float, size: tuple[int, int]) -> np.ndarray:
    """Draw a rotated and slightly stretched shape at a random position.

    Args:
        rng (np.random.Generator): Random generator.
        kind (str): One of :data:`SHAPES`, or :data:`UNLABELLED_SHAPE`.
        diameter (float): Diameter of the circle around the shape in pixels.
        size (tuple[int, int]): Width and height of the image in pixels.

    Returns:
        np.ndarray: Covered fraction of each pixel, (H, W) float32 in [0, 1].
    """
    angle = rng.uniform(-MAX_ROTATION, MAX_ROTATION)
    stretch = np.exp(rng.uniform(-0.12, 0.12))
    scale = np.diag([min(1.0, stretch), min(1.0, 1 / stretch)])  # narrower or lower, never beyond the unit circle
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    centre = rng.uniform(diameter / 2, np.array(size) - diameter / 2)
    canvas, shift = np.zeros(size[::-1], np.uint8), 4
    polygons = [(polygon @ scale @ rotation.T * diameter / 2 + centre) * 2**shift for polygon in _POLYGONS[kind]]
    # even-odd rule: an inner polygon is a hole
    cv2.fillPoly(canvas, [np.rint(points).astype(np.int32) for points in polygons], 255, cv2.LINE_AA, shift)
    return canvas / np.float32(255)


def _circle(points: int) -> np.ndarray:
    angles = np.linspace(0, 2 * np.pi, points, endpoint=False)
    return np.stack([np.sin(angles), -np.cos(angles)], axis=1)


def _cross(half_width: float) -> np.ndarray:
    end = np.sqrt(1 - half_width**2)
    bar = np.array([[half_width, -half_width], [half_width, -end], [-half_width, -end]])
    rotations = [np.linalg.matrix_power(np.array([[0, 1], [-1, 0]]), i) for i in range(4)]
    return np.concatenate([bar @ rotation.T for rotation in rotations])


def _heart() -> np.ndarray:
    t = np.linspace(0, 2 * np.pi, 72, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    polygon = np.stack([x, y - (y.max() + y.min()) / 2], axis=1)
    return polygon / np.linalg.norm(polygon, axis=1).max()


# polygons within the unit circle; an inner polygon is a hole
_POLYGONS = {
    'disc': (_circle(72),),
    'square': (_circle(8)[1::2],),  # every second of eight points: sides level, not corners
    'triangle': (_circle(3),),
    'star': (_circle(10) * np.tile([1.0, 0.42], 5)[:, None],),
    'cross': (_cross(0.3),),
    'heart': (_heart(),),
    UNLABELLED_SHAPE: (_circle(72), 0.6 * _circle(72)),
}


# --- backgrounds, colours and fills: float RGB in [0, 255] ----------------------------------------------------------


def draw_background(rng: np.random.Generator, size: tuple[int, int], kind: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draw a background of ``size`` (width, height) in a pale colour that is typical of its ``kind``.

    The background is ``(H, W, 3)`` float32 RGB in [0, 255], of a ``kind`` in :data:`BACKGROUNDS`. Its two colours, each
    ``(3,)``, are returned with it. With random mean colours, small models would need hundreds of iterations more.
    """
    hue = (BACKGROUNDS.index(kind) + 0.3) / len(BACKGROUNDS) + rng.normal(0, 0.03)
    saturation, value = rng.uniform(0.2, 0.45), rng.uniform(0.5, 0.9)
    ends = [_rgb(hue, saturation, value), _rgb(hue, saturation, value * rng.uniform(0.75, 0.92))]
    mix = _mix(rng, size, kind)[..., None]
    return (ends[0] * (1 - mix) + ends[1] * mix).astype(np.float32), ends


def _rgb(hue: float, saturation: float, value: float) -> np.ndarray:
    return np.array(colorsys.hsv_to_rgb(hue % 1, saturation, value)) * 255


def _mix(rng: np.random.Generator, size: tuple[int, int], kind: str) -> np.ndarray:
    """Return the weights of a background's second colour, ``(H, W)`` in [0, 1].

    ``size`` is (width, height), and ``kind`` one of :data:`BACKGROUNDS`.
    """
    if kind == 'clouds':
        return cv2.resize(rng.random((9, 9)), size, interpolation=cv2.INTER_CUBIC).clip(0, 1)
    angle = rng.uniform(0, 2 * np.pi)
    ramp = _ramp(size, angle)
    if kind == 'gradient':
        return (ramp - ramp.min()) / np.ptp(ramp)
    period = min(size) * rng.uniform(0.08, 0.2)
    one = _bands(ramp, period)
    if kind == 'stripes':
        return one
    two = _bands(_ramp(size, angle + np.pi / 2), period)
    return one * (1 - two) + two * (1 - one)


def _ramp(size: tuple[int, int], angle: float) -> np.ndarray:
    """Return the signed distance in pixels from a rotated line through the centre, ``(H, W)``."""
    x, y = (np.arange(side) - side / 2 for side in size)
    return x * np.cos(angle) + y[:, None] * np.sin(angle)


def _bands(distance: np.ndarray, period: float) -> np.ndarray:
    """Return alternating bands of 0 and 1 along ``distance``, with soft edges of about one pixel.

    ``distance`` is the position of each pixel across the bands, in pixels. Each band is ``period / 2`` pixels wide.
    """
    phase = np.abs(np.mod(distance / period, 1.0) - 0.5)  # 0.5 at band starts, 0.25 at the edges
    return np.clip((phase - 0.25) * period + 0.5, 0, 1)


def contrasting_colour(rng: np.random.Generator, others: list[np.ndarray], hue: float | None) -> np.ndarray:
    """Return the one of eight random RGB colours (3,), in [0, 255], that differs most from all ``others``.

    A ``hue`` in [0, 1] restricts the colours to about this hue.
    """
    if hue is None:
        candidates = rng.uniform(0, 255, (8, 3))
    else:
        shades = zip(hue + rng.normal(0, 0.05, 8), rng.uniform(0.6, 1, 8), rng.uniform(0.35, 1, 8))
        candidates = np.stack([_rgb(*shade) for shade in shades])
    distances = np.linalg.norm(candidates[:, None] - np.stack(others), axis=-1).min(axis=1)
    return candidates[distances.argmax()]


def draw_fill(
    rng: np.random.Generator, size: tuple[int, int], colour: np.ndarray, fill: str, diameter: float
) -> np.ndarray:
    """Return the texture of a shape, RGB in [0, 255].

    Args:
        rng (np.random.Generator): Random generator.
        size (tuple[int, int]): Width and height of the image in pixels.
        colour (np.ndarray): Colour of the shape, ``(3,)``.
        fill (str): One of :data:`FILLS`.
        diameter (float): Diameter of the shape in pixels, which scales the bands of ``'striped'``.

    Returns:
        np.ndarray: ``(H, W, 3)`` for the whole image, or ``colour`` for ``'plain'``.
    """
    if fill == 'plain':
        return colour
    # bands towards the further of black and white are always visible
    target = 0 if colour.mean() > 127 else 255
    bands = _bands(_ramp(size, rng.uniform(0, 2 * np.pi)), diameter * rng.uniform(0.16, 0.24))
    return colour + (target - colour) * (0.9 * bands[..., None])
