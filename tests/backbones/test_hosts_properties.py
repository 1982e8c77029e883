# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the hosts of InLine and FLatten promise, each with every attention."""

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import small_hosts
import torch
from mmengine.registry import MODELS
from small_hosts import ARCHS, ATTNS, PYRAMIDS, image, loss

# what test_base.py asks of RAVLT, asked of these hosts through the fixture ``build`` below
from test_base import (  # noqa: F401
    test_copies_and_pickles_are_the_same_model_and_independent,
    test_feature_info_tells_channels_and_strides,
    test_frozen_parts_carry_no_graph,
    test_no_stochastic_depth_no_chance,
    test_other_channel_counts,
    test_out_indices_builds_what_they_need_and_all_of_it_trains,
    test_outputs_of_a_subset_are_those_of_the_whole,
    test_state_dict_keys_are_the_same_each_time_and_survive_a_forward_pass,
    test_stochastic_depth_grows_linearly_and_acts_in_training_only,
    test_with_cp_gives_the_same_gradients_and_recomputes_blocks,
)
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from mmlinattn.attention import Grid, windows
from mmlinattn.attention.arrangements import StripeAttention
from mmlinattn.backbones import LinearCSWin, LinearDeiT, LinearNextViT, LinearPVT, LinearPVTv2, LinearSwin
from mmlinattn.checkpoints.states import fit_backbone

HALF = [torch.float16, torch.bfloat16]
MIXED = ('inline', 'focused', ['softmax', 'rala'], 'softmax')  # every attention once

every_host = pytest.mark.parametrize('host', ARCHS)
every_pyramid = pytest.mark.parametrize('host', PYRAMIDS)
# Next-ViT: its stem is of convolutions, its blocks change the width, and its norms feed on (tests in test_nextvit.py)
plain_hosts = pytest.mark.parametrize('host', [host for host in ARCHS if host != 'LinearNextViT'])
every_attention = pytest.mark.parametrize('attn', ATTNS)


@pytest.fixture(params=PYRAMIDS)
def build(request):
    return lambda **options: small_hosts.build(request.param, **{'stage_attns': MIXED, **options})


@pytest.mark.parametrize('attns', [['softmax', 'rala'], ['rala', 'softmax']], ids=str)
def test_each_block_of_cswin_has_the_windows_of_its_own_attention(attns):
    """Stripes of a quadratic attention, the whole map of a linear one, side by side in a stage."""
    model = small_hosts.build('LinearCSWin', stage_attns=('softmax', 'rala', attns, 'softmax'))
    assert [isinstance(block.attn, StripeAttention) for block in model.stages[2]] == [
        attn == 'softmax' for attn in attns
    ]


# --- any size ---------------------------------------------------------------------------------


def shapes(host, height, width):
    if host == 'LinearDeiT':
        return [(math.ceil(height / 16), math.ceil(width / 16))]
    return [(math.ceil(height / 4 / 2**i), math.ceil(width / 4 / 2**i)) for i in range(4)]


@pytest.mark.parametrize('size', [(32, 32), (33, 47), (37, 160), (32, 250), (129, 65)], ids=str)
@every_attention
@every_host
def test_any_size(host, attn, size):
    """32 pixels leave one token in the last stage; 32x250 a map one pixel high there."""
    model = small_hosts.build(host, attn).train()
    outs = model(image(2, *size))
    assert [tuple(out.shape[2:]) for out in outs] == shapes(host, *size)
    loss(outs).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize('size', [(1, 30), (30, 1), (1, 1), (2, 3)], ids=str)
@every_attention
@plain_hosts
def test_blocks_take_stripes_of_one_pixel(host, attn, size):
    """Maps that no image leads to, through the blocks of every stage, forward and backward."""
    model = small_hosts.build(host, attn).eval()
    grid = Grid(*size, prefix=1)
    for i, blocks in enumerate([model.blocks] if host == 'LinearDeiT' else model.stages):
        for block in blocks:
            shape = (grid.num_tokens,) if host == 'LinearDeiT' else size
            x = torch.randn(2, *shape, model.embed_dims[i], requires_grad=True)
            out = block(x, **(dict(grid=grid) if host == 'LinearDeiT' else model.shared(i, x)))
            assert out.shape == x.shape and out.isfinite().all()
            assert torch.autograd.grad(out.square().sum(), x)[0].isfinite().all()


