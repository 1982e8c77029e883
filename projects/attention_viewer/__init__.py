# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Web page of attention maps for clicked pixels."""
