# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Writers of the pages and files that are made from configs, tables and code."""
