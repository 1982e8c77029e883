# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every computation that has more than one form (plain, CPU, GPU), one folder each; :mod:`.forms` says which runs."""

from .forms import use

__all__ = ['use']
