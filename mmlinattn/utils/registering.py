# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from importlib.util import find_spec
from typing import Any

from .files import project_files


def bare_name(kind: Any) -> str:
    """Return the class name of a ``type``: a registered name, ``scope.name``, a path, or the class itself."""
    return getattr(kind, '__name__', str(kind)).rpartition('.')[2]


def register_all_modules(init_default_scope: bool = True) -> None:
    """Register the classifiers of this package in MMPretrain's hub. Idempotent; a no-op without MMPretrain.

    ``mmengine.hub.get_model('mmlinattn::...')`` calls it. MMPretrain's ``list_models``, ``get_model`` and
    ``ImageClassificationInferencer`` then take the names of the metafiles (``ravlt_t_in1k``).

    Args:
        init_default_scope (bool): Passed by MMEngine, and unused: a config's scope is that of its task.
    """
    if find_spec('mmpretrain') is None:
        return  # modules are registered on import
    from mmpretrain.apis import ModelHub
    from modelindex.load_model_index import load

    index = project_files('model-index.yml')
    known = ModelHub._models_dict
    loaded = load(str(index))
    loaded.build_models_with_collections()
    for model in loaded.models:
        # detectors and segmentors are not MMPretrain's
        if model.name.lower() not in known and str(model.config).startswith('configs/mmpretrain/'):
            model.config = str(index.parent / model.config)
            known[model.name.lower()] = model
