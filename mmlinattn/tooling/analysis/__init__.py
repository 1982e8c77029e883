# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Sizes, costs and attention maps of models; nothing here is needed to train or test one."""
