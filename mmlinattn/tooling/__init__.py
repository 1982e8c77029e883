# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Code of the command-line tools. No other subpackage of the plugin imports it.

:mod:`command_line` has arguments and one-line errors, :mod:`configs` reads and checks configs, :mod:`running` builds
the Runner. Each of `analysis/`, `datasets/`, `export/`, `own_data/` and `swapping/` belongs to one tool.
"""
