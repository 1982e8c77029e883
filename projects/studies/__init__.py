# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Do the papers' orderings hold when their ablations are retrained small? See docs/studies.md."""
