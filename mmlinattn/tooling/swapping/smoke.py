# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""One training step and one prediction of a model on dummy inputs, and what of its backbone they reached."""

import time
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from mmengine.config import ConfigDict
from mmengine.logging import MessageHub
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from mmengine.utils import get_installed_path
from torch import Tensor

from ...utils.building import without_pretrained
from ...utils.errors import RunError, described, printable
from ...utils.registering import bare_name
from ..command_line import quiet
from .dummy_inputs import batch_for, is_self_supervised
from .upstream import Upstream, together


class Trial(NamedTuple):
    """The results of a training step for the network and its backbone."""

    loss: float
    read: tuple[bool, ...]  # which of the backbone's outputs got a gradient
    without_gradient: tuple[str, ...]  # names of its parameters
    stops: str = ''  # why the prediction failed; '' where it did not
    seconds: float = 0.0  # of a second step on given batches
    size: tuple[int, int] = (0, 0)  # height and width of these batches


class TrialError(RunError):
    """The model could not be built or trained; the message says how far it came and why it stopped."""


def try_model(
    network: dict,
    source: Upstream,
    size: tuple[int, int],
    optim_wrapper: Optional[dict] = None,
    batches: Optional[tuple[dict, dict]] = None,
) -> Trial:
    """Build a network without the weights that it names, train it for a step on images ``size``, let it predict.

    ``optim_wrapper`` None takes plain SGD. Where modules of the network share parameters, it is told so. ``batches``
    of a training and of a test loader take the place of dummy inputs.

    Raises:
        TrialError: It cannot be built, or does not train.
    """
    init_default_scope(source.task)
    run = MessageHub.get_current_instance()
    for unit in ('epoch', 'iter'):
        if run.get_info(unit) is None:  # heads that change in the course of a run ask for it (TOOD, BoxInst)
            run.update_info(unit, 0)
    cfg = _small(_alone(together(without_pretrained(network)), source), size)
    with quiet():
        try:
            model = MODELS.build(ConfigDict(cfg))  # some read their settings as attributes
            model.init_weights()
            shares = len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))
            if optim_wrapper and shares:
                optim_wrapper.setdefault('paramwise_cfg', {})['bypass_duplicate'] = True
            optimizer = build_optim_wrapper(model, ConfigDict(_on_cpu(optim_wrapper)))
        except Exception as error:  # anything may be raised by a model of another project
            raise TrialError(f'it cannot be built: {printable(described(error))}') from error
        try:
            trial = _train(model, batches[0] if batches else batch_for(model, source, network, size), optimizer)
            if batches:  # the first step also allocates memory
                begin = time.perf_counter()
                _train(model, batches[0], optimizer)
                shapes = [tuple(image.shape[-2:]) for image in batches[0]['inputs']]
                trial = trial._replace(seconds=time.perf_counter() - begin, size=max(shapes))
        except Exception as error:
            raise TrialError(f'training stops: {printable(described(error))}') from error
        try:
            _predict(model, batches[1] if batches else batch_for(model, source, network, size))
        except Exception as error:
            return trial._replace(stops=f'prediction stops: {printable(described(error))}')
    return trial


def _alone(network: dict, source: Upstream) -> dict:
    """The part of a model that holds the backbone as a model of its own, which finds its teacher from any folder."""
    network = dict(network)
    if source.inner and not isinstance(network.get('data_preprocessor'), dict):
        network['data_preprocessor'] = dict(type='DetDataPreprocessor', pad_mask=True, pad_size_divisor=32)
    teacher = network.get('teacher_config')
    if isinstance(teacher, str) and '::' in source.base and not Path(teacher).is_file():  # relative to the repository
        network['teacher_config'] = str(Path(get_installed_path(source.base.partition('::')[0]), '.mim', teacher))
    return network


def _small(node: Any, size: tuple[int, int]) -> Any:
    """For one process on dummy inputs: PyTorch's synchronised batch norm in place of MMCV's, which is built in
    distributed runs only; no padding to the recipe's size; fewer regions, of which heads take seconds a hundred."""
    if isinstance(node, (list, tuple)):
        return type(node)(_small(item, size) for item in node)
    if not isinstance(node, dict):
        return node
    out = {key: _small(value, size) for key, value in node.items() if key != 'batch_augments'}
    if out.get('type') == 'MMSyncBN':
        out['type'] = 'SyncBN'
    for key, most in (('max_per_img', 50), ('num', 32)):
        if type(out.get(key)) is int and ('type' in out or 'max_per_img' in out):
            out[key] = min(out[key], most)
    if bare_name(out.get('type')).endswith('DataPreProcessor') and out.get('size') is not None:
        out.update(size=size, test_cfg=None)  # MMSegmentation's
    if isinstance(out.get('test_cfg'), dict) and out['test_cfg'].get('mode') == 'slide':
        out['test_cfg'] = dict(mode='whole')
    return out


def _on_cpu(optim_wrapper: Optional[dict]) -> dict:
    """In single precision, as mixed ones ask for an accelerator."""
    if optim_wrapper is None:
        return dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=1e-4))
    kept = ('optimizer', 'constructor', 'paramwise_cfg', 'clip_grad', 'accumulative_counts')
    return dict({key: optim_wrapper[key] for key in kept if key in optim_wrapper}, type='OptimWrapper')


def _train(model: Any, batch: dict, optimizer: Any) -> Trial:
    backbone = model.backbone if hasattr(model, 'backbone') else model.image_encoder[0]
    outputs: list[list[Tensor]] = []

    def keep(module, args, outs):
        maps = [out for out in (outs if isinstance(outs, (list, tuple)) else [outs]) if isinstance(out, Tensor)]
        if maps and all(out.requires_grad for out in maps):
            for out in maps:
                out.retain_grad()
            outputs.append(maps)

    backbone.register_forward_hook(keep)
    model.train()
    loss, _ = model.parse_losses(model(**model.data_preprocessor(batch, True), mode='loss'))
    if not torch.isfinite(loss):
        raise ValueError(f'the loss of the first step is {loss.item()}')
    optimizer.backward(loss)
    without = tuple(name for name, p in backbone.named_parameters() if p.requires_grad and p.grad is None)
    count = max(map(len, outputs), default=0)
    read = tuple(any(i < len(maps) and maps[i].grad is not None for maps in outputs) for i in range(count))
    optimizer.step()
    return Trial(loss.item(), read, without)


@torch.no_grad()
def _predict(model: Any, batch: dict) -> None:
    model.eval()
    data = model.data_preprocessor(batch, False)
    is_mmpretrains = type(model).__module__.startswith('mmpretrain')
    if not is_mmpretrains or not (is_self_supervised(model) or 'Retriever' in type(model).__name__):
        model(**data, mode='predict')
        return
    images = data['inputs']  # these predict nothing, or compare with a gallery
    model(**{**data, 'inputs': images[0] if isinstance(images, list) else images}, mode='tensor')
