# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import gc

import pytest


@pytest.fixture(autouse=True, scope='package')
def quick_runners():
    """A data set collects garbage when it is built; what is there already needs no look each time."""
    gc.freeze()
    yield
    gc.unfreeze()
