# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from mmengine.config import Config
from mmengine.utils import get_installed_path

from ..utils.errors import RunError
from ..utils.files import project_files
from ..utils.registering import bare_name
from .rewiring import Plan, direct, plans, without_unread
from .trial import Trial, TrialError, try_model
from .upstream import Measured, NoPlace, Upstream, is_pretrained, measure, read_upstream
from .writing import Code, as_text, changes, difference
from .zoo import ZooBackbone, find_backbone, plain_dict, recipe

# What the released weights were trained with: ImageNet's, RGB
MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
_PRECISION = 'mixed precision is a switch of the tools here (--amp), so that the file also trains on a CPU'


class Swapped(NamedTuple):
    """An upstream config with another backbone.

    Attributes:
        text: The config that inherits the upstream one.
        changes: What it changes, a line each.
        remarks: What else is to be known of it.
        trial: What the training step showed.
    """

    text: str
    changes: list[str]
    remarks: list[str]
    trial: Trial


def swap_backbone(
    upstream: str, backbone: str, out: Union[str, Path, None] = None, keep_optimizer: bool = False
) -> Swapped:
    """Put a backbone of our configs into an upstream config, and see that the result trains and predicts.

    Args:
        upstream: ``mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py`` or a path.
        backbone: Stem of our configs: ``ravlt_t``, ``inline_swin_s``, ``flatten_pvt_v2_b1``.
        out: File to write; None writes none.
        keep_optimizer: Leave upstream's optimizer in place of the one the paper trained the backbone with.

    Returns:
        Swapped: The config and what is to be said of it.

    Raises:
        NoPlace: The network has no place for a pyramid of maps.
        RunError: The arguments name nothing, or the upstream model does not train here either.
    """
    source = read_upstream(upstream)
    new = find_backbone(backbone, source.task)
    old = measure(source)
    is_grey = source.image_channels != 3
    if is_grey:
        new = new._replace(cfg={**new.cfg, 'in_channels': source.image_channels}, checkpoint=None)
    settings, remarks = _settings(source, new, keep_optimizer)
    plan, trial, remark = _wire(source, new, old, settings.get('optim_wrapper') or source.cfg.get('optim_wrapper'))
    model = source.model
    before = copy.deepcopy(model)
    network = copy.deepcopy(plan.network)
    if 'teacher_ckpt' in network:
        network['teacher_ckpt'] = source.network(source.model)['teacher_ckpt']
    frozen = source.network(source.model)['backbone'].get('frozen_stages')
    if isinstance(frozen, int) and frozen >= len(new.stages) > 1:
        remarks.append(
            f'upstream trains nothing but what follows the backbone (frozen_stages={frozen}); here all of it trains, '
            f'unless the config says backbone=dict(frozen_stages={len(new.stages)})'
        )
    if new.checkpoint is None:
        why = f'pictures of {source.image_channels} channel(s)' if is_grey else f'none of {backbone} are released'
        remarks.append(f'it starts without ImageNet weights: {why}')
    else:
        network['backbone']['init_cfg'] = dict(type='Pretrained', checkpoint=new.checkpoint)
    model = without_whole_weights(_replaced(model, source.path, network), source.path)
    if new.checkpoint is not None:
        _normalise(model)
    remarks += [remark] if remark else []
    text = _text(source, backbone, before, model, settings)
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(text, encoding='utf-8')
        _check_file(Path(out), source, model)
    said = changes(before, model)
    if 'optim_wrapper' in settings:
        ours, theirs = settings['optim_wrapper'], plain_dict(source.cfg.get('optim_wrapper') or {})
        said.append(f'optimizer: {_named(theirs.get("optimizer") or {})} -> {_named(ours["optimizer"])}')
        theirs.setdefault('type', 'OptimWrapper')
        both = ((key, theirs.get(key), ours.get(key)) for key in dict.fromkeys([*theirs, *ours]) if key != 'optimizer')
        said += [f'optim_wrapper.{key}: {one} -> {other}' for key, one, other in both if one != other]
    for key in ('param_scheduler', 'auto_scale_lr'):
        if key in settings:
            given = source.cfg.get(key)
            given = [given] if key == 'param_scheduler' and isinstance(given, dict) else given
            said += changes(plain_dict(given or {}), settings[key], key)
    said += [f'{key}: {source.cfg.get(key)} -> None' for key in ('load_from',) if key in settings]
    said.append("custom_hooks, custom_imports: this project's, beside upstream's")
    return Swapped(text, said, remarks, trial)


