# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Draw training images with their labels, for a look at what was read."""

from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from PIL import Image, ImageOps

from .data import OwnData
from .mask_values import IGNORED
from .names import some

_COUNT = 6
_LONGER_SIDE = 640


def _chosen(examples: list) -> list:
    """Return six images, spread over classes and numbers of objects; without objects only if no image has any."""
    labelled = [example for example in examples if example.objects] or examples
    ordered = sorted(labelled, key=lambda example: (example.label, len(example.objects)))
    return [ordered[i] for i in np.unique(np.linspace(0, len(ordered) - 1, _COUNT).round().astype(int))]


def draw_examples(data: OwnData, file: Path) -> None:
    """Write a PNG file of six training images with boxes and polygons, the colours of a mask, or a class."""
    figure = Figure(figsize=(15, 10), layout='constrained')
    colours = [colormaps['tab20'](i % 20) for i in range(len(data.classes))]
    for axes, example in zip(figure.subplots(2, 3).flat, _chosen(data.items['train'])):
        with Image.open(example.path) as opened:
            image = ImageOps.exif_transpose(opened)
            pixels = np.asarray(image if image.mode in ('L', 'RGB', 'RGBA', 'I;16', 'I', 'F') else image.convert('RGB'))
        if pixels.dtype != np.uint8:
            pixels = np.interp(pixels, (pixels.min(), pixels.max()), (0, 255)).astype(np.uint8)
        if data.labels_of and pixels.ndim == 3:  # grey, so that the colours of a mask are those of its legend
            pixels = pixels[..., :3].mean(axis=-1).astype(np.uint8)
        step = max(1, max(pixels.shape[:2]) // _LONGER_SIDE)
        height, width = pixels.shape[:2]
        axes.imshow(pixels[::step, ::step], cmap='gray', vmin=0, vmax=255, extent=(0, width, height, 0))
        axes.set_title(f'{example.path.name}\n{example.label}'.strip()[-80:], parse_math=False)
        axes.axis('off')
        for item in example.objects:
            colour = colours[data.classes.index(item.name)] if item.name in data.classes else (1, 1, 1, 1)
            left, top, right, bottom = item.box
            line = '--' if item.is_ignored else '-'
            sides = right - left, bottom - top
            axes.add_patch(Rectangle((left, top), *sides, fill=False, edgecolor=colour, linewidth=1.5, linestyle=line))
            for part in _polygons(item.segmentation) if data.masks else ():
                axes.add_patch(Polygon(part, facecolor=(*colour[:3], 0.4), edgecolor=colour))
            name = f'{item.name or "all classes"}{" (ignored)" if item.is_ignored else ""}'
            background = dict(facecolor=colour, pad=1, linewidth=0)
            axes.text(left, top, name, fontsize=8, va='bottom', parse_math=False, clip_on=True, bbox=background)
        if data.labels_of:
            labels = data.labels_of(example.file)[::step, ::step]
            overlay = np.array([*colours, (0, 0, 0, 1)])[np.where(labels == IGNORED, len(colours), labels)]
            overlay[..., 3] = 0.5
            axes.imshow(overlay, extent=(0, width, height, 0), interpolation='nearest')
            seen = [data.classes[i] for i in np.unique(labels[labels != IGNORED])]
            handles = [Rectangle((0, 0), 1, 1, color=colours[data.classes.index(name)]) for name in seen]
            axes.legend(handles, seen, fontsize=8, loc='lower right')
    for axes in figure.axes:
        axes.axis('off')
    figure.suptitle(f'{data.kind}: {some(data.classes)}', parse_math=False)
    figure.savefig(file, dpi=80)


def is_drawn(file: Path) -> bool:
    """Return True for a file of :func:`draw_examples`, by the name that matplotlib writes into its drawings."""
    with suppress(OSError), Image.open(file) as image:
        return str(image.info.get('Software')).startswith('Matplotlib')
    return False


def _polygons(segmentation: object) -> list[np.ndarray]:
    """Convert polygons ``[x, y, ...]`` or run lengths of COCO to polygons (N, 2); other values give none."""
    if isinstance(segmentation, dict):
        from pycocotools import mask as coco_masks

        is_compressed = not isinstance(segmentation['counts'], list)
        rle = segmentation if is_compressed else coco_masks.frPyObjects(segmentation, *segmentation['size'])
        found, _ = cv2.findContours(coco_masks.decode(rle), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
        return [part.reshape(-1, 2) for part in found if len(part) >= 3]
    return [np.reshape(part, (-1, 2)) for part in segmentation] if isinstance(segmentation, list) else []
