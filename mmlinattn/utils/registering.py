# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from importlib.util import find_spec
from typing import Any

from .files import project_files


def bare_name(kind: Any) -> str:
    """Return the class name of a config's ``type``, given as a registered name, ``scope.name``, a dotted path or a
    class."""
    return getattr(kind, '__name__', str(kind)).rpartition('.')[2]


def register_all_modules(init_default_scope: bool = True) -> None:
    """Register the classifiers of this package in MMPretrain's model hub. Without MMPretrain, nothing is done.

    ``mmengine.hub.get_model('mmlinattn::...')`` calls this function. MMPretrain's ``list_models``, ``get_model`` and
    ``ImageClassificationInferencer`` then accept names of our metafiles (``ravlt_t_in1k``). Repeated calls have no
    further effect.

    Args:
        init_default_scope (bool): Passed by MMEngine and unused, as each config sets its own scope.
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