def _named(optimizer: dict) -> str:
    return ' '.join(
        f'{key}={optimizer[key]}' if key != 'type' else str(optimizer[key])
        for key in ('type', 'lr', 'weight_decay')
        if key in optimizer
    )


def _wire(source: Upstream, new: ZooBackbone, old: Measured, optim_wrapper: Optional[dict]) -> tuple[Plan, Trial, str]:
    """The first way that trains every parameter of the backbone and predicts, and what is to be said of it."""
    network = _trainable(source)
    errors: list[str] = []
    upstream: Optional[str] = None  # what stops the upstream model
    tried: list[dict] = []
    for plan in plans(network, old.maps, new, source.task, old.alone):
        if plan.network in tried:
            continue
        tried.append(plan.network)
        try:
            trial = _attempt(plan.network, source, optim_wrapper)
        except TrialError as error:
            errors.append(str(error))
            continue
        narrowed = _narrow(network, new, plan, trial)
        if narrowed is not None:
            try:
                again = _attempt(narrowed.network, source, optim_wrapper)
                if not again.without_gradient and (trial.stops or not again.stops):
                    plan, trial = narrowed, again
            except TrialError as error:
                errors.append(str(error))
        if trial.without_gradient:
            errors.append(f'no gradient reaches {", ".join(trial.without_gradient[:3])} of the backbone')
        elif not trial.stops:
            return plan, trial, plan.remark
        else:
            upstream = _what_stops(network, source) if upstream is None else upstream
            if upstream == trial.stops:
                return (
                    plan,
                    trial,
                    f"{plan.remark}{'; ' * bool(plan.remark)}upstream's own {upstream}, and so this one's",
                )
            errors.append(trial.stops)
    upstream = _what_stops(network, source) if upstream is None else upstream
    if upstream:
        raise RunError(f'{source.base} does not run here with its own backbone either: {upstream}')
    kind = network['backbone'].get('type')
    reason = errors[0] if errors else f'the maps of {kind} are none that a pyramid has'
    raise NoPlace(f'{source.base} has no place for {new.name}: {reason}')


def _attempt(network: dict, source: Upstream, optim_wrapper: Optional[dict]) -> Trial:
    try:
        return try_model(network, source.task, optim_wrapper, source.has_masks, source.image_size)
    except TrialError as error:
        # modules of the network share parameters
        if optim_wrapper is None or 'more than one parameter group' not in str(error):
            raise
        optim_wrapper.setdefault('paramwise_cfg', {})['bypass_duplicate'] = True
        return try_model(network, source.task, optim_wrapper, source.has_masks, source.image_size)


def _what_stops(network: dict, source: Upstream) -> str:
    """Why the upstream model does not train or predict here; '' where it does."""
    try:
        return try_model(network, source.task, masks=source.has_masks, image_size=source.image_size).stops
    except TrialError as error:
        return str(error)


def _trainable(source: Upstream) -> dict:
    """The part that holds the backbone, as a model of its own."""
    network = source.network(source.model)
    if source.path and not isinstance(network.get('data_preprocessor'), dict):
        network['data_preprocessor'] = dict(type='DetDataPreprocessor', pad_mask=True, pad_size_divisor=32)
    for key in ('teacher_config', 'teacher_ckpt'):
        if isinstance(network.get(key), str):
            network[key] = _teacher(source, network[key]) if key == 'teacher_config' else None
    return network


def _teacher(source: Upstream, path: str) -> str:
    """Upstream names the teacher's config relative to its repository."""
    if Path(path).is_file() or '::' not in source.base:
        return path
    scope = source.base.partition('::')[0]
    return str(Path(get_installed_path(scope)) / '.mim' / path)


