# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The base class of all backbones: outputs, freezing, modes, initial weights, parts of checkpoints, names of
attentions."""

import copy

import pytest
import torch
from helpers import small_backbones
from helpers.small_backbones import ARCHS, blocks_of, build, image, loss, mixes
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.cnn.bricks import DropPath
from mmengine.registry import MODELS
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm
from torch import nn

from mmlinattn.checkpoints.fit import compare
from mmlinattn.layers import PositionTable
from mmlinattn.utils import private_apis

DEIT, NEXT = 'LinearDeiT', 'LinearNextViT'
every_backbone = pytest.mark.parametrize('backbone', ARCHS)


@every_backbone
def test_bfloat16_autocast_is_left_on_cpus_without_units_for_it(backbone, monkeypatch):
    """Avoid PyTorch's depth-wise convolutions in bfloat16, which are a hundred times slower there."""
    monkeypatch.setattr(private_apis, 'has_bfloat16_units', lambda: False)
    model, x = build(backbone).eval(), image().bfloat16()
    exact = model(x.float())
    with torch.autocast('cpu', torch.bfloat16):
        assert all(map(torch.equal, model(x), exact))
        half = model.bfloat16()(x)
    assert {out.dtype for out in half} == {torch.bfloat16}


@every_backbone
@settings(deadline=None, derandomize=True, max_examples=6)
@given(st.data(), st.booleans(), st.sampled_from([1, 3, 4]))
def test_outputs_that_are_asked_for(backbone, data, out_norm, channels):
    """Build only the stages that ``out_indices`` needs; DDP stops at a parameter without a gradient."""
    count = 2 if backbone == DEIT else 4
    out_indices = tuple(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
    options = dict(stage_attns=mixes(backbone)[-1], out_norm=out_norm, in_channels=channels)
    model, x = build(backbone, out_indices=out_indices, **options), image(channels=channels)
    assert len(model.blocks if backbone == DEIT else model.stages) == out_indices[-1] + 1
    asked, outs = model.eval()(x), model.train()(x)
    assert [info['stage'] for info in model.feature_info] == list(out_indices)
    for out, info in zip(outs, model.feature_info, strict=True):
        assert info['stride'] == (16 if backbone == DEIT else 4 * 2 ** info['stage'])
        assert out.shape == (2, info['channels'], 64 // info['stride'], 96 // info['stride'])
    loss(outs).backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if backbone == NEXT and out_norm and len(out_indices) == 1:
        return  # a classifier's stages go without norms
    whole = build(backbone, out_indices=tuple(range(count)), **options).eval()(x)
    for i, out in zip(out_indices, asked):
        torch.testing.assert_close(out, whole[i], rtol=1e-4, atol=1e-5)


def is_frozen(name, frozen_stages):
    part, _, rest = name.partition('.')
    if part in ('cls_token', 'position_table', 'out_norm'):
        return frozen_stages >= 0 and part != 'out_norm'
    least = 1 if part in ('patch_embeds', 'position_tables') and frozen_stages >= 0 else frozen_stages
    return int(rest.partition('.')[0]) < max(frozen_stages, least)


@pytest.mark.parametrize(('backbone', 'table'), [*((backbone, True) for backbone in ARCHS), (DEIT, False)])
def test_frozen_stages(backbone, table):
    """Freeze the stem by 0, by i also stages (or blocks) 1..i with their patch embeddings and output norms."""
    arch = ARCHS[backbone] if table else dict(ARCHS[backbone], absolute_position=False)
    for frozen in range(-1, 3 if backbone == DEIT else 5):
        model = build(backbone, arch=arch, stage_attns=mixes(backbone)[-1], frozen_stages=frozen, drop_path_rate=0.0)
        for _ in range(2):  # optimizers are built before the first call of train(); frozen parts stay so afterwards
            for name, parameter in model.named_parameters():
                assert parameter.requires_grad != is_frozen(name, frozen), name
            model.train().eval().train()
        for name, module in model.named_modules():
            if not list(module.children()):
                assert module.training != is_frozen(name, frozen), name
        before = copy.deepcopy(model.state_dict())
        outs = model(image())
        if backbone != DEIT:  # frozen parts carry no graph
            assert [out.requires_grad for out in outs] == [i >= frozen for i in range(4)]
        if frozen < 4:
            loss(outs).backward()
            torch.optim.AdamW(model.parameters(), lr=0.1).step()
        for name, value in model.state_dict().items():
            if is_frozen(name, frozen):
                assert torch.equal(value, before[name]), name
            elif name.endswith('running_mean'):
                assert not torch.equal(value, before[name]), name
        assert all((p.grad is None) == is_frozen(name, frozen) for name, p in model.named_parameters())


@pytest.mark.parametrize('norm_eval', [False, True])
@pytest.mark.parametrize('backbone', ['RAVLT', NEXT])
def test_norm_eval_is_of_every_kind_of_batch_norm(backbone, norm_eval):
    """Keep 2-D and 1-D batch norms in eval mode, and MMCV's ``MMSyncBN``, which is no subclass of PyTorch's."""

    class SyncBatchNorm(nn.Module):
        pass

    model = build(backbone, 'rala', arch=dict(ARCHS[backbone], ffn=dict(type='compact')), norm_eval=norm_eval)
    model.norm = SyncBatchNorm()
    norms = [m for m in model.modules() if isinstance(m, (_BatchNorm, SyncBatchNorm))]
    assert {type(norm) for norm in norms} == {SyncBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d}
    model.eval().train()
    assert all(norm.training != norm_eval for norm in norms)
    assert all(block.training for block in blocks_of(model)) and all(p.requires_grad for p in model.parameters())
    before = {name: value.clone() for name, value in model.named_buffers() if name.endswith('running_mean')}
    model(image())
    assert all(torch.equal(model.get_buffer(name), value) == norm_eval for name, value in before.items())
    assert not any(norm.training for norm in norms if not model.eval().training)


@every_backbone
def test_stochastic_depth_grows_linearly_and_acts_in_training_only(backbone):
    """Compute the rates over all blocks of the arch, including those that are not built."""
    depth = sum(ARCHS[backbone]['depths'])
    for rate, options in ((0.4, {}), (0.4, dict(out_indices=(0,))), (0.0, {})):
        model, x = build(backbone, 'rala', drop_path_rate=rate, norm_eval=True, **options), image(8)
        rates = [
            max((m.drop_prob for m in b.modules() if isinstance(m, DropPath)), default=0) for b in blocks_of(model)
        ]
        assert rates == pytest.approx([rate * i / (depth - 1) for i in range(len(rates))])
        assert torch.equal(model.eval()(x)[-1], model(x)[-1])
        assert torch.allclose(model.train()(x)[-1], model(x)[-1]) == (max(rates) == 0)
    kind = MODELS.get(backbone)
    with torch.device('meta'):
        published = kind(next(iter(kind.arch_zoo)), out_indices=(0,))
    assert published.drop_paths[0][0] == 0
    assert published.drop_paths[-1][-1] == pytest.approx(published.arch['drop_path_rate']) != 0


@every_backbone
def test_init_weights_starts_as_documented(backbone):
    """Expect a truncated normal of deviation 0.02, zero biases, and unit norm weights."""
    arch = dict(ARCHS[backbone], embed_dims=(64,) if backbone == DEIT else (32, 64, 96, 128))
    model = MODELS.build(small_backbones.config(backbone, arch=arch, stage_attns=mixes(backbone)[-1]))
    model.init_weights()
    drawn = {name: p for name, p in model.named_parameters() if name.endswith(('relative_bias.table', 'cls_token'))}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, PositionTable)) or (backbone == NEXT and isinstance(module, nn.Conv2d)):
            drawn[name] = module.weight
            assert getattr(module, 'bias', None) is None or not module.bias.any(), name
        elif isinstance(module, (nn.LayerNorm, _BatchNorm)):
            assert (module.weight == 1).all() and not module.bias.any(), name
    for name, weight in drawn.items():
        if weight.numel() > 100:
            assert weight.detach().std() == pytest.approx(0.02, rel=0.3) and weight.abs().max() < 0.15, name


