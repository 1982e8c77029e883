# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write upstream configs with another backbone."""

from pathlib import Path
from typing import NamedTuple, Optional, Union

from mmengine.config import Config
from mmengine.registry import MODELS

from ...backbones.base import Backbone
from ...utils.building import is_pretrained
from ...utils.errors import RunError
from ...utils.registering import bare_name
from .candidates import Candidate, candidates
from .measuring import measure
from .settings import check_pipelines, normalise, settings_for
from .smoke import SmokeResult, smoke_test
from .upstream import Unsupported, Upstream, join_encoder, listed, read_upstream
from .writing import changes, difference, is_own, signed, statement
from .zoo import ZooBackbone, find_backbone

_TOOL = 'swap_backbone.py'


class Swapped(NamedTuple):
    """An upstream config with another backbone.

    Attributes:
        changes: Differences from the upstream config, one line per value.
        remarks: Other notes for the user.
        result: Result of its smoke test.
    """

    changes: list[str]
    remarks: list[str]
    result: SmokeResult


def swap_backbone(upstream: str, backbone: str, out: Union[str, Path], keep_optimizer: bool = False) -> Swapped:
    """Write an upstream config (``mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py`` or a path) with a backbone of our
    configs (``ravlt_t``), after a smoke test. With ``keep_optimizer``, its optimizer is not replaced by the paper's.

    Raises:
        Unsupported: The network cannot use the backbone.
        RunError: An argument is unknown, ``out`` was edited or written by hand, the upstream model does not train here
            either, or its pipelines normalise images.
    """
    if Path(out).exists() and not is_own(Path(out), _TOOL):
        raise RunError(f'--out {str(out)!r} exists and is not by tools/{_TOOL}, or was edited. Name another file.')
    source = read_upstream(upstream)
    new = find_backbone(backbone, source.task)
    new = new._replace(cfg={**new.cfg, **_inherited_settings(source.network['backbone'], len(new.stages))})
    without_weights = f'none of {backbone} are released'
    if source.image_channels != 3:
        new = new._replace(cfg={**new.cfg, 'in_channels': source.image_channels}, checkpoint=None)
        without_weights = f'images of {source.image_channels} channel(s)'
    if new.checkpoint:
        check_pipelines(source.cfg)
    settings, remarks = settings_for(source, new, keep_optimizer)
    optim_wrapper = settings.get('optim_wrapper') or source.cfg.get('optim_wrapper')
    candidate, result = _first_that_trains(source, new, optim_wrapper)
    network = candidate.network
    frozen = source.network['backbone'].get('frozen_stages')
    if isinstance(frozen, int) and frozen >= len(new.stages) > 1:
        remarks.append(
            f'upstream freezes its whole backbone (frozen_stages={frozen}); here all of it trains, unless the config '
            f'says backbone=dict(frozen_stages={len(new.stages)})'
        )
    if new.checkpoint:
        network['backbone']['init_cfg'] = dict(type='Pretrained', checkpoint=new.checkpoint)
    else:
        remarks.append(f'it starts without ImageNet weights: {without_weights}')
    model = _without_weights(join_encoder(network))
    if source.inner:
        model = _without_weights({**source.model, source.inner: model})
    if new.checkpoint:
        normalise(model, source.task)
    if candidate.remark:
        remarks.append(candidate.remark)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(_text(source, backbone, model, settings), encoding='utf-8')
    wrong = changes(model, source._replace(cfg=Config.fromfile(str(out))).model)
    if wrong:
        raise RunError(f'{out} does not hold the model that was tried: {"; ".join(wrong[:3])}')
    old = source.cfg.to_dict()
    old['optim_wrapper'] = dict(dict(type='OptimWrapper'), **(old.get('optim_wrapper') or {}))
    old['param_scheduler'] = listed(old.get('param_scheduler'))
    keys = [key for key in ('optim_wrapper', 'param_scheduler', 'auto_scale_lr', 'load_from') if key in settings]
    lines = changes(source.model, model) + [line for key in keys for line in changes(old.get(key), settings[key], key)]
    return Swapped([*lines, "custom_imports: this project's, beside upstream's"], remarks, result)


def _inherited_settings(given: dict, num_stages: int) -> dict:
    """Return the settings of upstream's backbone ``given`` that the new backbone of ``num_stages`` inherits:
    ``with_cp=True``, and if ``given`` is a backbone of this package, ``norm_eval=True`` and ``frozen_stages``."""
    kind = MODELS.get(bare_name(given.get('type')))
    kept: dict = dict(with_cp=True) if given.get('with_cp') is True else {}
    if isinstance(kind, type) and issubclass(kind, Backbone):
        frozen = given.get('frozen_stages')
        if given.get('norm_eval') is True:
            kept['norm_eval'] = True
        if isinstance(frozen, int) and 0 <= frozen < num_stages:
            kept['frozen_stages'] = frozen
    return kept


def _first_that_trains(
    source: Upstream, new: ZooBackbone, optim_wrapper: Optional[dict]
) -> tuple[Candidate, SmokeResult]:
    """Return the first candidate that trains every parameter of the backbone and predicts without an error, unless
    upstream's own backbone fails in the prediction, too."""
    network = source.network
    found = candidates(network, measure(source), new, source.task)
    for size in source.sizes:
        errors = [] if found else [f'the feature maps of {network["backbone"]["type"]} are none of a pyramid']
        for candidate in found:
            result = smoke_test(candidate.network, source, size, optim_wrapper)
            if result.without_gradient:
                errors.append(f'no gradient reaches {", ".join(result.without_gradient[:3])} of the backbone')
            elif not result.failure:
                return candidate, result
            elif result.loss is not None and result.failure == smoke_test(network, source, size).failure:
                remarks = [candidate.remark, f'{result.failure}, as with its own backbone']
                return candidate._replace(remark='; '.join(filter(None, remarks))), result
            else:
                errors.append(result.failure)
        failure = smoke_test(network, source, size).failure
        if not failure:  # the size of the images is not the reason
            raise Unsupported(source.base, errors[0])
    raise RunError(f'{source.base} does not run here with its own backbone either: {failure}')


def _without_weights(model: dict) -> dict:
    """Return a model config without weights of the whole model: MMEngine would load them in place of the backbone's
    own, and MMSegmentation passes ``pretrained`` to the backbone."""
    out = {key: None if key == 'pretrained' and isinstance(value, str) else value for key, value in model.items()}
    return {**out, 'init_cfg': None} if is_pretrained(out.get('init_cfg')) else out


def _text(source: Upstream, backbone: str, model: dict, settings: dict) -> str:
    """Return the text of the written config: ``settings``, then the differences of ``model`` from upstream's model."""
    text, values = '', dict(settings)
    if source.is_whole:
        values, model = {**source.cfg.to_dict(), **settings}, dict(model)
    else:
        text += f'_base_ = {source.base!r}\n\n'
        model = difference(source.model, model)
        if 'optim_wrapper' in values:
            values['optim_wrapper'] = dict(_delete_=True, **values['optim_wrapper'])
    if 'data_preprocessor' in model and not source.cfg.model.get('data_preprocessor'):  # MMPretrain's, beside the model
        values['data_preprocessor'] = model.pop('data_preprocessor')
    values['model'] = model
    text += ''.join(statement(key, value) for key, value in values.items())
    return signed(text, _TOOL, f'{source.base} with {backbone}')
