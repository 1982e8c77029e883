# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``register_all_modules``, which MMEngine's hub looks for in a package."""

from .files import atomic_write, project_files
from .registering import register_all_modules

__all__ = ['atomic_write', 'project_files', 'register_all_modules']
