# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Helpers of the tests: toys, released cases, small models, runs of tools."""
