# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write images and index files in the folder layouts of COCO 2017, ADEChallengeData2016 and ImageNet-1k."""

import json
from pathlib import Path
from typing import Any

import cv2
import mmcv
import numpy as np

from .shapes import (
    ADE20K_NAMES,
    ADE_CLASSES,
    BACKGROUNDS,
    COCO_CLASSES,
    FILLS,
    IMAGENET_CLASSES,
    SHAPES,
    UNLABELLED_SHAPE,
    draw_scene,
)

WNIDS = tuple(f'n9{label:07d}' for label in range(len(IMAGENET_CLASSES)))  # sort as the labels do


def shapes_of(number: int) -> int | None:
    """Return the number of shapes in an image: 0 for images 4, 24, 44, ... of a split, None (random) for others."""
    return 0 if number % 20 == 4 else None


def save_picture(path: Path, image: np.ndarray) -> None:
    mmcv.imwrite(image[..., ::-1], str(path), [cv2.IMWRITE_JPEG_QUALITY, 95])


def mask_to_polygons(mask: np.ndarray) -> list[list[int]]:
    """Trace the regions of a mask (H, W) as polygons ``[x0, y0, x1, y1, ...]`` along the edges of its pixels.

    Pixel ``(r, c)`` covers ``[c, c + 1] x [r, r + 1]``, as in pycocotools, which converts masks to run lengths only.
    OpenCV's contours run through the centres of pixels, and lose half a pixel on every side. COCO's polygons have no
    holes, so the polygon of a region runs to each of its holes and back on the same line.
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


class Coco:
    """Layout of COCO 2017: a folder of images for each split, and ``annotations/instances_{train,val}2017.json``.

    Instances have polygons; there are no crowds, keypoints or captions.
    """

    folders = ('train2017', 'val2017', 'annotations')

    @classmethod
    def write_image(cls, root: Path, split: str, number: int, rng: np.random.Generator, size: tuple[int, int]) -> dict:
        """Write image ``number`` of a split, of ``size`` (width, height); return its ``image`` and ``instances`` in the
        annotation file."""
        scene = draw_scene(rng, size, num_shapes=shapes_of(number))
        name = f'{number:012d}.jpg'
        save_picture(root / f'{split}2017' / name, scene.image)
        image = dict(id=number, file_name=name, width=size[0], height=size[1], license=1)
        instances = []
        for mask, label in zip(scene.masks, scene.labels):
            box, area = cv2.boundingRect(mask.astype(np.uint8)), int(np.count_nonzero(mask))
            known = dict(image_id=number, category_id=int(label) + 1, segmentation=mask_to_polygons(mask))
            instances.append(dict(known, area=area, bbox=list(box), iscrowd=0))
        return dict(image=image, instances=instances)

    @staticmethod
    def write_index(root: Path, records: dict[str, list[dict]]) -> None:
        categories = [dict(id=i, name=name, supercategory='shape') for i, name in enumerate(COCO_CLASSES, start=1)]
        for split, images in records.items():
            instances = [instance for image in images for instance in image['instances']]
            content = dict(
                info=dict(description='Synthetic shapes, mmlinattn', version='1.0', year=2017),
                licenses=[dict(id=1, name='Apache-2.0', url='')],
                images=[image['image'] for image in images],
                annotations=[dict(id=i, **entry) for i, entry in enumerate(instances, start=1)],
                categories=categories,
            )
            path = root / 'annotations' / f'instances_{split}2017.json'
            path.write_text(json.dumps(content, separators=(',', ':')))


class Ade:
    """Layout of ADEChallengeData2016: images, segmentation masks, ``objectInfo150.txt`` and ``sceneCategories.txt``.

    Pixels of a mask are the label plus one, or 0 without class. Only the first ``len(ADE_CLASSES)`` of ADE20K's 150
    labels occur, so that models with 150 classes can train on this data, too.
    """

    splits = dict(train='training', val='validation')
    folders = tuple(f'{kind}/{split}' for kind in ('images', 'annotations') for split in ('training', 'validation'))

    @classmethod
    def write_image(cls, root: Path, split: str, number: int, rng: np.random.Generator, size: tuple[int, int]) -> dict:
        """Write image ``number`` of a split and its segmentation mask; ``size`` is (width, height) in pixels.

        Returns:
            dict: ``name`` without suffix, ``scene`` (class of the background) and ``pixels``, a histogram of the mask's
            values: 0 is unlabelled, i + 1 is label i.
        """
        scene = draw_scene(rng, size, num_shapes=shapes_of(number), kinds=(*SHAPES, UNLABELLED_SHAPE))
        values = [ADE_CLASSES.index(kind) + 1 for kind in SHAPES] + [0]
        segmentation = np.full(scene.image.shape[:2], ADE_CLASSES.index(scene.background) + 1, np.uint8)
        for mask, kind in zip(scene.masks, scene.labels):
            segmentation[mask] = values[kind]
        name = f'ADE_{split}_{number:08d}'
        save_picture(root / 'images' / cls.splits[split] / f'{name}.jpg', scene.image)
        mmcv.imwrite(segmentation, str(root / 'annotations' / cls.splits[split] / f'{name}.png'))
        pixels = np.bincount(segmentation.ravel(), minlength=len(ADE_CLASSES) + 1)
        return dict(name=name, scene=scene.background, pixels=pixels)

    @staticmethod
    def write_index(root: Path, records: dict[str, list[dict]]) -> None:
        """Write ``objectInfo150.txt`` and ``sceneCategories.txt``; ``records`` are those of :meth:`write_image`."""
        pixels = {split: np.stack([record['pixels'] for record in part]) for split, part in records.items()}
        ratios = pixels['train'].sum(axis=0) / pixels['train'].sum()
        images = {split: np.count_nonzero(part, axis=0) for split, part in pixels.items()}
        lines = ['Idx\tRatio\tTrain\tVal\tStuff\tName']
        for value, (ours, theirs) in enumerate(zip(ADE_CLASSES, ADE20K_NAMES), start=1):
            seen = f'{images["train"][value]}\t{images["val"][value]}'
            lines.append(f'{value}\t{ratios[value]:.4f}\t{seen}\t{int(ours in BACKGROUNDS)}\t{theirs.strip()}, {ours}')
        (root / 'objectInfo150.txt').write_text('\n'.join(lines) + '\n')
        scenes = [f'{record["name"]} {record["scene"]}' for part in records.values() for record in part]
        (root / 'sceneCategories.txt').write_text('\n'.join(scenes) + '\n')


class ImageNet:
    """Layout of ImageNet: a folder for each class, and lists ``meta/{train,val}.txt`` of files with labels.

    Without the lists, MMPretrain's ``ImageNet`` requires 1000 folders. Models with 1000 classes can train on this data
    too.
    """

    folders = (*(f'{split}/{wnid}' for split in ('train', 'val') for wnid in WNIDS), 'meta')

    @classmethod
    def write_image(cls, root: Path, split: str, number: int, rng: np.random.Generator, size: tuple[int, int]) -> str:
        """Write image ``number`` of a split, of ``size`` (width, height); return its line in a list: path and label."""
        label = (number - 1) % len(IMAGENET_CLASSES)
        shape, fill = divmod(label, len(FILLS))
        plain = ('gradient', 'clouds')  # the others look like striped shapes
        drawn: dict[str, Any] = dict(kinds=(SHAPES[shape],), fill=FILLS[fill], diameters=(0.45, 0.9), backgrounds=plain)
        scene = draw_scene(rng, size, num_shapes=1, **drawn)
        wnid = WNIDS[label]
        path = f'{wnid}/{wnid}_{number}.JPEG' if split == 'train' else f'{wnid}/ILSVRC2012_val_{number:08d}.JPEG'
        save_picture(root / split / path, scene.image)
        return f'{path} {label}'

    @staticmethod
    def write_index(root: Path, records: dict[str, list[str]]) -> None:
        for split, lines in records.items():
            (root / 'meta' / f'{split}.txt').write_text('\n'.join(lines) + '\n')
        names = [f'{wnid} {name}' for wnid, name in zip(WNIDS, IMAGENET_CLASSES)]
        (root / 'LOC_synset_mapping.txt').write_text('\n'.join(names) + '\n')


LAYOUTS: dict[str, Any] = dict(coco=Coco, ade=Ade, imagenet=ImageNet)
