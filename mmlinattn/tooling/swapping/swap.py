# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from pathlib import Path
from typing import NamedTuple, Optional, Union

from mmengine.config import Config

from ...utils.building import is_pretrained
from ...utils.errors import RunError
from .measuring import measure
from .plans import Plan, Way, ways
from .settings import check_pipelines, normalise, settings_for
from .smoke import Trial, TrialError, try_model
from .upstream import NoPlace, Upstream, read_upstream, together
from .writing import changes, difference, statement
from .zoo import ZooBackbone, find_backbone


class Swapped(NamedTuple):
    """An upstream config with another backbone.

    Attributes:
        changes: What the written config changes of the upstream one, a line each.
        remarks: Other notes on it for the user.
        trial: What the training step showed.
    """

    changes: list[str]
    remarks: list[str]
    trial: Trial


def swap_backbone(upstream: str, backbone: str, out: Union[str, Path], keep_optimizer: bool = False) -> Swapped:
    """Put a backbone of our configs into an upstream config, and see that the result trains and predicts.

    Args:
        upstream: ``mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py`` or a path.
        backbone: Stem of our configs: ``ravlt_t``, ``inline_swin_s``, ``flatten_pvt_v2_b1``.
        out: File to write.
        keep_optimizer: Leave upstream's optimizer in place of the one the paper trained the backbone with.

    Raises:
        NoPlace: The network has no place for a pyramid of maps.
        RunError: The arguments name nothing, the upstream model does not train here either, or its pipelines normalise.
    """
    source = read_upstream(upstream)
    new = find_backbone(backbone, source.task)
    without_weights = f'none of {backbone} are released'
    if source.image_channels != 3:
        new = new._replace(cfg={**new.cfg, 'in_channels': source.image_channels}, checkpoint=None)
        without_weights = f'images of {source.image_channels} channel(s)'
    if new.checkpoint:
        check_pipelines(source.cfg)
    settings, remarks = settings_for(source, new, keep_optimizer)
    plan, trial = _wire(source, new, settings.get('optim_wrapper') or source.cfg.get('optim_wrapper'))
    before, network = source.model, plan.network
    frozen = source.network(before)['backbone'].get('frozen_stages')
    if isinstance(frozen, int) and frozen >= len(new.stages) > 1:
        remarks.append(
            f'upstream trains nothing but what follows the backbone (frozen_stages={frozen}); here all of it trains, '
            f'unless the config says backbone=dict(frozen_stages={len(new.stages)})'
        )
    if new.checkpoint:
        network['backbone']['init_cfg'] = dict(type='Pretrained', checkpoint=new.checkpoint)
    else:
        remarks.append(f'it starts without ImageNet weights: {without_weights}')
    inner = _without_whole(together(network))
    model = _without_whole({**source.model, source.inner: inner}) if source.inner else inner
    if new.checkpoint:
        normalise(model, source.task)
    remarks += filter(None, [plan.remark])
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(_text(source, backbone, before, model, settings), encoding='utf-8')
    wrong = changes(model, source._replace(cfg=Config.fromfile(str(out))).model)
    if wrong:
        raise RunError(f'{out} does not hold the model that was tried: {"; ".join(wrong[:3])}')
    return Swapped(changes(before, model) + _said_of(settings, source.cfg), remarks, trial)


def _wire(source: Upstream, new: ZooBackbone, optim_wrapper: Optional[dict]) -> tuple[Plan, Trial]:
    """The plan whose every parameter of the backbone trains, and that predicts as upstream does."""
    network = source.network(source.model)
    possible = ways(network, measure(source), new, source.task)
    for size in source.sizes:
        errors: list[str] = []
        for way in possible:
            try:
                plan, trial = _narrowed(way, source, size, optim_wrapper)
            except TrialError as error:
                errors.append(str(error))
                continue
            if trial.without_gradient:
                errors.append(f'no gradient reaches {", ".join(trial.without_gradient[:3])} of the backbone')
            elif trial.stops and trial.stops != _what_stops(network, source, size):
                errors.append(trial.stops)
            else:
                said = f"upstream's own {trial.stops}, and so this one's" if trial.stops else ''
                return plan._replace(remark='; '.join(filter(None, (plan.remark, said)))), trial
        stops = _what_stops(network, source, size)
        if not stops:  # it is not for the size of the images
            reason = errors[0] if errors else f'the maps of {network["backbone"]["type"]} are none that a pyramid has'
            raise NoPlace(f'{source.base} has no place for {new.name}: {reason}')
    raise RunError(f'{source.base} does not run here with its own backbone either: {stops}')


def _narrowed(way: Way, source: Upstream, size: tuple[int, int], optim_wrapper: Optional[dict]) -> tuple[Plan, Trial]:
    """A way, with only the maps that the training step showed to be read."""
    plan = way()
    trial = try_model(plan.network, source, size, optim_wrapper)
    if all(trial.read) or not any(trial.read):
        return plan, trial
    plan = way(read=trial.read)
    return plan, try_model(plan.network, source, size, optim_wrapper)


def _what_stops(network: dict, source: Upstream, size: tuple[int, int]) -> str:
    """Why the upstream model does not train or predict here; '' where it does."""
    try:
        return try_model(network, source, size).stops
    except TrialError as error:
        return str(error)


def _without_whole(model: dict) -> dict:
    """A model without weights for the whole of it: they are another backbone's, and MMEngine, having loaded them, would
    not ask the backbone for its own. MMSegmentation hands ``pretrained`` to the backbone."""
    out = {key: None if key == 'pretrained' and isinstance(value, str) else value for key, value in model.items()}
    return {**out, 'init_cfg': None} if is_pretrained(out.get('init_cfg')) else out


def _text(source: Upstream, backbone: str, before: dict, model: dict, settings: dict) -> str:
    """The file: the model's differences, then the settings."""
    first = f'# {source.base} with {backbone}, by tools/swap_backbone.py of mmlinattn\n'
    if source.is_whole:
        whole = {**source.cfg.to_dict(), **settings, 'model': dict(model)}
        if whole.get('data_preprocessor'):  # MMPretrain's stands beside the model
            whole['data_preprocessor'] = whole['model'].pop('data_preprocessor')
        return first + ''.join(statement(key, value) for key, value in whole.items())
    said = difference(before, model)
    values = dict(settings)
    if not source.cfg.model.get('data_preprocessor') and 'data_preprocessor' in said:
        values['data_preprocessor'] = said.pop('data_preprocessor')  # MMPretrain's stands beside the model
    values['model'] = said
    if 'optim_wrapper' in values:
        values['optim_wrapper'] = dict(_delete_=True, **values['optim_wrapper'])
    return f'{first}_base_ = {source.base!r}\n\n' + ''.join(statement(key, value) for key, value in values.items())


def _said_of(settings: dict, upstream: Config) -> list[str]:
    """The changes of the settings, a line each."""
    old = upstream.to_dict()
    old['optim_wrapper'] = dict(dict(type='OptimWrapper'), **(old.get('optim_wrapper') or {}))
    if isinstance(old.get('param_scheduler'), dict):
        old['param_scheduler'] = [old['param_scheduler']]
    keys = ('optim_wrapper', 'param_scheduler', 'auto_scale_lr', 'load_from')
    said = [line for key in keys if key in settings for line in changes(old.get(key), settings[key], key)]
    return [*said, "custom_hooks, custom_imports, runner_type: this project's, beside upstream's"]
