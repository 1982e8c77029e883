# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Code of the command lines, on top of the plugin: no other subpackage imports it.

:mod:`command_line` has arguments and ends of one line, :mod:`configs` reads and checks, :mod:`running` builds the
Runner; `analysis/`, `datasets/`, `export/`, `own_data/` and `swapping/` belong to single tools.
"""