@pytest.mark.parametrize('size', [(33, 47), (50, 129)], ids=str)
@every_attention
@plain_hosts
def test_an_image_is_padded_with_zeros_to_whole_patches(host, attn, size):
    """At the bottom and on the right, and no further: tokens without a pixel of the image would mix with the others."""
    model = small_hosts.build(host, attn).double().eval()
    x = image(2, *size).double()
    patch = 16 if host == 'LinearDeiT' else 4
    padded = pad(x, (0, -size[1] % patch, 0, -size[0] % patch))
    for out, expected in zip(model(x), model(padded)):
        torch.testing.assert_close(out, expected)


@every_attention
@every_host
def test_an_item_alone_gets_the_output_it_has_in_a_batch(host, attn):
    model = small_hosts.build(host, attn).double().eval()
    batch = image(3, 40, 56).double() * torch.tensor([1.0, 30.0, 0.01]).double().view(3, 1, 1, 1)
    together = model(batch)
    for i in range(3):
        for out, alone in zip(together, model(batch[i : i + 1])):
            torch.testing.assert_close(out[i : i + 1], alone)


@pytest.mark.parametrize('size', [(84, 84), (100, 72), (33, 150)], ids=str)
@every_attention
@pytest.mark.parametrize('host', ['LinearSwin', 'LinearCSWin'])
def test_what_the_padding_of_windows_holds_has_no_influence(host, attn, size, monkeypatch):
    """84: whole windows of 7 in the first stage, partial ones after it. Linear attentions pad for compilers only, and
    cut their windows else."""
    model = small_hosts.build(host, attn).double().eval()
    x = image(2, *size).double().requires_grad_()

    def gradient(outs):
        return torch.autograd.grad(sum(out.square().sum() for out in outs), x)[0]

    expected = model(x)
    expected_gradient = gradient(expected)
    poisoned = []

    def fill(tensor, widths):
        value = 100.0 if tensor.is_floating_point() else 0  # the mask itself stays
        poisoned.append(value)
        return pad(tensor, widths, value=value)

    monkeypatch.setattr(windows, 'F', SimpleNamespace(pad=fill))
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)
    outs = model(x)
    for out, other in zip(outs, expected):
        torch.testing.assert_close(out, other)
    torch.testing.assert_close(gradient(outs), expected_gradient)
    assert 100.0 in poisoned or (host == 'LinearCSWin' and attn != 'softmax')  # linear CSWin sees the whole map


@every_attention
@every_host
def test_the_layout_of_the_image_in_memory_does_not_matter(host, attn):
    model, x = small_hosts.build(host, attn).eval(), image()
    for out, other in zip(model(x), model(x.to(memory_format=torch.channels_last))):
        torch.testing.assert_close(out, other)


# --- precision --------------------------------------------------------------------------------


def assert_trains(model, x, dtype, loss_scale=2**10):
    with torch.autocast('cpu', dtype):
        outs = model(x)
    assert all(out.isfinite().all() for out in outs)
    (loss(outs) * loss_scale).backward()
    bad = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not bad


@pytest.mark.parametrize('dtype', HALF, ids=str)
@every_attention
@every_host
def test_autocast_is_finite_and_close_to_float32(host, attn, dtype):
    model = small_hosts.build(host, attn)
    assert_trains(model.train(), image(2, 64, 80), dtype)
    model.eval()
    x = image(1, 64, 80)
    with torch.no_grad():
        exact = model(x)
        with torch.autocast('cpu', dtype):
            outs = model(x)
    for out, expected in zip(outs, exact):
        assert (out - expected).norm() < 16 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize('dtype', HALF, ids=str)
@every_host
def test_large_activations(host, dtype):
    """Inputs 100 times their usual size, as a badly scaled fine-tuning run has them."""
    for attn in ('inline', 'focused'):
        assert_trains(small_hosts.build(host, attn).train(), 100 * image(2, 64, 64), dtype, loss_scale=1)


