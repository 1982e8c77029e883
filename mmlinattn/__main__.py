# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``python -m mmlinattn train ...``: the command ``mmlinattn`` of this Python."""

from mmlinattn_console import main

if __name__ == '__main__':
    main()
