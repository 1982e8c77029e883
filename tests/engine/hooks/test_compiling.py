# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``--compile``: one graph per kind of block at all image sizes, with the losses and no more memory than eager mode."""

import copy
import random

import count_traffic
import pytest
import torch
import torch.multiprocessing
from helpers import small_backbones
from helpers.engine_toys import make_runner
from mmcv.cnn.bricks import DropPath
from mmengine.registry import MODELS
from torch import distributed, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch._functorch import config as partition_config
from torch.fx.experimental import _config as shape_config
from torch.nn.parallel import DistributedDataParallel

from mmlinattn.backbones import RAVLT
from mmlinattn.engine import RunError
from mmlinattn.engine.hooks.compiling import SharedDropPath, compile_blocks

HAS_DUCK_SHAPES = hasattr(shape_config, 'use_duck_shape')


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    # restore the settings of the process for tests of other graphs
    limit = dynamo_config.cache_size_limit
    duck = dict(use_duck_shape=shape_config.use_duck_shape) if HAS_DUCK_SHAPES else {}
    with (
        shape_config.patch(duck),
        dynamo_config.patch(cache_size_limit=limit),
        partition_config.patch(aggressive_recomputation=False),
    ):
        yield


def ravlt(drop_path_rate=0.0, depths=(3, 2, 1, 1), **options):
    """Two stages: RALA, softmax."""
    arch = dict(small_backbones.ARCHS['RAVLT'], depths=depths, stage_attns=('rala', 'softmax') * 2)
    return RAVLT(arch, **{'out_indices': (0, 1), 'drop_path_rate': drop_path_rate, **options})


# (backbone, attentions of the stages, kinds of block): every second block of Swin is shifted, the first of a Next-ViT
# stage has another number of channels
BACKBONES = [
    ('RAVLT', ('rala', 'softmax'), 2),
    ('LinearPVT', ('focused', 'softmax'), 2),
    ('LinearPVTv2', ('hallucinated', 'inline'), 2),
    ('LinearSwin', ('softmax', 'inline'), 3),
    ('LinearCSWin', ('inline', 'softmax'), 2),
    ('LinearNextViT', ('rala', 'hallucinated'), 3),
    ('LinearDeiT', ('rala',), 1),
]


IN_CI = ('RAVLT', 'LinearSwin', 'LinearDeiT')  # seconds a kind for the compiler