DETECTION = [
    (LinearPVT, 'inline-tiny'),
    (LinearPVT, 'flatten-tiny'),
    (LinearPVTv2, 'flatten-b1'),
    (LinearSwin, 'inline-tiny'),
    (LinearSwin, 'flatten-tiny'),
    (LinearCSWin, 'inline-tiny'),
    (LinearCSWin, 'flatten-tiny'),
    (LinearDeiT, 'inline-tiny'),
    (LinearDeiT, 'flatten-tiny'),
    (LinearNextViT, 'softmax-small'),
]


@pytest.mark.parametrize(('host', 'arch'), DETECTION, ids=str)
def test_autocast_is_finite_at_published_depths(host, arch):
    model = host(arch, **(dict(out_type='featmap') if host is LinearDeiT else {}))
    assert_trains(model.train(), image(1, 64, 96), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(('host', 'arch'), DETECTION, ids=str)
def test_autocast_is_finite_at_the_size_of_a_detector(host, arch):
    """Of published widths; all blocks at a small size, above."""
    assert_trains(small_hosts.shallow(host, arch).train(), torch.randn(1, 3, 800, 1333), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize('attn', ['inline', 'focused'])
@every_host
def test_float16_is_finite_at_the_size_of_a_detector(host, attn):
    """Thin models: CPUs compute float16 slowly, and the number of tokens is what counts."""
    assert_trains(small_hosts.build(host, attn).train(), torch.randn(1, 3, 800, 1333), torch.float16)


# --- freezing, saving memory, outputs -----------------------------------------------------------


def test_norms_of_outputs_leave_the_tokens_of_later_blocks_alone():
    plain = small_hosts.build('LinearDeiT', 'softmax', out_norm=False, out_indices=(0, 1), out_type='raw').eval()
    normed = small_hosts.build('LinearDeiT', 'softmax', out_norm=True, out_indices=(0, 1), out_type='raw').eval()
    normed.load_state_dict(plain.state_dict(), strict=False)
    torch.nn.init.uniform_(normed.out_norm.weight, 2, 3)
    with torch.no_grad():
        for out, raw in zip(normed(x := image(1)), plain(x), strict=True):
            torch.testing.assert_close(out, normed.out_norm(raw))


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1, 2, 4])
@every_pyramid
def test_frozen_stages(host, frozen_stages):
    """0 the stem, i the stem and stages 1..i with their tables and output norms."""

    def should_freeze(name):
        part, index = name.split('.')[:2]
        stem = part in ('patch_embeds', 'position_tables')
        return frozen_stages >= 0 and int(index) < (max(frozen_stages, 1) if stem else frozen_stages)

    model = small_hosts.build(host, frozen_stages=frozen_stages, stage_attns=MIXED)
    for _ in range(2):
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad != should_freeze(name), name
        model.train()
    if frozen_stages == 4:
        return
    loss(model(image())).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == should_freeze(name), name


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1, 2])
@every_attention
def test_frozen_blocks_of_deit(frozen_stages, attn):
    model = small_hosts.build('LinearDeiT', attn, frozen_stages=frozen_stages)
    frozen = {name.rsplit('.', 1)[0].split('.')[0] for name, p in model.named_parameters() if not p.requires_grad}
    assert ('cls_token' in frozen) == ('patch_embeds' in frozen) == ('position_table' in frozen) == (frozen_stages >= 0)
    for i, block in enumerate(model.blocks):
        assert all(p.requires_grad != (i < frozen_stages) for p in block.parameters())
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    model.eval().train()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert [block.training for block in model.blocks] == [i >= frozen_stages for i in range(2)]


@every_attention
@every_host
def test_with_cp_gives_the_same_gradients(host, attn):
    plain, saving = (small_hosts.build(host, attn, drop_path_rate=0.3, with_cp=cp).train() for cp in (False, True))
    x = image()
    for model in (plain, saving):
        torch.manual_seed(3)  # the dropped paths are drawn again in the recomputation
        loss(model(x)).backward()
    for (name, mine), (_, other) in zip(plain.named_parameters(), saving.named_parameters()):
        torch.testing.assert_close(mine.grad, other.grad, msg=name)


