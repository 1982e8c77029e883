# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read the files of a data set and compare them with the config."""
