# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write images and annotation files as users have them, and read the converted data."""

import json
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from PIL import Image

from mmlinattn.tooling.own_data.boxes import read_boxes
from mmlinattn.tooling.own_data.data import ConfigArgs, Data
from mmlinattn.tooling.own_data.folders import read_classes
from mmlinattn.tooling.own_data.masks import read_masks
from mmlinattn.utils.errors import RunError

WIDTH, HEIGHT = 64, 48
NAMES = 'abcdef'


def picture(path, pixels=None, **how):
    """Write an image, by default of 64 x 48 random pixels by its name, and return its path; ``how`` are for Pillow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if pixels is None:
        pixels = np.random.default_rng(crc32(path.name.encode())).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
    Image.fromarray(pixels).save(path, **how)
    return path


def images(root, names=NAMES):
    """Write ``root/NAME.jpg`` for each name."""
    for name in names:
        picture(root / f'{name}.jpg')


def text(path, content):
    """Write a text, or another object as JSON, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def coco_dict(files, classes=('b', 'a'), size=(WIDTH, HEIGHT), **more):
    """Return the dict of a COCO file with an object of the first class in each image of ``files``.

    ``size`` is width and height of the images; ``more`` are further fields of the objects.
    """
    more.setdefault('bbox', [4, 8, 20, 30])
    images = [dict(id=10 + i, file_name=file, width=size[0], height=size[1]) for i, file in enumerate(files)]
    annotations = [dict(id=i, image_id=image['id'], category_id=7, **more) for i, image in enumerate(images, 1)]
    categories = [dict(id=i, name=name) for i, name in zip((7, 3), classes)]
    return dict(images=images, annotations=annotations, categories=categories)


def voc(*objects, size=(WIDTH, HEIGHT)):
    """Return VOC XML with objects: the class, left, top, right, bottom (or nothing), and further tags."""

    def tags(**values):
        return ''.join(f'<{key}>{value}</{key}>' for key, value in values.items())

    sides, items = tags(width=size[0], height=size[1]), ''
    for name, box, *more in objects:
        edges = tags(**dict(zip(('xmin', 'ymin', 'xmax', 'ymax'), box)))
        items += tags(object=tags(name=name, bndbox=edges) + ''.join(more))
    return tags(annotation=tags(size=sides) + items)


def read(root, task='detection', **options):
    """Read a data set as make_config does; the options ``images``, ``labels``, ``train`` and ``val`` may be texts."""
    paths = {key: Path(options[key]) for key in ('images', 'labels', 'train', 'val') if key in options}
    options.update(paths)
    data = Data(root, ConfigArgs(root, task, '', root, **options))
    if task == 'segmentation':
        return read_masks(data, data.root.parent / 'mine_labels')
    return read_boxes(data) if task == 'detection' else read_classes(data)


def counts(data, *splits):
    return [len(data.images[split]) for split in splits or data.images]


def boxes_of(data, *splits):
    """Return the COCO annotations of some splits by (file name, class, box).

    A box is (left, top, width, height) in pixels.
    """
    found = {}
    for split in splits or data.annotations:
        content = json.loads(data.annotations[split])
        names = {category['id']: category['name'] for category in content['categories']}
        files = {image['id']: image['file_name'] for image in content['images']}
        for entry in content['annotations']:
            box = tuple(round(side, 3) for side in entry['bbox'])
            found[files[entry['image_id']], names[entry['category_id']], box] = entry
    return found


def assert_refused(said, read, *args, **options):
    """Check that ``read(*args, **options)`` raises one line with the given words, and return it."""
    with pytest.raises(RunError) as error:
        read(*args, **options)
    line = str(error.value)
    assert all(word in line for word in ([said] if isinstance(said, str) else said)) and '\n' not in line, line
    return line