@pytest.mark.parametrize('out_type', ['raw', 'cls_token', 'featmap', 'avg_featmap'])
def test_outputs_of_deit(out_type):
    model = small_hosts.build('LinearDeiT', 'inline', out_type=out_type).eval()
    raw = small_hosts.build('LinearDeiT', 'inline', out_type='raw').eval()
    x = image()
    ((out,), (tokens,)) = model(x), raw(x)
    assert tokens.shape == (2, 1 + 4 * 6, 16)
    patches = tokens[:, 1:]
    expected = dict(
        raw=tokens,
        cls_token=tokens[:, 0],
        featmap=patches.transpose(1, 2).unflatten(2, (4, 6)),
        avg_featmap=patches.mean(dim=1),
    )
    torch.testing.assert_close(out, expected[out_type])


@pytest.mark.parametrize('out_indices', [-1, 0, (0, 1), (-2,), (-2, -1)], ids=str)
@pytest.mark.parametrize('out_norm', [True, False])
def test_out_indices_of_deit(out_indices, out_norm):
    model = small_hosts.build('LinearDeiT', 'focused', out_indices=out_indices, out_norm=out_norm).train()
    outs = model(image())
    assert len(outs) == (1 if isinstance(out_indices, int) else len(out_indices))
    loss(outs).backward()
    assert all(p.grad is not None for p in model.parameters())
    blocks = {-1: [1], 0: [0], (0, 1): [0, 1], (-2,): [0], (-2, -1): [0, 1]}[out_indices]
    assert model.feature_info == [dict(stage=i, channels=16, stride=16) for i in blocks]


def test_stochastic_depth_of_deit():
    """Linear over all blocks, those that are not built included; 0 is none, where the arch has some."""
    arch = dict(ARCHS['LinearDeiT'], depths=(5,), drop_path_rate=0.2)
    whole, last = range(5), [0.0, 0.05, 0.1, 0.15, 0.2]
    for options, expected in (
        ({}, last),
        (dict(drop_path_rate=0.4), [2 * rate for rate in last]),
        (dict(drop_path_rate=0), [0.0] * 5),
        (dict(out_indices=(0, 2)), last[:3]),
    ):
        model = small_hosts.build('LinearDeiT', 'softmax', arch=arch, **options)
        found = [getattr(model.blocks[i].drop_path, 'drop_prob', 0.0) for i in whole[: len(model.blocks)]]
        assert found == pytest.approx(expected), options


def test_deit_without_position_table_is_frozen_as_with_one():
    arch = dict(ARCHS['LinearDeiT'], absolute_position=False)
    model = small_hosts.build('LinearDeiT', 'softmax', arch=arch, frozen_stages=1).train()
    frozen = {name.split('.')[0] for name, p in model.named_parameters() if not p.requires_grad}
    assert model.position_table is None and frozen == {'patch_embeds', 'cls_token', 'blocks'}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if name.startswith(('blocks.1.', 'out_norm.'))
    }


@pytest.mark.parametrize('bias', [True, False])
def test_the_bias_of_projections_is_the_archs(bias):
    model = small_hosts.build('LinearDeiT', 'rala', arch=dict(ARCHS['LinearDeiT'], qkv_bias=bias))
    assert [block.attn.qkv.bias is not None for block in model.blocks] == [bias, bias]
    assert all(block.attn.proj.bias is not None for block in model.blocks)


