# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Reads the files of a data set and checks whether they fit the config."""
