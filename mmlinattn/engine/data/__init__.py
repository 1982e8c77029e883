# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the files of a data set say, and whether it fits the config."""