@pytest.mark.parametrize('host', [host for host in PYRAMIDS if host != 'LinearNextViT'])
def test_out_norm_is_a_norm_of_each_raw_output(host):
    model, raw_model = (small_hosts.build(host, 'inline', out_norm=norm).eval() for norm in (True, False))
    x = image()
    for i, (out, raw) in enumerate(zip(model(x), raw_model(x))):
        norm = model.out_norms[str(i)]
        expected = norm(raw.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@every_host
def test_an_attention_may_be_named_by_a_dict_without_options(host):
    """It is the attention of that name, to the last digit: also where keys are reduced and windows are shifted."""
    attns = (['inline', 'focused'],) if host == 'LinearDeiT' else ('inline', 'softmax', ['rala', 'softmax'], 'focused')
    dicts = [[dict(type=name) for name in ([spec] if isinstance(spec, str) else spec)] for spec in attns]
    dicts = [specs[0] if len(specs) == 1 else specs for specs in dicts]
    named, given = (small_hosts.build(host, stage_attns=specs).eval() for specs in (attns, dicts))
    given.load_state_dict(named.state_dict())
    x = image(1, 40, 56)
    for out, expected in zip(given(x), named(x)):
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


# --- windows of Swin ----------------------------------------------------------------------------


def window_of(model):
    return [[block.attn.window for block in stage] for stage in model.stages]


def test_window_size():
    def built(window_size):
        attns = ('inline', 'inline', ['inline', 'softmax'], 'softmax')
        return window_of(small_hosts.build('LinearSwin', window_size=window_size, stage_attns=attns))

    trained = [[(7, 7)], [(4, 4)], [(3, 3), (3, 3)], [(3, 3)]]
    assert built('trained') == trained
    assert built(None) == [[None], [None], [None, (3, 3)], [(3, 3)]]
    assert built(5) == [[(5, 5)], [(5, 5)], [(5, 5)] * 2, [(5, 5)]]
    assert built((9, None, 'trained', 2)) == [[(9, 9)], [None], [(3, 3)] * 2, [(2, 2)]]
    assert built([9, None, 'trained', 2]) == built((9, None, 'trained', 2))


def test_position_tables_are_of_the_window_or_of_the_trained_one_where_there_is_none():
    def tables(window_size):
        model = small_hosts.build('LinearSwin', 'focused', window_size=window_size)
        return [stage[0].attn.mixer.position.grid for stage in model.stages]

    trained = [(7, 7), (4, 4), (3, 3), (2, 2)]
    assert tables('trained') == tables(None) == trained
    assert tables(5) == [(5, 5)] * 4
    assert tables((9, None, 'trained', 1)) == [(9, 9), (4, 4), (3, 3), (1, 1)]


@pytest.mark.parametrize('host', [host for host in PYRAMIDS if 'grids' in ARCHS[host]])
def test_tables_of_whole_maps_are_of_the_grids_that_were_trained(host):
    model = small_hosts.build(host, 'focused')
    grids = [(side, side) for side in ARCHS[host]['grids']]
    found = {
        int(name.split('.')[1]): module.position.grid
        for name, module in model.named_modules()
        if name.endswith('.mixer') and name.startswith('stages')
    }
    assert found == {i: grid for i, grid in enumerate(grids) if host != 'LinearNextViT' or i}  # its first has none
    if host == 'LinearPVT':
        assert [table.grid for table in model.position_tables] == grids


def test_blocks_of_swin_shift_in_turn_where_windows_are_small():
    arch = dict(ARCHS['LinearSwin'], depths=(2, 3, 2, 1))
    attns = ('softmax', 'hallucinated', ['inline', 'rala'], 'rala')
    model = small_hosts.build('LinearSwin', arch=arch, stage_attns=attns)
    assert [[block.attn.shift for block in stage] for stage in model.stages] == [
        [False, True],
        [False, True, False],
        [False, False],
        [False],
    ]
    biased = [[block.attn.relative_bias is not None for block in stage] for stage in model.stages]
    assert biased == [[True] * 2, [True] * 3, [False] * 2, [False]]


@pytest.mark.parametrize('attn', ['inline', 'rala'])
def test_windows_larger_than_the_map_are_the_map(attn):
    """At the trained size and below, a windowed model and its global form are one."""
    large, whole = (small_hosts.build('LinearSwin', attn, window_size=size).eval() for size in (24, None))
    large.load_state_dict(whole.state_dict())
    x = image()
    for out, expected in zip(large(x), whole(x)):
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize('window_size', ['trained', None, 5, (5, None, 3, 2)], ids=str)
@pytest.mark.parametrize('attn', ['inline', 'focused', 'rala'])
def test_every_window_size_trains_at_odd_sizes(attn, window_size):
    model = small_hosts.build('LinearSwin', attn, window_size=window_size).train()
    loss(model(image(2, 75, 101))).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# --- what tools do with a model ----------------------------------------------------------------


# each host, and each attention in windows: to export takes a second, to trace, above, less
@pytest.mark.parametrize(
    ('host', 'attn'),
    [(host, ATTNS[i % len(ATTNS)]) for i, host in enumerate(ARCHS) if host != 'LinearSwin']
    + [('LinearSwin', attn) for attn in ATTNS],
)
def test_export(host, attn):
    model, x = small_hosts.build(host, attn).eval(), image(1, 64, 80)
    with torch.no_grad():
        exported = torch.export.export(model, (x,)).module()
        for out, expected in zip(exported(x), model(x)):
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@every_host
def test_dynamo_captures_one_graph(host):
    """Whole, in inference, at a size that resizes tables and pads windows."""
    attns = (['inline', 'focused'],) if host == 'LinearDeiT' else MIXED
    model, x = small_hosts.build(host, stage_attns=attns).eval(), image(1, 75, 101)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend='eager')
    with torch.no_grad():
        for out, expected in zip(compiled(x), model(x)):
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope='module')
def process_group(tmp_path_factory):
    """A group of this process alone: DistributedDataParallel minds unused parameters all the same."""
    store = tmp_path_factory.mktemp('group') / 'store'
    torch.distributed.init_process_group('gloo', init_method=f'file://{store}', rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize('with_cp', [False, True])
@every_attention
@every_host
def test_trains_in_parallel_without_find_unused_parameters(process_group, host, attn, with_cp):
    model = small_hosts.build(host, attn, drop_path_rate=0.5, with_cp=with_cp).train()
    parallel = DistributedDataParallel(model)
    for _ in range(2):  # what the first step left unused is an error in the second
        loss(parallel(image())).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@every_attention
@every_host
def test_copies_after_a_forward_pass(host, attn):
    """Resized tables that a model keeps do not follow its copies around."""
    model, x = small_hosts.build(host, attn).eval(), image()
    with torch.no_grad():
        expected = model(x)[-1]
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(x)[-1], expected)
            for parameter in twin.parameters():
                parameter.mul_(1.1)
            assert not torch.allclose(twin(x)[-1], expected)
            assert torch.equal(model(x)[-1], expected)


