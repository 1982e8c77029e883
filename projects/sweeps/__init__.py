# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Swap the backbone of one config per folder of MMDetection, MMSegmentation and MMPretrain."""
