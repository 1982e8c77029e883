# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Makes Triton's interpreter work with recent NumPy, and run programs in a random order; import it where
``TRITON_INTERPRET=1``, before kernels run."""

import itertools
import random
from unittest import mock

from triton.runtime import interpreter

patch = interpreter._patch_lang_tensor


def patch_with_index(tensor, *scope):
    """Bounds of loops come as arrays of one element, of which NumPy 2.4 makes no number."""
    patch(tensor, *scope)
    set_attribute = scope[0].set_attr if scope else setattr  # before Triton 3.6 there is no scope
    set_attribute(tensor, '__index__', lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = patch_with_index


def shuffled(seed: int):
    """A context in which the programs of a kernel run in a random order: none may rely on another."""
    builder, orders = interpreter.interpreter_builder, {}
    places = random.Random(seed)

    def set_grid_dim(*sizes):
        type(builder).set_grid_dim(builder, *sizes)
        every = list(itertools.product(*map(range, sizes)))
        orders.clear()
        orders.update(zip(every, places.sample(every, len(every))))

    def set_grid_idx(*place):
        type(builder).set_grid_idx(builder, *orders[place])

    return mock.patch.multiple(builder, set_grid_dim=set_grid_dim, set_grid_idx=set_grid_idx)
