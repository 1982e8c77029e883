# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Detectors learnt from scratch on 292 photographs of blood cells: ours beside MMDetection's."""
