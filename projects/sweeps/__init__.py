# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Swap the backbone of every config of MMDetection, MMSegmentation and MMPretrain; this takes hours."""
