# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest

pytest.skip('check_gpu.py is being written anew', allow_module_level=True)
