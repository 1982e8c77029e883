# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""RALA and linear attention by Triton kernels, for whoever asks for them (``MMLINATTN_OPS=triton``). They pass Triton's
interpreter and compile for compute capability 8.0 to 12.0; no GPU has run or timed them yet."""
