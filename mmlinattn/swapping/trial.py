# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""One training step and one prediction of a model on invented data, and what of its backbone they reached."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
from mmengine.config import ConfigDict
from mmengine.logging import MessageHub, MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor

from ..utils.errors import RunError
from ..utils.registering import bare_name
from .invented import batch_for, is_self_supervised
from .upstream import without_weights

SIZES = ((128, 128), (320, 320))  # pixels; the larger where maps of the smaller vanish


class Trial(NamedTuple):
    """What a step showed.

    Attributes:
        loss: Of the training step.
        read: Which of the backbone's outputs got a gradient, by position.
        without_gradient: Names of the backbone's parameters that got none.
        stops: Why the prediction failed; '' where it did not.
    """

    loss: float
    read: tuple[bool, ...]
    without_gradient: tuple[str, ...]
    stops: str = ''


class TrialError(RunError):
    """The model could not be built or trained; the message says how far it came and why it stopped."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Upstream's models warn and log while they are built and run; what counts is in the result."""
    loggers = [MMLogger.get_current_instance(), logging.getLogger()]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)


def try_model(
    network: dict,
    task: str,
    optim_wrapper: Optional[dict] = None,
    masks: bool = True,
    image_size: Optional[tuple[int, int]] = None,
) -> Trial:
    """Build a network, train it for a step, let it predict.

    Args:
        network: Its config; weights that it names are not loaded.
        task: ``mmdet``, ``mmseg`` or ``mmpretrain``.
        optim_wrapper: Config of the optimizer; None takes plain SGD.
        masks: Whether a detector's data has masks.
        image_size: Of the recipe's pictures, tried where smaller ones do not serve.

    Raises:
        TrialError: Something of that does not work.
    """
    init_default_scope(task)
    run = MessageHub.get_current_instance()
    if run.get_info('epoch') is None:  # heads that change in the course of a run ask for it (TOOD)
        run.update_info('epoch', 0)
    error: Optional[TrialError] = None
    with quiet():
        for size in dict.fromkeys((*SIZES, *([image_size] if image_size else []))):
            try:
                return _try(_small(_alone(without_weights(network)), size), task, optim_wrapper, size, masks)
            except TrialError as failed:
                error = failed
                if not _is_about_size(failed):
                    break
    assert error is not None
    raise error


def _is_about_size(error: TrialError) -> bool:
    text = str(error).lower()
    return 'training' in text and any(
        word in text for word in ('size', 'shape', 'smaller', 'spatial', 'expected more than 1 value', 'out of range')
    )


def _alone(node: Any) -> Any:
    """With PyTorch's synchronised batch norm in place of MMCV's, which is built in distributed runs only."""
    if isinstance(node, dict):
        kind = 'SyncBN' if node.get('type') == 'MMSyncBN' else node.get('type')
        return {key: kind if key == 'type' else _alone(value) for key, value in node.items()}
    return type(node)(_alone(item) for item in node) if isinstance(node, (list, tuple)) else node


def _small(cfg: Any, size: tuple[int, int]) -> Any:
    """Without padding to the size of the recipe and with fewer regions: a matter of time and memory only."""
    cfg = dict(cfg)
    preprocessor = cfg.get('data_preprocessor')
    if isinstance(preprocessor, dict):
        preprocessor = {key: value for key, value in preprocessor.items() if key != 'batch_augments'}
        if preprocessor.get('size') is not None:
            preprocessor['size'] = size
        if preprocessor.get('test_cfg'):
            preprocessor['test_cfg'] = None
        cfg['data_preprocessor'] = preprocessor
    test_cfg = cfg.get('test_cfg')
    if isinstance(test_cfg, dict) and test_cfg.get('mode') == 'slide':
        cfg['test_cfg'] = dict(mode='whole')
    for key in ('train_cfg', 'test_cfg'):
        if cfg.get(key) is not None:
            cfg[key] = _few(cfg[key])
    return cfg


def _few(node: Any) -> Any:
    """Fewer proposals and regions, of which the heads of some detectors take seconds for each hundred."""
    if isinstance(node, (list, tuple)):
        return type(node)(_few(item) for item in node)
    if not isinstance(node, dict):
        return node
    limits = dict(max_per_img=50, num=32) if 'type' in node or 'max_per_img' in node else {}
    return {
        key: min(value, limits[key]) if key in limits and type(value) is int else _few(value)
        for key, value in node.items()
    }


def _one_line(error: BaseException) -> str:
    return ' '.join(f'{type(error).__name__}: {error}'.split())[:300]


def _try(cfg: dict, task: str, optim_wrapper: Optional[dict], size: tuple[int, int], masks: bool) -> Trial:
    try:
        model = MODELS.build(ConfigDict(cfg))  # some read their settings as attributes
        model.init_weights()
        optimizer = build_optim_wrapper(model, ConfigDict(_on_cpu(optim_wrapper)))
    except Exception as error:  # anything may be raised by a model of another project
        raise TrialError(f'it cannot be built: {_one_line(error)}') from error
    try:
        batch = batch_for(model, task, cfg, size, masks)
        trial = _train(model, batch, optimizer)
    except TrialError:
        raise
    except Exception as error:
        raise TrialError(f'training stops: {_one_line(error)}') from error
    try:
        _predict(model, batch_for(model, task, cfg, size, masks))
    except Exception as error:
        return trial._replace(stops=f'prediction stops: {_one_line(error)}')
    return trial


def _on_cpu(optim_wrapper: Optional[dict]) -> dict:
    if optim_wrapper is None:
        return dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=1e-4))
    kept = {key: value for key, value in optim_wrapper.items() if key not in ('loss_scale', 'dtype', 'use_fsdp')}
    return (
        {**kept, 'type': 'OptimWrapper'}
        if bare_name(optim_wrapper.get('type')) == 'AmpOptimWrapper'
        else dict(optim_wrapper)
    )


def _train(model: Any, batch: dict, optimizer: Any) -> Trial:
    outputs: list[list[Tensor]] = []

    def keep(module, args, outs):
        maps = [out for out in (outs if isinstance(outs, (list, tuple)) else [outs]) if isinstance(out, Tensor)]
        if maps and all(out.requires_grad for out in maps):
            for out in maps:
                out.retain_grad()
            outputs.append(maps)

    handle = model.backbone.register_forward_hook(keep)
    try:
        model.train()
        data = model.data_preprocessor(batch, True)
        losses = model(**data, mode='loss') if isinstance(data, dict) else model(*data, mode='loss')
        loss, _ = model.parse_losses(losses)
        if not torch.isfinite(loss):
            raise TrialError(f'the loss of the first step is {loss.item()}')
        optimizer.backward(loss)
        without = tuple(name for name, p in model.backbone.named_parameters() if p.requires_grad and p.grad is None)
        count = max(map(len, outputs), default=0)
        read = tuple(any(i < len(maps) and maps[i].grad is not None for maps in outputs) for i in range(count))
        optimizer.step()
    finally:
        handle.remove()
    return Trial(loss.item(), read, without)


@torch.no_grad()
def _predict(model: Any, batch: dict) -> None:
    model.eval()
    data = model.data_preprocessor(batch, False)
    mode = 'predict'
    if type(model).__module__.startswith('mmpretrain') and (
        is_self_supervised(model) or 'Retriever' in type(model).__name__
    ):
        mode = 'tensor'
        data = dict(data)
        if isinstance(data.get('inputs'), list):
            data['inputs'] = data['inputs'][0]
    model(**data, mode=mode) if isinstance(data, dict) else model(*data, mode=mode)
