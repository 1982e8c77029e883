# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Interactive page of attention maps."""
