# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""A page to click on: where does this token look?"""
