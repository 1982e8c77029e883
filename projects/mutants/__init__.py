# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Does a test fail when the code is wrong?"""
