# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Helpers for errors, files and building models; ``register_all_modules`` is called by MMEngine's hub."""

from .files import atomic_write, project_files
from .registering import register_all_modules

__all__ = ['atomic_write', 'project_files', 'register_all_modules']
