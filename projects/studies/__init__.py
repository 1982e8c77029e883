# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The papers' ablations as small models; see docs/studies.md."""
