# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Helpers of the tests: toy models and data sets, released cases, small models, runs of tools."""
