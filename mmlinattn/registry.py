# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Registries of the scope ``mmlinattn``, which MMEngine writes into what a config inherits from us by name.

This package registers in MMEngine's root registries for three tasks, so a type of that scope is the one that the
config's task knows: MMDetection's ``LoadAnnotations`` in a detector's config, MMSegmentation's in a segmentor's.
"""

from typing import Optional

import mmengine.registry
from mmengine.registry import Registry

from .utils.private_apis import default_scopes

SCOPE = 'mmlinattn'


class TaskRegistry(Registry):
    """A child of a root registry that holds nothing and looks types up in the default scope of the run."""

    def get(self, key: str) -> Optional[type]:
        scope, name = self.split_scope_key(key)
        task = next((default for default in reversed(default_scopes()) if default != SCOPE), self.root.scope)
        with self.root.switch_scope_and_registry(task) as registry:
            return registry.get(name if scope == SCOPE else key)


REGISTRIES = [
    TaskRegistry(root.name, parent=root, scope=SCOPE)
    for root in map(mmengine.registry.__dict__.get, mmengine.registry.__all__)
    if isinstance(root, Registry) and SCOPE not in root.children
]
