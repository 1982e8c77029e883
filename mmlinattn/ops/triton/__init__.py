# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""GPU kernels. Imported on first use on a GPU; on CPUs they run in Triton's interpreter, for tests."""
