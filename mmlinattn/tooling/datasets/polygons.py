# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Masks to COCO polygons that rasterise back to the very same mask.

By hand because pycocotools only goes from polygons to masks, and OpenCV's contours run through the middles of pixels,
which loses half a pixel on every side.
"""

from __future__ import annotations

import cv2
import numpy as np


def mask_to_polygons(mask: np.ndarray) -> list[list[int]]:
    """Trace the edges of the pixels of a mask.

    The polygons run along pixel edges, at whole coordinates with pixel ``(r, c)`` covering
    ``[c, c + 1] x [r, r + 1]``, as pycocotools reads them: it rasterises them to exactly ``mask``.
    COCO's polygons have no holes, so the outline of a region goes to each of its holes and back on the same line.

    Args:
        mask: ``(H, W)`` bool or uint8.

    Returns:
        Polygons ``[x0, y0, x1, y1, ...]``, one a region; none for an empty mask.
    """
    # Enlarged twice, the pixels of a contour lie on the two sides of the edges between the
    # original pixels, and (x + 1) // 2 maps both sides of an edge to its coordinate.
    doubled = np.asarray(mask, np.uint8).repeat(2, axis=0).repeat(2, axis=1)
    contours, hierarchy = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    outlines: dict[int, np.ndarray] = {}
    holes = []
    for i, contour in enumerate(contours):
        points, parent = (contour[:, 0] + 1) // 2, hierarchy[0][i][3]
        if parent < 0:
            outlines[i] = points
        else:
            holes.append((parent, points))
    for parent, points in holes:
        start = outlines[parent][:1]
        outlines[parent] = np.concatenate((outlines[parent], start, points, points[:1]))
    return [_without_repeats(points).ravel().tolist() for points in outlines.values()]


def _without_repeats(points: np.ndarray) -> np.ndarray:
    return points[(points != np.roll(points, 1, axis=0)).any(axis=1)]