@pytest.mark.parametrize(
    ('backbone', 'attns', 'kinds'),
    [pytest.param(*row, marks=pytest.mark.slow if row[0] in IN_CI else pytest.mark.exhaustive) for row in BACKBONES],
)
def test_one_graph_a_kind_at_fifteen_sizes(backbone, attns, kinds):
    """Single images among pairs and windows with and without padding compile nothing. In float64: on CPUs, PyTorch
    compares the batch of a float32 convolution with 16."""
    if backbone == 'LinearDeiT':
        options = dict(arch=dict(small_backbones.ARCHS[backbone], depths=(3,)), stage_attns=attns)
    else:
        arch = dict(small_backbones.ARCHS[backbone], depths=(3, 2, 1, 1))
        options = dict(arch=arch, stage_attns=(*attns, 'softmax', 'softmax'), out_indices=(0, 1))
    model = small_backbones.build(backbone, drop_path_rate=0.3, **options).double().train()
    compile_blocks(model, backend='eager')
    draw = random.Random(0)
    for i in range(15):
        step = 32 if i % 5 == 3 else 1
        sides = [draw.randrange(64, 321) // step * step for _ in '12']
        outs = model(torch.randn(2 - (i % 3 == 1), 3, *sides, dtype=torch.float64))
        sum(out.square().mean() for out in outs).backward()
        assert counters['stats']['unique_graphs'] == kinds
    assert not counters['graph_break']


@pytest.mark.parametrize(('first', 'graphs'), [(2, 0), (1, 1)])
def test_single_images_run_eagerly_after_a_pair(first, graphs):
    """PyTorch would compile one more graph of each kind for them. A model that sees single images only is compiled."""
    model, calls = ravlt(depths=(1, 1, 1, 1), out_indices=(0,)).double(), []
    single = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    expected = model(single)
    compile_blocks(model, backend=lambda graph, inputs: lambda *args: calls.append(1) or graph(*args))
    model(torch.randn(first, 3, 64, 64, dtype=torch.float64))
    calls.clear()
    torch.testing.assert_close(model(single), expected)
    assert len(calls) == graphs


@pytest.mark.slow
@pytest.mark.parametrize('attn', ['rala', 'softmax'])
def test_graphs_keep_no_more_than_eager_mode(attn):
    """With the partition of Inductor. Its default keeps 34 and 11 % more than eager mode."""
    arch = dict(embed_dims=(32, 64, 128, 256), depths=(2, 1, 1, 1), num_heads=(1, 2, 4, 8), stage_attns=(attn,) * 4)
    model = RAVLT(arch, out_indices=(0,), out_norm=False, drop_path_rate=0.0)
    images = torch.randn(2, 3, 64, 64)
    _, eager = count_traffic.kept(model, images, own=model.parameters())
    compile_blocks(model, backend='aot_eager_decomp_partition')
    model(images)
    assert count_traffic.kept(model, images, own=model.parameters())[1] <= eager
    assert counters['stats']['unique_graphs'] == 1


EAGER = dict(backend='aot_eager')  # graphs of forward and backward pass, run by PyTorch's operators


def losses(model, steps=20, autocasts=False):
    """Losses of a training at three sizes; running statistics and weights move."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for i in range(steps):
        image = torch.randn(2, 3, *((64, 96), (80, 64), (104, 72))[i % 3])
        with torch.autocast('cpu', torch.bfloat16, enabled=autocasts):
            outs = model(image)
        loss = sum((out.float() - image[:, :1].mean()).square().mean() for out in outs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


@pytest.mark.slow
@pytest.mark.parametrize(('how', 'options'), [('plain', {}), *((how, EAGER) for how in ('with_cp', 'autocasts'))])
def test_losses_of_twenty_steps(how, options, monkeypatch, tmp_path):
    """Compile one graph for three sizes, once by Inductor (slow) with an empty cache, as cached code may serve one."""
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path))
    torch.manual_seed(0)
    eager = ravlt(depths=(2, 1, 1, 1), out_indices=(0,), with_cp=how == 'with_cp')
    compiled = copy.deepcopy(eager)
    compile_blocks(compiled, **options)
    expected, found = (losses(model, autocasts=how == 'autocasts') for model in (eager, compiled))
    assert counters['stats']['unique_graphs'] == 1
    torch.testing.assert_close(found, expected, rtol=2e-2 if how == 'autocasts' else 1e-4, atol=0)
    assert expected[-1] < 0.95 * expected[0]


def train_apart(rank, folder, compiles):
    distributed.init_process_group('gloo', f'file://{folder}/met{compiles}', rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(ravlt(depths=(2, 1, 1, 1), out_indices=(0,)))
    if compiles:
        compile_blocks(model, **EAGER)
    torch.save((losses(model, 6), counters['stats']['unique_graphs']), f'{folder}/{compiles}{rank}.pt')
    distributed.destroy_process_group()


@pytest.mark.slow
def test_losses_of_two_processes(tmp_path):
    for compiles in (0, 1):
        torch.multiprocessing.spawn(train_apart, (tmp_path, compiles), nprocs=2)
    for rank in (0, 1):
        (eager, none), (compiled, graphs) = (torch.load(tmp_path / f'{compiles}{rank}.pt') for compiles in (0, 1))
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=0)
        assert (none, graphs) == (0, 1)


def test_stochastic_depth_with_a_rate_in_a_tensor():
    """Blocks of different rates share a graph, the first one with a rate of 0 among them. The rate is no buffer:
    EMAHook pairs those of a model and its copy by their order."""
    model = ravlt(drop_path_rate=0.5).double()
    names = [*model.state_dict(), *dict(model.named_buffers())]
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    assert len(set(rates)) > 3
    for _ in range(2):  # once more changes nothing
        compile_blocks(model, backend='eager')
    assert [*model.state_dict(), *dict(model.named_buffers())] == names
    paths = [module for module in model.modules() if isinstance(module, SharedDropPath)]
    assert [path.keep_rate.item() for path in paths] == pytest.approx([1, *(1 - rate for rate in rates)])
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    assert torch.equal(paths[0].train()(x), x)
    path = paths[-1].train()
    kept = path(torch.ones(4000, 2, 3, dtype=torch.float64))
    assert kept.shape == (4000, 2, 3) and torch.equal(kept, kept[:, :1, :1].expand(-1, 2, 3))  # images as a whole
    assert kept.unique().tolist() == pytest.approx([0, 1 / path.keep_rate.item()])
    assert kept.mean().item() == pytest.approx(1, abs=0.1)
    assert torch.equal(path.eval()(kept), kept)
    without = ravlt(drop_path_rate=0.0)
    compile_blocks(without, backend='eager')
    assert not any(isinstance(module, DropPath) for module in without.modules())
    elsewhere = ravlt(drop_path_rate=0.5).to('meta').eval()  # rates are on the device of the weights
    compile_blocks(elsewhere, backend='eager')
    assert not any(module.training for module in elsewhere.modules())
    assert {m.keep_rate.device.type for m in elsewhere.modules() if isinstance(m, SharedDropPath)} == {'meta'}


@MODELS.register_module(force=True)
class BackboneModel(nn.Module):
    """A model that MMEngine trains, with a backbone of ours."""

    def __init__(self):
        super().__init__()
        self.backbone = ravlt(depths=(1, 1, 1, 1))

    def train_step(self, data, optim_wrapper):
        loss = sum(out.square().mean() for out in self.backbone(torch.randn(2, 3, 64, 64)))
        optim_wrapper.update_params(loss)
        return dict(loss=loss)


@pytest.mark.slow
def test_the_hook_of_a_config_compiles(tmp_path, monkeypatch):
    """Compile blocks of the model, not of its copies (EMA)."""
    compiles, told = torch.compile, []
    monkeypatch.setattr(torch, 'compile', lambda *args, **_: compiles(*args, dynamic=True, backend='eager'))
    runner = make_runner(tmp_path, [dict(type='CompileHook')], model=dict(type='BackboneModel'))
    monkeypatch.setattr(runner.logger, 'info', told.append)
    runner.train()
    assert any('CompileHook: blocks are compiled when' in str(line) for line in told)
    model = runner.model.backbone
    assert all(block._compiled_call_impl is not None for stage in model.stages for block in stage)
    assert all(block._compiled_call_impl is None for stage in copy.deepcopy(model).stages for block in stage)


def test_the_hook_compiles_before_any_run(tmp_path):
    """A test or a validation too."""
    runner = make_runner(tmp_path, [dict(type='CompileHook')], model=dict(type='BackboneModel'))
    runner.call_hook('before_run')
    assert all(block._compiled_call_impl is not None for stage in runner.model.backbone.stages for block in stage)


def test_models_that_cannot_be_compiled_are_one_line():
    with pytest.raises(RunError, match='the model has no backbone of mmlinattn'):
        compile_blocks(nn.Linear(2, 2))