def _narrow(network: dict, new: ZooBackbone, plan: Plan, trial: Trial) -> Optional[Plan]:
    """The same way with only the maps that are read; None where all are, or where it is not known which."""
    if all(trial.read) or not any(trial.read):
        return None
    wiring = plan.wiring
    if wiring is None:
        return without_unread(plan, trial.read)
    if len(trial.read) != len(wiring.keep):
        return None
    recipe_ = wiring.recipe
    read = [position for position, is_read in zip(wiring.keep, trial.read) if is_read]
    if new.plain or recipe_['where'] == 'classifier':
        return None
    return direct(
        {**network, 'neck': None} if plan.network.get('neck') is None else network,
        new,
        recipe_['chosen'],
        wiring.old,
        wiring.new,
        recipe_['where'],
        recipe_['ints_below'],
        keep=read,
    )


def _replaced(model: dict, path: Sequence[str], network: dict) -> dict:
    if not path:
        return {key: value for key, value in network.items()}
    inner = model[path[0]]
    kept = {key: value for key, value in network.items() if key in inner or key in ('backbone', 'neck')}
    return {**model, path[0]: _replaced(inner, path[1:], kept)}


def without_whole_weights(model: dict, path: Sequence[str]) -> dict:
    """A model without weights for the whole of it: they are another backbone's, and MMEngine, having loaded them, would
    not ask the backbone for its own. MMSegmentation hands ``pretrained`` to the backbone, as an argument.

    Args:
        model: Its config.
        path: Keys from it to the network that holds the backbone.
    """
    out: dict = {key: None if key == 'pretrained' and isinstance(value, str) else value for key, value in model.items()}
    if is_pretrained(out.get('init_cfg')):
        out['init_cfg'] = None
    if path:
        out[path[0]] = without_whole_weights(out[path[0]], path[1:])
    return out


def _normalise(model: dict) -> None:
    """Pictures as the released weights know them, in every preprocessor of a model."""
    for key, value in model.items():
        if not isinstance(value, dict):
            continue
        if key != 'data_preprocessor' or isinstance(value.get('data_preprocessor'), dict):
            _normalise(value)
            continue
        mean = value.get('mean')
        if isinstance(mean, (list, tuple)) and len(mean) != 3:
            continue  # grey pictures
        flag = next((name for name in ('to_rgb', 'bgr_to_rgb') if name in value), 'bgr_to_rgb')
        # means that fall are in the order RGB: pictures come so, where nothing is swapped
        is_rgb = isinstance(mean, (list, tuple)) and list(mean) == sorted(mean, reverse=True) and len(set(mean)) == 3
        value.pop('rgb_to_bgr', None)
        value.update({'mean': MEAN, 'std': STD, flag: bool(value.get(flag)) or not is_rgb})


