# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What every host promises. A new host adds a line to ``HOSTS``."""

import copy
import io
import math
import pickle

import goldens
import pytest
import torch
from mmcv.cnn.bricks import DropPath
from mmengine.registry import MODELS
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm
from torch import nn

from mmlinattn.backbones import RAVLT, LinearDeiT, LinearPVT, LinearSwin
from mmlinattn.backbones.base import statistics_kept

HOSTS = {
    'RAVLT': dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 2, 1), num_heads=(1, 2, 3, 4)),
}


@pytest.fixture(params=HOSTS)
def build(request):
    """Builds a small model of each host with weights that hide no term."""

    def build(**options):
        options = {'arch': copy.deepcopy(HOSTS[request.param]), **options}
        return goldens.fill(MODELS.build(dict(type=request.param, **options)))

    return build


def image(batch=2, height=64, width=96, channels=3):
    return torch.randn(batch, channels, height, width)


def loss(outs):
    return sum(out.float().square().mean() for out in outs)


def batch_norms(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}


# --- outputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize('size', [(32, 32), (33, 47), (64, 32), (37, 160), (224, 224)], ids=str)
def test_stage_i_has_the_size_of_the_image_over_4_times_2_to_the_i_rounded_up(build, size):
    model = build().eval()
    outs = model(image(1, *size))
    assert isinstance(outs, tuple)
    for i, (out, dim) in enumerate(zip(outs, model.embed_dims)):
        expected = (1, dim, *(math.ceil(side / 4 / 2**i) for side in size))
        assert out.shape == expected
        assert out.is_contiguous()
        assert out.isfinite().all()


def test_feature_info_tells_channels_and_strides(build):
    model = build(out_indices=(1, 3)).eval()
    assert [(info['stage'], info['stride']) for info in model.feature_info] == [(1, 8), (3, 32)]
    for out, info in zip(model(image()), model.feature_info):
        assert out.shape[1:] == (info['channels'], 64 // info['stride'], 96 // info['stride'])


def test_an_item_alone_gets_the_output_it_has_in_a_batch(build):
    model = build().double().eval()
    batch = image(3, 40, 56).double() * torch.tensor([1.0, 30.0, 0.01]).double().view(3, 1, 1, 1)
    together = model(batch)
    for i in range(3):
        for out, alone in zip(together, model(batch[i : i + 1])):
            torch.testing.assert_close(out[i : i + 1], alone)


def test_the_layout_of_the_image_in_memory_does_not_matter(build):
    model, x = build().eval(), image()
    for out, other in zip(model(x), model(x.to(memory_format=torch.channels_last))):
        torch.testing.assert_close(out, other)


def test_out_norm_is_a_layer_norm_over_the_channels_of_each_raw_output(build):
    model = build(out_norm=True).eval()
    raw_model = build(out_norm=False).eval()
    state = {k: v for k, v in model.state_dict().items() if not k.startswith('out_norms')}
    raw_model.load_state_dict(state)
    x = image()
    for i, (out, raw) in enumerate(zip(model(x), raw_model(x))):
        norm = model.out_norms[str(i)]
        deviation = raw - raw.mean(dim=1, keepdim=True)
        scaled = deviation / (deviation.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
        expected = scaled * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('out_norm', [True, False])
@pytest.mark.parametrize('out_indices', [(0,), (1,), (3,), (1, 3), (0, 2), (0, 1, 2, 3)], ids=str)
def test_out_indices_builds_what_they_need_and_all_of_it_trains(build, out_indices, out_norm):
    """DDP without find_unused_parameters stops on a parameter without a gradient."""
    model = build(out_indices=out_indices, out_norm=out_norm)
    outs = model(image())
    assert len(outs) == len(out_indices)
    assert len(model.stages) == out_indices[-1] + 1
    loss(outs).backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


def test_outputs_of_a_subset_are_those_of_the_whole(build):
    whole = build().eval()
    part = build(out_indices=(0, 2)).eval()
    keys = part.state_dict().keys()
    part.load_state_dict({k: v for k, v in whole.state_dict().items() if k in keys})
    x = image()
    outs = whole(x)
    for out, expected in zip(part(x), (outs[0], outs[2])):
        torch.testing.assert_close(out, expected)


def test_other_channel_counts(build):
    for channels in (1, 4):
        model = build(in_channels=channels).eval()
        assert len(model(image(channels=channels))) == 4


# --- freezing and modes -----------------------------------------------------------------------


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1, 2, 3, 4])
def test_frozen_stages(build, frozen_stages):
    """0 the stem, i the stem and stages 1..i with what leads to them and their output norms."""

    def should_freeze(name):
        part, index = name.split('.')[:2]
        if part == 'patch_embeds':
            return frozen_stages >= 0 and int(index) < max(frozen_stages, 1)
        return int(index) < frozen_stages

    model = build(frozen_stages=frozen_stages, drop_path_rate=0.0)
    for name, parameter in model.named_parameters():  # optimizers are built before the first call of train()
        assert parameter.requires_grad != should_freeze(name), name
    model.train()
    model.eval()
    model.train()  # a frozen part stays frozen when a validation is over
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != should_freeze(name), name
    for name, module in batch_norms(model).items():
        assert module.training != should_freeze(name), name
    before = copy.deepcopy(model.state_dict())
    outs = model(image())
    if frozen_stages < 4:
        loss(outs).backward()
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for name, value in model.state_dict().items():
        if should_freeze(name):
            assert torch.equal(value, before[name]), name
        elif name.endswith('running_mean'):
            assert not torch.equal(value, before[name]), name
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == should_freeze(name), name


