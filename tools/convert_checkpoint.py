# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convert a published checkpoint into one that the model of CONFIG loads key by key.

``python tools/convert_checkpoint.py SRC DST --config CONFIG``
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout serves without being installed

import mmlinattn  # noqa: F401, registers the backbones
from mmlinattn.checkpoints.convert import main
from mmlinattn.engine.stopping import clean_end

if __name__ == '__main__':
    with clean_end():
        status = main()
    sys.exit(status)
