# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from importlib.util import find_spec
from typing import Any

from .files import project_files


def bare_name(kind: Any) -> str:
    """The class that a ``type`` of a config means: a registered name, ``scope.name``, a path, or the class itself."""
    return getattr(kind, '__name__', str(kind)).rpartition('.')[2]


def register_all_modules(init_default_scope: bool = True) -> None:
    """Register everything of this package, and its classifiers with MMPretrain's hub by their names.

    MMEngine's ``mmengine.hub.get_model('mmlinattn::...')`` calls it. Afterwards MMPretrain's ``list_models``,
    ``get_model`` and ``ImageClassificationInferencer`` know the classifiers by the names of the metafiles
    (``ravlt_t_in1k``). Calling it again does no harm; without MMPretrain it registers the modules only.

    Args:
        init_default_scope (bool): What MMEngine's registries pass; without effect, since the scope of a config is that
            of the task's package.
    """
    if find_spec('mmpretrain') is None:
        return  # the modules are registered by the import of the package
    from mmpretrain.apis import ModelHub
    from modelindex.load_model_index import load

    index = project_files('model-index.yml')
    known = ModelHub._models_dict
    loaded = load(str(index))
    loaded.build_models_with_collections()
    for model in loaded.models:
        # detectors and segmentors are none of MMPretrain's models
        if model.name.lower() not in known and str(model.config).startswith('configs/mmpretrain/'):
            model.config = str(index.parent / model.config)
            known[model.name.lower()] = model
