# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Mutation testing: change one line of the package at a time and list changes that no test notices."""