def test_frozen_parts_carry_no_graph(build):
    model = build(frozen_stages=2).train()
    outs = model(image())
    assert [out.requires_grad for out in outs] == [False, False, True, True]


@pytest.mark.parametrize('norm_eval', [False, True])
def test_norm_eval_keeps_batch_statistics_in_training(build, norm_eval):
    model = build(norm_eval=norm_eval)
    norms = batch_norms(model)
    if not norms:
        pytest.skip('no batch norm in this host')
    model.eval()
    model.train()
    assert all(module.training != norm_eval for module in norms.values())
    assert all(block.training for stage in model.stages for block in stage)
    assert all(parameter.requires_grad for parameter in model.parameters())
    before = {name: module.running_mean.clone() for name, module in norms.items()}
    model(image())
    for name, module in norms.items():
        assert torch.equal(module.running_mean, before[name]) == norm_eval, name
    model.eval()
    assert not any(module.training for module in norms.values())


def test_stochastic_depth_grows_linearly_and_acts_in_training_only(build):
    model = build(drop_path_rate=0.4, norm_eval=True)
    blocks = [block for stage in model.stages for block in stage]
    rates = [max([m.drop_prob for m in block.modules() if isinstance(m, DropPath)], default=0.0) for block in blocks]
    assert rates == pytest.approx([0.4 * i / (len(blocks) - 1) for i in range(len(blocks))])
    x = image(8)
    model.eval()
    first, second = model(x)[-1], model(x)[-1]
    assert torch.equal(first, second)
    model.train()
    first, second = model(x)[-1], model(x)[-1]
    assert not torch.allclose(first, second)


def test_no_stochastic_depth_no_chance(build):
    model = build(drop_path_rate=0.0, norm_eval=True).train()
    x = image()
    assert torch.equal(model(x)[-1], model(x)[-1])


def test_with_cp_gives_the_same_gradients_and_recomputes_blocks(build):
    plain = build(drop_path_rate=0.3).train()
    saving = build(drop_path_rate=0.3, with_cp=True).train()
    saving.load_state_dict(plain.state_dict())
    calls = []
    saving.stages[1][0].register_forward_pre_hook(lambda *_: calls.append(1))
    x = image()
    for model in (plain, saving):
        torch.manual_seed(3)  # the dropped paths are drawn again in the recomputation
        loss(model(x)).backward()
    assert len(calls) == 2
    for (name, mine), (_, other) in zip(plain.named_parameters(), saving.named_parameters()):
        torch.testing.assert_close(mine.grad, other.grad, msg=name)
    for (name, mine), (_, other) in zip(plain.named_buffers(), saving.named_buffers()):
        torch.testing.assert_close(mine, other, msg=name)  # batch statistics are counted once


@pytest.mark.parametrize('fails', [False, True])
def test_statistics_are_kept_while_a_block_is_recomputed(fails):
    """Those of norms that train, whatever comes in between; they stay the buffers they were."""
    norms = nn.ModuleList([nn.BatchNorm2d(2), nn.BatchNorm2d(2).eval(), nn.BatchNorm2d(2, track_running_stats=False)])
    kept, before = dict(norms.named_buffers()), copy.deepcopy(norms.state_dict())
    try:
        with statistics_kept(norms):
            for norm in norms:
                norm(torch.randn(4, 2, 3, 3) + 1)
            assert norms[0].num_batches_tracked == 1
            if fails:
                raise RuntimeError
    except RuntimeError:
        pass
    assert {name: id(value) for name, value in norms.named_buffers()} == {
        name: id(value) for name, value in kept.items()
    }
    assert all(torch.equal(value, before[name]) for name, value in norms.state_dict().items())
    norms[0](torch.randn(4, 2, 3, 3) + 1)
    assert norms[0].num_batches_tracked == 1 and norms[0].running_mean.any()


