# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Hostile files, and state dicts with released keys."""

import io
import os
from pathlib import Path

import torch

from helpers import goldens
from mmlinattn.backbones import RAVLT

ARCH = dict(RAVLT.arch_zoo['tiny'], embed_dims=(8, 16, 32, 64))


class Hostile:
    """Object that calls ``function(*args)`` when it is unpickled."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def touch_when_loaded(marker: Path) -> Hostile:
    """Return an object that creates the file ``marker`` when it is unpickled."""
    return Hostile(os.system, f'touch {marker}')


def saved(thing) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def released_ravlt(dense: bool = False) -> dict:
    """Return random weights with the keys of a released RAVLT-T, or its detector, and an eighth of its channels."""
    released = goldens.info('ravlt_det_t_256x320' if dense else 'ravlt_t')['state']
    generator, state = torch.Generator().manual_seed(0), {}
    for key, (_, shape) in released.items():
        small = [size if size < 8 else size // 8 for size in shape]  # kernel sizes and image channels stay
        state[key] = torch.rand(small, generator=generator) + 0.5 if shape else torch.tensor(7)
    return state
