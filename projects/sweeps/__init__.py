# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What is tried for hours: upstream configs, runs under faults."""
