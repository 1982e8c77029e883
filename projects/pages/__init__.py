# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Writers of the generated pages and metafiles."""