def test_what_a_file_lacks_starts_as_without_one_and_only_once(build, tmp_path):
    """As from scratch, not by what the config says beside the file; a second ``init_weights`` changes nothing."""
    source = build()
    state = {key: value for key, value in source.state_dict().items() if key.startswith('patch_embeds')}
    torch.save(dict(state_dict=state), tmp_path / 'stem.pth')
    given = dict(type='Pretrained', checkpoint=str(tmp_path / 'stem.pth'))
    model = build(init_cfg=[dict(type='Constant', layer='Linear', val=3.0), given])
    model.init_weights()
    assert model.init_cfg == [dict(type='Constant', layer='Linear', val=3.0), given]
    for name, value in model.state_dict().items():
        if name.startswith('patch_embeds'):
            assert torch.equal(value, state[name]), name
    for module in model.stages.modules():
        if isinstance(module, nn.Linear):
            assert module.weight.detach().std() == pytest.approx(0.02, rel=0.5) and not module.bias.any()
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all() and not module.bias.any()
    nn.init.ones_(model.patch_embeds[0].layers[0].weight)
    model.init_weights()
    assert (model.patch_embeds[0].layers[0].weight == 1).all()


def test_weights_may_come_from_several_files(build, tmp_path):
    source, given = build().state_dict(), []
    for part in ('patch_embeds', 'stages', 'out_norms'):
        path = tmp_path / f'{part}.pth'
        torch.save({key: value for key, value in source.items() if key.startswith(part)}, path)
        given.append(dict(type='Pretrained', checkpoint=str(path)))
    model = build(init_cfg=given)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.init_weights()
    assert all(torch.equal(value, source[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize('listed', [False, True])
def test_an_init_cfg_takes_the_place_of_the_hosts_own(build, listed):
    given = dict(type='Constant', layer='Linear', val=0.25, bias=2.0)
    model = build(init_cfg=[given] if listed else given)
    kept = {name: value.clone() for name, value in model.state_dict().items() if 'norm' in name}
    model.init_weights()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert (module.weight == 0.25).all() and (module.bias == 2).all()
    assert kept and all(torch.equal(model.state_dict()[name], value) for name, value in kept.items())


# --- attentions -------------------------------------------------------------------------------


def mixers(model):
    return [[block.attn.mixer._get_name() for block in stage] for stage in model.stages]


def test_stage_attns_as_names_options_and_one_per_block(build):
    model = build(
        stage_attns=(
            'softmax',
            dict(type='rala', kernel='relu'),
            ['rala', dict(type='softmax')],
            'rala',
        )
    )
    assert mixers(model) == [
        ['SoftmaxMixer'],
        ['RALAMixer'],
        ['RALAMixer', 'SoftmaxMixer'],
        ['RALAMixer'],
    ]
    assert model.stages[1][0].attn.mixer.kernel == 'relu'
    loss(model(image())).backward()


@pytest.mark.parametrize('name', ['rala', 'softmax'])
def test_one_attention_everywhere(build, name):
    model = build(stage_attns=(name,) * 4).eval()
    assert len({name for stage in mixers(model) for name in stage}) == 1
    assert all(out.isfinite().all() for out in model(image()))


def test_stage_attns_are_read_from_a_config_as_lists(build):
    """What MMEngine's Config hands over."""
    from mmengine.config import Config

    attns = Config(dict(attns=['rala', 'rala', ['rala', dict(type='softmax')], 'softmax'])).attns
    assert mixers(build(stage_attns=attns))[2] == ['RALAMixer', 'SoftmaxMixer']


def test_what_a_model_is_built_from_is_a_copy():
    """Who changes the arch or the initialisation of a model changes no other one, nor the tables of the class."""
    inner = LinearSwin.resolve_arch('inline-base')['stage_attns'][2]
    assert inner == ['inline'] * 2 + ['softmax'] * 16
    inner.clear()
    assert len(LinearSwin.resolve_arch('inline-base')['stage_attns'][2]) == 18
    given = dict(HOSTS['RAVLT'], depths=[1, 1, 2, 1], ffn=[None, 'mlp', None, None])
    model = RAVLT(given)
    model.arch['depths'].clear(), model.arch['ffn'].clear()
    assert given['depths'] == [1, 1, 2, 1] and given['ffn'] == [None, 'mlp', None, None]
    model.init_cfg.clear()
    assert RAVLT(given).init_cfg == [
        dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
        dict(type='Constant', layer=['LayerNorm', '_BatchNorm'], val=1.0, bias=0.0),
    ]


# --- what tools do with a model ----------------------------------------------------------------


def test_copies_and_pickles_are_the_same_model_and_independent(build):
    model, x = build().eval(), image()
    expected = model(x)[-1]
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    twins = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stream, weights_only=False),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for twin in twins:
        assert torch.equal(twin(x)[-1], expected)


def test_state_dict_keys_are_the_same_each_time_and_survive_a_forward_pass(build):
    """Two processes have to agree on the order of parameters."""
    first, second = build(), build()
    keys = list(first.state_dict())
    assert keys == list(second.state_dict())
    first(image())
    assert keys == list(first.state_dict())


def test_init_weights_starts_as_documented(build):
    model = build()
    model.init_weights()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.detach().std() == pytest.approx(0.02, rel=0.5), name
            assert module.bias is None or not module.bias.any(), name
        elif isinstance(module, (nn.LayerNorm, _BatchNorm)):
            assert (module.weight == 1).all() and (module.bias == 0).all(), name


@pytest.mark.parametrize('host', [LinearSwin, LinearPVT, LinearDeiT], ids=lambda host: host.__name__)
def test_learned_tables_start_as_documented(host):
    """Position tables, biases of windows and the class token: normal of deviation 0.02, truncated."""
    model = host('softmax-tiny')
    model.init_weights()
    tables = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if name.endswith(('relative_bias.table', 'cls_token')) or 'position_table' in name
    }
    assert tables
    for name, table in tables.items():
        assert table.std() == pytest.approx(0.02, rel=0.2), name
        assert table.abs().max() < 0.15, name


def test_norm_eval_is_of_mmcvs_own_synchronised_norm():
    """``MMSyncBN``, which needs a process group to be built and is no batch norm of PyTorch's."""

    class SyncBatchNorm(nn.Module):
        pass

    model = RAVLT(HOSTS['RAVLT'], norm_eval=True)
    model.stages[0].norm = SyncBatchNorm()
    assert not model.train().stages[0].norm.training
    model.norm_eval = False
    assert model.train().stages[0].norm.training


@pytest.mark.parametrize('norm_eval', [False, True])
def test_norm_eval_is_of_every_kind_of_batch_norm(norm_eval):
    """Those that are synchronised, and those of rows in compact feed-forward networks."""
    arch = dict(
        embed_dims=(8, 16), depths=(1, 1), num_heads=(1, 2), stage_attns=('rala',) * 2, ffn=dict(type='compact')
    )
    model = RAVLT(arch, out_indices=(0, 1), norm_cfg=dict(type='SyncBN'), norm_eval=norm_eval).train()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    assert {isinstance(norm, nn.SyncBatchNorm) for norm in norms} == {True, False}
    assert all(norm.training != norm_eval for norm in norms)


def test_dynamo_captures_one_graph(build):
    model, x = build().eval(), image(1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend='eager')
    with torch.no_grad():
        for out, expected in zip(compiled(x), model(x)):
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled(build):
    """Inductor builds C++ code, seconds for a block: of two stages, with one block of each attention."""
    attns = ('rala', 'softmax', 'rala', 'rala')
    model, x = build(drop_path_rate=0.0, stage_attns=attns, out_indices=(0, 1)).eval(), image(1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for out, expected in zip(compiled(x), model(x)):
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'shape', [(1, 3, 31, 64), (1, 3, 64, 31), (1, 1, 64, 64), (1, 4, 64, 64), (3, 64, 64)], ids=str
)
def test_wrong_images(build, shape):
    with pytest.raises(ValueError) as error:
        build()(torch.rand(shape))
    message = str(error.value)
    assert str(shape) in message and '(B, 3, H, W) with H >= 32 and W >= 32' in message


def test_unknown_arch_lists_the_known_ones(build):
    with pytest.raises(ValueError, match=r"arch='huge' of \w+ has to be one of \['.*'\] or a dict"):
        build(arch='huge')


def small_arch(build, **changes):
    arch = {k: v for k, v in build().arch.items() if k in ('embed_dims', 'depths', 'num_heads')}
    return {**arch, **changes}


def test_arch_with_missing_and_unknown_keys(build):
    arch = small_arch(build, width=8)
    del arch['depths']
    with pytest.raises(ValueError) as error:
        build(arch=arch)
    message = str(error.value)
    assert "unknown: ['width']" in message and "missing: ['depths']" in message
    assert "['depths', 'embed_dims', 'num_heads']" in message


def test_what_is_said_of_an_arch_as_a_whole():
    arch = dict(HOSTS['RAVLT'], width=8)
    del arch['depths']
    with pytest.raises(ValueError) as error:
        RAVLT(arch)
    assert str(error.value) == (
        "arch of RAVLT needs the keys ['depths', 'embed_dims', 'num_heads'] and may have ['drop_path_rate', 'ffn', "
        "'layer_scales', 'mlp_ratios', 'stage_attns']; unknown: ['width'], missing: ['depths']"
    )
    with pytest.raises(ValueError) as error:
        RAVLT(dict(HOSTS['RAVLT'], num_heads=(1, 2)))
    assert str(error.value) == (
        'arch of RAVLT: embed_dims, depths and num_heads differ in length: '
        "{'depths': 4, 'embed_dims': 4, 'num_heads': 2}"
    )
    with pytest.raises(ValueError) as error:
        RAVLT('huge')
    assert str(error.value) == "arch='huge' of RAVLT has to be one of ['tiny', 'small', 'base', 'large'] or a dict"
    with pytest.raises(ValueError) as error:
        RAVLT(dict(HOSTS['RAVLT'], ffn=(None, 'mlp')))
    assert str(error.value) == "arch: ffn=(None, 'mlp') has to have one entry for each of the 4 stages"


def test_arch_with_missing_or_unknown_keys(build):
    with pytest.raises(ValueError, match=r"unknown: \['width'\], missing: \[\]"):
        build(arch=small_arch(build, width=8))
    arch = small_arch(build)
    del arch['depths']
    with pytest.raises(ValueError, match=r"unknown: \[\], missing: \['depths'\]"):
        build(arch=arch)


@pytest.mark.parametrize('key', ['embed_dims', 'depths', 'num_heads'])
@pytest.mark.parametrize('value', [4, '4444', None], ids=repr)
def test_arch_whose_lists_are_none(build, key, value):
    with pytest.raises(ValueError, match=f'^arch: {key}={value!r} has to be of type list or tuple$'):
        build(arch=small_arch(build, **{key: value}))


def test_arch_with_lists_of_different_length(build):
    with pytest.raises(ValueError, match="differ in length: .*'depths': 3"):
        build(arch=small_arch(build, depths=(1, 1, 1)))


@pytest.mark.parametrize('stage_attns', [('rala',) * 3, ('rala',) * 5, 'rala', dict(type='rala')], ids=str)
def test_stage_attns_of_the_wrong_length(build, stage_attns):
    with pytest.raises(ValueError) as error:
        build(stage_attns=stage_attns)
    message = str(error.value)
    assert repr(stage_attns) in message and 'one entry for each of the 4 stages' in message


def test_block_attns_of_the_wrong_length(build):
    for few_or_many in (1, 3):
        with pytest.raises(ValueError, match=rf'stage_attns\[2\] names {few_or_many} attentions, stage 2 has 2 blocks'):
            build(stage_attns=('rala', 'rala', ['rala'] * few_or_many, 'rala'))


def test_unknown_attention(build):
    with pytest.raises(ValueError, match=r"stage_attns: unknown attention 'ralla'; known are .*'rala'"):
        build(stage_attns=('rala', 'ralla', 'rala', 'rala'))
    with pytest.raises(ValueError, match=r"unknown attention 'ralla'"):
        build(stage_attns=('rala', 'rala', ['rala', dict(type='ralla')], 'rala'))


def test_heads_that_do_not_divide_the_width(build):
    with pytest.raises(ValueError, match='num_heads=5 has to divide the width 24'):
        build(arch=small_arch(build, num_heads=(1, 2, 5, 4)))
    with pytest.raises(ValueError, match='num_heads=0 has to divide the width 16'):
        build(arch=small_arch(build, num_heads=(1, 0, 3, 4)))


@pytest.mark.parametrize('out_indices', [(), (4,), (-1, 0), (1, 0), (0, 0)], ids=str)
def test_out_indices_out_of_range(build, out_indices):
    with pytest.raises(ValueError) as error:
        build(out_indices=out_indices)
    message = str(error.value)
    assert f'out_indices={out_indices}' in message and '[0, 3]' in message


@pytest.mark.parametrize('frozen_stages', [-2, 5])
def test_frozen_stages_out_of_range(build, frozen_stages):
    with pytest.raises(ValueError, match=rf'frozen_stages={frozen_stages} has to lie in \[-1, 4\]'):
        build(frozen_stages=frozen_stages)


@pytest.mark.parametrize('rate', [-0.1, 1.0, 2])
def test_drop_path_rate_out_of_range(build, rate):
    with pytest.raises(ValueError, match=rf'drop_path_rate={rate} has to be a number in \[0, 1\)'):
        build(drop_path_rate=rate)
