# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""RALA and linear attention by Triton kernels, for whoever asks for them (``MMLINATTN_OPS=triton``). Tested on compute
capability 9.0; elsewhere they pass Triton's interpreter and compile for 8.0 to 12.0."""
