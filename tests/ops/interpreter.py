# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Makes Triton's interpreter work with recent NumPy; import it where ``TRITON_INTERPRET=1``, before kernels run."""

from triton.runtime import interpreter

patch = interpreter._patch_lang_tensor


def patch_with_index(tensor, *scope):
    """Bounds of loops come as arrays of one element, of which NumPy 2.4 makes no number."""
    patch(tensor, *scope)
    set_attribute = scope[0].set_attr if scope else setattr  # before Triton 3.6 there is no scope
    set_attribute(tensor, '__index__', lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = patch_with_index
