# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Record the results of installed compiled MMCV for ``cases.py``: ``python tests/mmcv_ops/make_records.py``."""

import mmcv._ext
import numpy as np
from helpers.cases import RECORDS, make_cases, summary

if __name__ == '__main__':
    if mmcv._ext.__file__.endswith('.py'):
        raise SystemExit(f'{mmcv._ext.__file__} is not compiled MMCV')
    np.savez_compressed(RECORDS, **{name: summary(case()) for name, case in make_cases().items()})
