# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Boxes of VOC XML and YOLO text files as COCO JSON, which MMDetection reads best."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

from ...utils.errors import RunError, described


class Photo(NamedTuple):
    """An image and what is drawn into it."""

    file_name: str  # relative to the folder of the images
    width: int
    height: int
    objects: list  # (name of its class, (left, top, right, bottom) in pixels, whether it is to be ignored)


def read_voc(root: Path, stems: list[str]) -> list[Photo]:
    """The images ``stems`` of a folder with Annotations/ and JPEGImages/.

    Raises:
        RunError: A file is missing or no VOC annotation.
    """
    pictures = {path.stem: path.name for path in sorted((root / 'JPEGImages').iterdir())}
    photos = []
    for stem in stems:
        path = root / 'Annotations' / f'{stem}.xml'
        if stem not in pictures:
            raise RunError(f'{root / "JPEGImages"}: no image {stem}, which ImageSets/Main names.')
        try:
            tree = ElementTree.parse(path).getroot()
            width, height = (int(float(_text(tree, f'size/{side}'))) for side in ('width', 'height'))
            objects = [
                (
                    _text(item, 'name').strip(),
                    tuple(float(_text(item, f'bndbox/{edge}')) for edge in ('xmin', 'ymin', 'xmax', 'ymax')),
                    item.findtext('difficult', '0').strip() == '1',
                )
                for item in tree.iter('object')
            ]
        except (OSError, ElementTree.ParseError, ValueError) as error:
            raise RunError(f'{path} cannot be read: {described(error)}') from error
        photos.append(Photo(pictures[stem], width, height, objects))
    return photos


def _text(tree: ElementTree.Element, path: str) -> str:
    text = tree.findtext(path)
    if not text:
        raise ValueError(f'{tree.tag} without {path}')
    return text


def as_coco(photos: list[Photo], classes: list[str]) -> tuple[dict, int]:
    """A COCO data set, boxes cut to their images, and how many boxes without area were left out."""
    images, annotations, flat = [], [], 0
    for photo in photos:
        image = dict(id=len(images) + 1, file_name=photo.file_name, width=photo.width, height=photo.height)
        images.append(image)
        for name, (left, top, right, bottom), ignored in photo.objects:
            left, right = (min(max(x, 0.0), photo.width) for x in (left, right))
            top, bottom = (min(max(y, 0.0), photo.height) for y in (top, bottom))
            width, height = right - left, bottom - top
            if width <= 0 or height <= 0:
                flat += 1
                continue
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=image['id'],
                    category_id=classes.index(name) + 1,
                    bbox=[left, top, width, height],
                    area=width * height,
                    iscrowd=int(ignored),
                )
            )
    categories = [dict(id=i + 1, name=name) for i, name in enumerate(classes)]
    return dict(images=images, annotations=annotations, categories=categories), flat
