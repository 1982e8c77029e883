# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write images and annotation files as users have them, and read the converted data."""

import json
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


def picture(path, pixels=None, **how):
    """Write an image, by default of 64 x 48 random pixels by its name, and return its path; ``how`` are for Pillow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if pixels is None:
        pixels = np.random.default_rng(crc32(path.name.encode())).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
    Image.fromarray(pixels).save(path, **how)
    return path


def text(path, content):
    """Write a text, or another object as JSON, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def read(root, task='detection', **options):
    """Read a data set as make_config does."""
    data = Data(root, ConfigArgs(root, task, '', root, **options))
    if task == 'segmentation':
        return read_masks(data, data.root.parent / 'mine_labels')
    return read_boxes(data) if task == 'detection' else read_classes(data)


def counts(data, *splits):
    """Return the number of images of each split."""
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


def assert_refused(said, read, *args):
    """Check that ``read(*args)`` raises one line with the given words."""
    with pytest.raises(RunError) as error:
        read(*args)
    line = str(error.value)
    assert all(word in line for word in ([said] if isinstance(said, str) else said)) and '\n' not in line, line
