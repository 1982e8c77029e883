# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What command lines do with a config, above engine and checkpoints; upstream's packages call this room so, too.

:mod:`cli` has arguments and ends of one line, :mod:`configs` reads and checks, :mod:`running` builds the Runner.
"""
