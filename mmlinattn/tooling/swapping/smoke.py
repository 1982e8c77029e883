# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Smoke test of a model: one training step and one prediction on dummy inputs."""

import time
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from mmengine.config import ConfigDict
from mmengine.logging import MessageHub
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from mmengine.utils import get_installed_path

from ...utils.building import without_pretrained
from ...utils.errors import described, printable
from ...utils.registering import bare_name
from ..command_line import quiet
from .dummy_inputs import batch_for, is_self_supervised
from .upstream import Upstream, join_encoder


class SmokeResult(NamedTuple):
    """Result of a smoke test.

    Attributes:
        failure: The failed step and its error, or ''.
        loss: Loss of the training step; None if the step failed.
        without_gradient: Names of backbone parameters that got no gradient.
        seconds: Duration of a second training step, measured on given batches only.
        size: Height and width of the images in the second step.
    """

    failure: str = ''
    loss: Optional[float] = None
    without_gradient: tuple[str, ...] = ()
    seconds: float = 0.0
    size: tuple[int, int] = (0, 0)


def smoke_test(
    network: dict,
    source: Upstream,
    size: tuple[int, int],
    optim_wrapper: Optional[dict] = None,
    batches: Optional[tuple[dict, dict]] = None,
) -> SmokeResult:
    """Build a network without its pretrained weights, train it for one step, and predict.

    Errors are not raised: the result names the failed step and its error in ``failure``.

    Args:
        network (dict): Config of the model.
        source (Upstream): Upstream config of the network.
        size (tuple[int, int]): Height and width of the dummy images in pixels.
        optim_wrapper (dict, optional): Config of the optimizer, by default SGD. It is changed in place: it gets
            ``bypass_duplicate`` if modules share parameters, and loses ``custom_keys`` that match no parameter.
        batches (tuple[dict, dict], optional): Batches of a training and of a test loader in place of dummy images. A
            second training step on them is timed.
    """
    init_default_scope(source.task)
    run = MessageHub.get_current_instance()
    for unit in ('epoch', 'iter'):
        if run.get_info(unit) is None:  # heads that change during a run read it (TOOD, BoxInst)
            run.update_info(unit, 0)
    step, result = 'it cannot be built', SmokeResult()
    with quiet():
        try:
            model = MODELS.build(ConfigDict(_fit(join_encoder(without_pretrained(network)), source, size)))
            model.init_weights()
            optimizer = _optimizer(model, optim_wrapper)
            train, test = batches or (batch_for(model, source, network, size) for _ in range(2))
            step = 'training stops'
            loss = _train(model, train, optimizer)
            backbone = model.backbone if hasattr(model, 'backbone') else model.image_encoder[0]
            without = tuple(name for name, p in backbone.named_parameters() if p.requires_grad and p.grad is None)
            result = SmokeResult(loss=loss, without_gradient=without)
            if batches:  # the first step also allocates memory
                begin = time.perf_counter()
                _train(model, train, optimizer)
                shapes = [tuple(image.shape[-2:]) for image in train['inputs']]
                result = result._replace(seconds=time.perf_counter() - begin, size=max(shapes))
            step = 'prediction stops'
            _predict(model, test)
        except Exception as error:  # anything may be raised by a model of another project
            return result._replace(failure=f'{step}: {printable(described(error))}')
    return result


def _fit(network: dict, source: Upstream, size: tuple[int, int]) -> dict:
    """Change a config for one process and dummy inputs, with the absolute path of a teacher's config."""
    if source.inner and not isinstance(network.get('data_preprocessor'), dict):
        network['data_preprocessor'] = dict(type='DetDataPreprocessor', pad_mask=True, pad_size_divisor=32)
    teacher = network.get('teacher_config')
    if isinstance(teacher, str) and '::' in source.base and not Path(teacher).is_file():  # relative to the repository
        network['teacher_config'] = str(Path(get_installed_path(source.base.partition('::')[0]), '.mim', teacher))
    return _small(network, size)


def _small(node: Any, size: tuple[int, int]) -> Any:
    """Return a part of a model config with PyTorch's synchronised batch norm, fewer regions (a hundred take seconds),
    and images of ``size`` (height, width) without padding."""
    if isinstance(node, (list, tuple)):
        return type(node)(_small(item, size) for item in node)
    if not isinstance(node, dict):
        return node
    out = {key: _small(value, size) for key, value in node.items() if key != 'batch_augments'}
    kind = bare_name(out.get('type'))
    if kind == 'MMSyncBN':  # built in distributed runs only
        out['type'] = 'SyncBN'
    for key, most in (('max_per_img', 50), ('num', 32)):
        if type(out.get(key)) is int and ('type' in out or 'max_per_img' in out):
            out[key] = min(out[key], most)
    if kind.endswith('DataPreProcessor') and out.get('size') is not None:
        out.update(size=size, test_cfg=None)  # MMSegmentation's
    if isinstance(out.get('test_cfg'), dict) and out['test_cfg'].get('mode') == 'slide':
        out['test_cfg'] = dict(mode='whole')
    return out


def _optimizer(model: Any, optim_wrapper: Optional[dict]) -> Any:
    """Build the optimizer wrapper in single precision, as mixed precision needs an accelerator."""
    if optim_wrapper is None:
        optim_wrapper = dict(optimizer=dict(type='SGD', lr=1e-4))
    if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
        optim_wrapper['paramwise_cfg'] = dict(optim_wrapper.get('paramwise_cfg') or {}, bypass_duplicate=True)
    keys, names = (optim_wrapper.get('paramwise_cfg') or {}).get('custom_keys') or {}, dict(model.named_parameters())
    for key in [key for key in keys if not any(key in name for name in names)]:
        del keys[key]
    kept = ('optimizer', 'constructor', 'paramwise_cfg', 'clip_grad', 'accumulative_counts')
    cfg = {key: optim_wrapper[key] for key in kept if key in optim_wrapper}
    return build_optim_wrapper(model, ConfigDict(cfg, type='OptimWrapper'))


def _train(model: Any, batch: dict, optimizer: Any) -> float:
    """Run one training step and return the loss; a NaN or infinite loss raises a ValueError."""
    model.train()
    loss, _ = model.parse_losses(model(**model.data_preprocessor(batch, True), mode='loss'))
    if not torch.isfinite(loss):
        raise ValueError(f'the loss of the first step is {loss.item()}')
    optimizer.backward(loss)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def _predict(model: Any, batch: dict) -> None:
    model.eval()
    data, mode = model.data_preprocessor(batch, False), 'predict'
    is_mmpretrains = type(model).__module__.startswith('mmpretrain')
    if is_mmpretrains and (is_self_supervised(model) or 'Retriever' in type(model).__name__):
        mode, images = 'tensor', data['inputs']  # these predict nothing, or compare with a gallery
        data['inputs'] = images[0] if isinstance(images, list) else images
    model(**data, mode=mode)
