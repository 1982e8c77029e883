# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The work of the command lines, one floor above the plugin: nothing outside this folder imports it.

:mod:`command_line` has arguments and ends of one line, :mod:`configs` reads and checks, :mod:`running` builds the
Runner; `analysis/`, `datasets/`, `export/`, `own_data/` and `swapping/` are the tools'
own rooms.
"""