@every_attention
@pytest.mark.parametrize('host', ARCHS)
@pytest.mark.parametrize('training', [False, True], ids=['inference', 'training'])
def test_a_batch_of_no_images_gives_empty_maps(host, attn, training):
    """What an image source that ran dry, or a filter before the model, leaves."""
    model = small_hosts.build(host, attn).train(training)
    with torch.set_grad_enabled(training):
        outs, empty = model(small_hosts.image(1)), model(small_hosts.image(0))
    assert [out.shape[1:] for out in empty] == [out.shape[1:] for out in outs]
    assert all(out.shape[0] == 0 for out in empty)
    if training:
        sum(out.sum() for out in empty).backward()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_tables_of_another_grid_are_resized_in_a_copy():
    """A file may go into several models."""
    model = small_hosts.build('LinearPVT', 'inline')
    state = {**model.state_dict(), 'position_tables.0.weight': torch.randn(1, 6 * 6, 8)}
    given = dict(state)
    fitted = model.adapt_state_dict(state)
    assert fitted.pop('position_tables.0.weight').shape == (1, 10 * 10, 8)
    assert state.keys() == given.keys() and all(state[key] is value for key, value in given.items())
    assert all(value is given[key] for key, value in fitted.items()) and len(fitted) == len(given) - 1


@every_host
def test_weights_of_parts_that_are_not_built_are_left_out_in_silence(host):
    whole, part = (small_hosts.build(host, 'inline', **options) for options in ({}, dict(out_indices=(0,))))
    _, report = fit_backbone(part, {**whole.state_dict(), 'odd.weight': torch.ones(1)})
    assert report.missing == report.mismatched == [] and report.unexpected == ['odd.weight']
    assert set(report.loaded) == set(part.state_dict())
    left_out = set(whole.state_dict()) - set(part.state_dict())
    assert left_out and set(report.ignored) == left_out


