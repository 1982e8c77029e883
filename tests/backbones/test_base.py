# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What all hosts share: outputs, freezing and modes, initial weights, parts of checkpoints."""

import copy
import io
import pickle

import pytest
import small_hosts
import torch
from mmcv.cnn.bricks import DropPath
from mmengine.config import Config
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm
from small_hosts import ARCHS, PYRAMIDS, image, loss
from torch import nn

from mmlinattn.backbones import RAVLT, LinearDeiT, LinearPVT, LinearSwin
from mmlinattn.backbones.base import statistics_kept
from mmlinattn.checkpoints.states import fit_backbone

MIXED = ('inline', 'focused', ['softmax', 'rala'], 'softmax')
every_host = pytest.mark.parametrize('host', ARCHS)
# Next-ViT's norms feed on (test_nextvit.py)
plain_hosts = pytest.mark.parametrize('host', [host for host in ARCHS if host != 'LinearNextViT'])


@pytest.fixture(params=PYRAMIDS)
def build(request):
    """Builds a small model of each pyramid with weights that hide no term."""
    return lambda **options: small_hosts.build(request.param, **{'stage_attns': MIXED, **options})


@pytest.fixture
def build_ravlt():
    return lambda **options: small_hosts.build('RAVLT', **options)


def batch_norms(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}


# --- outputs ----------------------------------------------------------------------------------


def test_feature_info_tells_channels_and_strides(build):
    model = build(out_indices=(1, 3)).eval()
    assert [(info['stage'], info['stride']) for info in model.feature_info] == [(1, 8), (3, 32)]
    for out, info in zip(model(image()), model.feature_info):
        assert out.shape[1:] == (info['channels'], 64 // info['stride'], 96 // info['stride'])


def test_out_norm_is_a_layer_norm_over_the_channels_of_each_raw_output(build_ravlt):
    model = build_ravlt(out_norm=True).eval()
    raw_model = build_ravlt(out_norm=False).eval()
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
        if part in ('patch_embeds', 'position_tables'):
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
def test_norm_eval_keeps_batch_statistics_in_training(build_ravlt, norm_eval):
    model = build_ravlt(norm_eval=norm_eval)
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


def test_norm_eval_is_of_mmcvs_own_synchronised_norm():
    """``MMSyncBN``, which needs a process group to be built and is no batch norm of PyTorch's."""

    class SyncBatchNorm(nn.Module):
        pass

    model = RAVLT(ARCHS['RAVLT'], norm_eval=True)
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


# --- weights -----------------------------------------------------------------------------------


def test_what_a_file_lacks_starts_as_without_one_and_only_once(build_ravlt, tmp_path):
    """As from scratch, not by what the config says beside the file; a second ``init_weights`` changes nothing."""
    source = build_ravlt()
    state = {key: value for key, value in source.state_dict().items() if key.startswith('patch_embeds')}
    torch.save(dict(state_dict=state), tmp_path / 'stem.pth')
    given = dict(type='Pretrained', checkpoint=str(tmp_path / 'stem.pth'))
    model = build_ravlt(init_cfg=[dict(type='Constant', layer='Linear', val=3.0), given])
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


def test_weights_may_come_from_several_files(build_ravlt, tmp_path):
    source, given = build_ravlt().state_dict(), []
    for part in ('patch_embeds', 'stages', 'out_norms'):
        path = tmp_path / f'{part}.pth'
        torch.save({key: value for key, value in source.items() if key.startswith(part)}, path)
        given.append(dict(type='Pretrained', checkpoint=str(path)))
    model = build_ravlt(init_cfg=given)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.init_weights()
    assert all(torch.equal(value, source[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize('listed', [False, True])
def test_an_init_cfg_takes_the_place_of_the_hosts_own(build_ravlt, listed):
    given = dict(type='Constant', layer='Linear', val=0.25, bias=2.0)
    model = build_ravlt(init_cfg=[given] if listed else given)
    kept = {name: value.clone() for name, value in model.state_dict().items() if 'norm' in name}
    model.init_weights()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert (module.weight == 0.25).all() and (module.bias == 2).all()
    assert kept and all(torch.equal(model.state_dict()[name], value) for name, value in kept.items())


def test_init_weights_starts_as_documented(build_ravlt):
    model = build_ravlt()
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


# --- attentions -------------------------------------------------------------------------------


def mixers(model):
    return [[block.attn.mixer._get_name() for block in stage] for stage in model.stages]


def test_stage_attns_as_names_options_and_one_per_block(build_ravlt):
    model = build_ravlt(
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


def test_stage_attns_are_read_from_a_config_as_lists(build_ravlt):
    """What MMEngine's Config hands over."""
    attns = Config(dict(attns=['rala', 'rala', ['rala', dict(type='softmax')], 'softmax'])).attns
    assert mixers(build_ravlt(stage_attns=attns))[2] == ['RALAMixer', 'SoftmaxMixer']


def test_what_a_model_is_built_from_is_a_copy():
    """Who changes the arch or the initialisation of a model changes no other one, nor the tables of the class."""
    inner = LinearSwin.resolve_arch('inline-base')['stage_attns'][2]
    assert inner == ['inline'] * 2 + ['softmax'] * 16
    inner.clear()
    assert len(LinearSwin.resolve_arch('inline-base')['stage_attns'][2]) == 18
    given = dict(ARCHS['RAVLT'], depths=[1, 1, 2, 1], ffn=[None, 'mlp', None, None])
    model = RAVLT(given)
    model.arch['depths'].clear(), model.arch['ffn'].clear()
    assert given['depths'] == [1, 1, 2, 1] and given['ffn'] == [None, 'mlp', None, None]
    model.init_cfg.clear()
    assert RAVLT(given).init_cfg == [
        dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
        dict(type='Constant', layer=['LayerNorm', '_BatchNorm'], val=1.0, bias=0.0),
    ]


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