def _settings(source: Upstream, new: ZooBackbone, keep_optimizer: bool) -> tuple[dict, list[str]]:
    """What the file says beside the model: hooks, imports, the optimizer."""
    settings: dict[str, Any] = {}
    remarks: list[str] = []
    imports = (source.cfg.get('custom_imports') or {}).get('imports', [])
    imports = [imports] if isinstance(imports, str) else imports
    settings['custom_imports'] = dict(
        imports=[*(name for name in imports if name != 'mmlinattn'), 'mmlinattn'], allow_failed_imports=False
    )
    runtime = Config.fromfile(str(project_files('configs') / '_base_' / 'default_runtime.py'))
    known = {bare_name(hook['type']) for hook in source.cfg.get('custom_hooks') or []}  # as where it was swapped before
    hooks = [as_text(plain_dict(hook)) for hook in runtime.custom_hooks if hook.type not in known]
    theirs = ['*_base_.custom_hooks'] if known else []
    settings['custom_hooks'] = Code('[\n' + ''.join(f'    {hook},\n' for hook in [*theirs, *hooks]) + ']')
    if source.cfg.get('load_from') is not None:
        settings['load_from'] = None
    upstream = plain_dict(source.cfg.get('optim_wrapper') or {})
    if keep_optimizer or not upstream.get('optimizer'):
        return settings, remarks
    head = source.model.get('decode_head')
    head = head[0] if isinstance(head, (list, tuple)) else head
    preferred = None
    if source.task == 'mmseg' and isinstance(head, dict) and head.get('type') == 'FPNHead':
        preferred = 'fpn_80k'
    if source.task == 'mmdet' and source.model.get('type') == 'RetinaNet':
        preferred = 'retinanet_1x'
    paper = recipe(new.name, source.task, preferred)
    ours = plain_dict(paper.optim_wrapper)
    wrapper: dict[str, Any] = dict(
        type='OptimWrapper', optimizer={k: v for k, v in ours['optimizer'].items() if k != '_scope_'}
    )
    # what upstream says of its own heads stays; the backbone trains at the full rate, as the paper has it
    keys = (upstream.get('paramwise_cfg') or {}).get('custom_keys') or {}
    kept = {key: value for key, value in keys.items() if not key.startswith('backbone')}
    paramwise = dict(ours.get('paramwise_cfg') or {})
    if kept or paramwise.get('custom_keys'):
        paramwise['custom_keys'] = {**kept, **(paramwise.get('custom_keys') or {})}
    if (upstream.get('paramwise_cfg') or {}).get('bypass_duplicate'):
        paramwise['bypass_duplicate'] = True  # its neck or head shares modules
    if paramwise:
        wrapper['paramwise_cfg'] = paramwise
    for key in ('clip_grad', 'accumulative_counts'):
        value = upstream.get(key) or ours.get(key)
        if value is not None:
            wrapper[key] = value
    settings['optim_wrapper'] = wrapper
    if bare_name(upstream.get('type')) == 'AmpOptimWrapper':
        remarks.append(_PRECISION)
    batch = (paper.get('auto_scale_lr') or {}).get('base_batch_size', 16)
    settings['auto_scale_lr'] = dict(base_batch_size=batch)
    remarks.append(f'the learning rate is for {batch} pictures a step (--auto-scale-lr scales it)')
    schedulers = _rescaled(source.cfg, wrapper['optimizer']['lr'] / upstream['optimizer'].get('lr', 1.0))
    if schedulers is not None:
        settings['param_scheduler'] = schedulers
    return settings, remarks


def _rescaled(cfg: Config, factor: float) -> Optional[list]:
    """Schedules that end at a rate of their own, in proportion to the new one; None where none does."""
    given = cfg.get('param_scheduler')
    given = [given] if isinstance(given, dict) else given
    if not given:
        return None
    absolute = ('eta_min', 'eta_max')
    schedulers = plain_dict([dict(each) for each in given])
    if not any(each.get(key) for each in schedulers for key in absolute) or factor == 1:
        return None
    for each in schedulers:
        each.pop('_scope_', None)
        for key in absolute:
            if each.get(key):
                each[key] = float(f'{each[key] * factor:.3g}')
    return schedulers


def _text(source: Upstream, backbone: str, before: dict, model: dict, settings: dict) -> str:
    """The file: the model's differences, then the settings."""
    said = difference(before, model)
    top: dict[str, Any] = {}
    if source.cfg.get('data_preprocessor') is not None and not source.cfg.model.get('data_preprocessor'):
        preprocessor = said.pop('data_preprocessor', None)
        if preprocessor is not None:
            top['data_preprocessor'] = preprocessor
    lines = [
        f'# {source.base} with {backbone}, by tools/swap_backbone.py of mmlinattn',
        f'_base_ = {source.base!r}',
        '',
        f'custom_imports = {as_text(settings["custom_imports"], 0, 17)}',
        f'custom_hooks = {settings["custom_hooks"]}',
        '',
        f'model = {as_text(said, 0, 8)}',
    ]
    for key, value in {**top, **settings}.items():
        if key in ('custom_imports', 'custom_hooks'):
            continue
        if key == 'optim_wrapper':
            value = dict(_delete_=True, **value)
        lines.append(f'{key} = {as_text(value, 0, len(key) + 3)}')
    return '\n'.join(lines) + '\n'


def _without_scopes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_scopes(item) for key, item in value.items() if key != '_scope_'}
    if isinstance(value, (list, tuple)):
        return [_without_scopes(item) for item in value]
    return value


def _check_file(path: Path, source: Upstream, model: dict) -> None:
    """The file as MMEngine reads it has to hold the model that was tried."""
    cfg = Config.fromfile(str(path))
    read = source._replace(cfg=cfg).model
    if _without_scopes(read) != _without_scopes(model):
        raise RunError(f'{path} does not hold the model that was tried: {"; ".join(changes(model, read)[:3])}')