@every_backbone
@pytest.mark.parametrize('options', [{}, dict(out_indices=(0,)), dict(out_norm=False)], ids=str)
def test_keys_of_parts_that_are_not_built_are_ignored(backbone, options):
    """Report parts outside of the architecture and names that only look alike."""
    shared = dict(arch=dict(ARCHS[backbone], depths=(12,) if backbone == DEIT else (1,) * 4))
    shared.update(dict(stage_norms=True) if backbone == NEXT else {})
    count = dict(out_indices=-1) if backbone == DEIT else {}
    whole, part = (build(backbone, 'inline', **{**count, **shared, **given}) for given in ({}, options))
    names = 'stages', 'blocks', 'patch_embeds', 'position_tables', 'out_norms'
    odd = {key for name in names for key in (name, f'{name}.x.weight', f'{name}_extra.1.w', f'my_{name}.1.w')}
    odd |= {f'{name}.{number}.w' for name in names for number in ((12, 13) if name == 'blocks' else (4, 12))}
    odd.add('odd.weight')
    if 'out_norm' not in options:
        odd.add('out_norm.odd' if backbone == DEIT else 'out_norms.0.odd')
    fit = compare(part, {**whole.state_dict(), **{key: torch.ones(1) for key in odd}})
    assert not fit.missing and not fit.mismatched and set(fit.unexpected) == odd
    assert set(fit.weights) == set(part.state_dict())
    left_out = set(whole.state_dict()) - set(part.state_dict())
    assert set(fit.ignored) == left_out and bool(left_out) == bool(options)


@pytest.mark.parametrize('others', [[], [dict(type='Constant', layer='Linear', val=3.0)]])
def test_weights_may_come_from_several_files_and_the_rest_starts_as_without_one(tmp_path, others):
    """Let a second ``init_weights`` change nothing."""
    source, given = build('RAVLT').state_dict(), [*others]
    for part in ('patch_embeds', 'out_norms'):
        path = tmp_path / f'{part}.pth'
        torch.save({key: value for key, value in source.items() if key.startswith(part)}, path)
        given.append(dict(type='Pretrained', checkpoint=str(path)))
    model = build('RAVLT', init_cfg=given)
    model.init_weights()
    assert model.init_cfg == given
    for name, value in model.state_dict().items():
        assert torch.equal(value, source[name]) or name.startswith('stages'), name
    linear, norm = model.stages[0][0].ffn.fc1, model.stages[0][0].norm1
    drawn = (linear.weight == 3).all() if others else linear.weight.detach().std() == pytest.approx(0.02, rel=0.5)
    assert drawn and not linear.bias.any()
    assert others or ((norm.weight == 1).all() and not norm.bias.any())
    nn.init.ones_(norm.bias)
    model.init_weights()
    assert norm.bias.all()
