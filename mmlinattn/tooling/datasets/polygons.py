# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convert masks to COCO polygons that rasterise to the same mask.

pycocotools converts masks to run lengths only, COCO's form for crowds. OpenCV's contours run through the centres of
pixels, and lose half a pixel on every side.
"""

import cv2
import numpy as np


def mask_to_polygons(mask: np.ndarray) -> list[list[int]]:
    """Trace the regions of a mask along the edges of its pixels.

    Pixel ``(r, c)`` covers ``[c, c + 1] x [r, r + 1]``, as in pycocotools, and coordinates are integers. COCO's
    polygons have no holes, so the polygon of a region runs to each of its holes and back on the same line.

    Args:
        mask: ``(H, W)`` bool or uint8.

    Returns:
        Polygons ``[x0, y0, x1, y1, ...]``, one for each region; an empty list for an empty mask.
    """
    # in the enlarged mask, contours have a pixel on each side of an edge; (x + 1) // 2 is its coordinate
    doubled = np.asarray(mask, np.uint8).repeat(2, axis=0).repeat(2, axis=1)
    contours, hierarchy = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    polygons: dict[int, np.ndarray] = {}
    holes = []
    for i, contour in enumerate(contours):
        points, parent = (contour[:, 0] + 1) // 2, hierarchy[0][i][3]
        if parent < 0:
            polygons[i] = points
        else:
            holes.append((parent, points))
    for parent, points in holes:
        start = polygons[parent][:1]
        polygons[parent] = np.concatenate((polygons[parent], start, points, points[:1]))
    # without repeated points
    return [p[(p != np.roll(p, 1, axis=0)).any(axis=1)].ravel().tolist() for p in polygons.values()]