def test_blocks_with_numbers_of_two_digits_are_left_out_in_silence():
    """10 and 11 are not built, as 1 is."""
    arch = dict(ARCHS['LinearDeiT'], depths=(12,))
    whole, part = (small_hosts.build('LinearDeiT', 'rala', arch=arch, out_indices=last) for last in (-1, 1))
    _, report = fit_backbone(part, whole.state_dict())
    assert report.missing == report.mismatched == report.unexpected == []
    assert {key.split('.')[1] for key in report.ignored} == {str(i) for i in range(2, 12)}


@every_host
def test_keys_that_only_look_like_parts_that_are_not_built_are_reported(host):
    """Of a file of somebody else: without a number, or with a name in its place."""
    part = small_hosts.build(host, 'inline', out_indices=(0,))
    names = 'stages', 'blocks', 'patch_embeds', 'position_tables', 'out_norms'
    odd = [key for name in names for key in (name, f'{name}.norm.weight', f'{name}.weight')]
    odd += [key for name in names for key in (f'{name}_extra.1.weight', f'{name[:-1]}.1.weight', f'my_{name}.1.weight')]
    _, report = fit_backbone(part, {**part.state_dict(), **{key: torch.ones(1) for key in odd}})
    assert sorted(report.unexpected) == sorted(odd) and report.ignored == []


@every_host
@pytest.mark.parametrize('options', [{}, dict(out_indices=(0,))], ids=['whole', 'part'])
def test_stages_and_blocks_that_the_architecture_does_not_have_are_reported(host, options):
    """In files of deeper models: they are not what this one was configured to leave out."""
    model = small_hosts.build(host, 'inline', **options)
    names = 'stages.{}.0.norm1.weight', 'patch_embeds.{}.x', 'position_tables.{}.weight', 'out_norms.{}.weight'
    names, beyond = (['blocks.{}.norm1.weight'], 2) if host == 'LinearDeiT' else (names, 4)
    odd = [name.format(number) for name in names for number in (beyond, 12)]
    _, report = fit_backbone(model, {**model.state_dict(), **{key: torch.ones(1) for key in odd}})
    assert sorted(report.unexpected) == sorted(odd) and report.ignored == []


@plain_hosts
def test_norms_of_outputs_that_are_given_raw_are_left_out_in_silence(host):
    whole, part = (small_hosts.build(host, 'inline', out_norm=norm) for norm in (True, False))
    norms = {key for key in whole.state_dict() if key.startswith('out_norm')}
    built = {key for key in part.state_dict() if key.startswith('out_norm')}  # those that feed the next stage
    _, report = fit_backbone(part, whole.state_dict())
    assert report.missing == report.mismatched == report.unexpected == []
    assert set(report.ignored) == norms - built and len(built) == (6 if host == 'LinearPVTv2' else 0)
    odd = 'out_norm.odd' if host == 'LinearDeiT' else 'out_norms.0.odd'
    _, report = fit_backbone(whole, {**whole.state_dict(), odd: torch.ones(1)})
    assert report.unexpected == [odd] and report.ignored == []


@every_attention
@pytest.mark.parametrize('host', ARCHS)
def test_models_built_without_memory_and_then_given_their_weights(host, attn):
    """``torch.device('meta')`` and ``load_state_dict(assign=True)``: all that a model needs is in its weights."""
    source, x = small_hosts.build(host, attn).eval(), small_hosts.image(1)
    with torch.device('meta'):
        model = MODELS.build(small_hosts.config(host, attn)).eval()
    model.load_state_dict(source.state_dict(), assign=True)
    for ours, theirs in zip(model(x), source(x)):
        torch.testing.assert_close(ours, theirs)


@every_host
def test_the_ratio_of_the_hidden_width_may_be_a_fraction(host):
    arch = dict(copy.deepcopy(ARCHS[host]), mlp_ratios=2.5)
    model = small_hosts.build(host, 'inline', arch=arch).eval()
    assert all(out.isfinite().all() for out in model(image()))
