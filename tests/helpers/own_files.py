# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Images and text files, as people have them in folders of their own."""

import json

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 64, 48


def picture(path, pixels=None, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8) if pixels is None else pixels
    Image.fromarray(pixels).save(path, **how)
    return path


def text(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path
