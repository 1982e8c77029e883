# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Registries of the scope ``mmlinattn``, and names of classes whose modules are imported when a config names them.

MMEngine writes the scope into the configs that others inherit from us by name. This package registers in MMEngine's
root registries for three tasks, so a type of that scope is the one that the config's task knows: MMDetection's
``LoadAnnotations`` in a detector's config, MMSegmentation's in a segmentor's.
"""

from importlib import import_module
from typing import Any, Optional

import mmengine.registry
from mmengine.registry import HOOKS, OPTIM_WRAPPER_CONSTRUCTORS, RUNNERS, Registry

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

# names in MMEngine's root registries by module
LATE: dict[str, tuple[Registry, tuple[str, ...]]] = {
    'engine.hooks': (
        HOOKS,
        (
            *('CheckpointMatchHook', 'CompileHook', 'DataCheckHook', 'ExactResumeHook', 'FiniteLossHook'),
            *('ProgressHook', 'RehearsalHook', 'ResultsHook', 'SafeCheckpointHook', 'ScheduleCheckHook', 'StopHook'),
            'UnusedParametersHook',
        ),
    ),
    'engine.optimizers': (
        OPTIM_WRAPPER_CONSTRUCTORS,
        ('BackboneLayerDecayOptimWrapperConstructor', 'MergedOptimWrapperConstructor'),
    ),
    'engine.runner': (RUNNERS, ('SafeRunner',)),
}


def _builder(module: str, name: str) -> Any:
    """Return a function that imports a class and builds an instance of it, as a registry expects."""

    def load() -> Any:
        return getattr(import_module(f'{SCOPE}.{module}'), name)  # the import puts the class in the function's place

    def build(*args: Any, **kwargs: Any) -> Any:
        return load()(*args, **kwargs)

    build.__name__ = name
    build.from_cfg = lambda cfg: load().from_cfg(cfg)  # type: ignore[attr-defined]
    return build


for module, (registry, names) in LATE.items():
    for name in names:
        registry.register_module(name, module=_builder(module, name), force=True)
