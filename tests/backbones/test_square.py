# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every attention in every host: what the house promises of all pairs."""

import pytest
import small_hosts
import torch
from mmengine.registry import MODELS
from small_hosts import EVERY_ATTN, image, loss

from mmlinattn.backbones import RAVLT

HOSTS = (*small_hosts.ARCHS, 'RAVLT')
# what test_hosts_properties.py asks of the others
NEW = tuple(name for name in EVERY_ATTN if name not in small_hosts.ATTNS)
every_pair = [pytest.param(host, attn, id=f'{host}-{attn}') for host in HOSTS for attn in EVERY_ATTN]
# all of them in two models a host, hallucinated attention in two blocks of a stage for shifted windows
MIXED = (
    ('hydra', 'angular', ['hallucinated', 'hallucinated'], 'enhanced'),
    ('hallucinated', 'efficient', ['enhanced', 'hydra'], 'angular'),
)
PLAIN = ((['hallucinated', 'angular'],), (['hydra', 'efficient'],))
mixed = pytest.mark.parametrize(
    ('host', 'stage_attns'),
    [
        pytest.param(host, attns, id=f'{host}-{i}')
        for host in HOSTS
        for i, attns in enumerate(PLAIN if host == 'LinearDeiT' else MIXED)
    ],
)


def build(host, attn=None, **options):
    if host != 'RAVLT':
        return small_hosts.build(host, attn, **options)
    arch = dict(small_hosts.ARCHS['LinearPVT'], embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4))
    del arch['grids']
    return small_hosts.goldens.fill(RAVLT(arch, **{'stage_attns': (attn,) * 4, **options}))


@pytest.mark.parametrize(('host', 'attn'), every_pair)
def test_every_attention_in_every_host(host, attn):
    """Forward and backward at an odd size; every parameter takes part; an item alone is as in a batch."""
    model = build(host, attn).double().train()
    x = image(2, 53, 75).double()
    outs = model(x)
    loss([out.double() for out in outs]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    model.eval()
    with torch.no_grad():
        for out, alone in zip(model(x), model(x[1:])):
            assert out.isfinite().all()
            torch.testing.assert_close(out[1:], alone)


@pytest.mark.slow
@mixed
def test_sizes_precision_and_graphs(host, stage_attns):
    model = build(host, stage_attns=stage_attns)
    for size in ((32, 32), (32, 250), (129, 65)):
        outs = model.train()(image(2, *size))
        loss(outs).backward()
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast('cpu', dtype):
            outs = model.train()(image(2, 64, 80))
        assert all(out.isfinite().all() for out in outs)
        loss(outs).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    x = image(1, 75, 101)
    with torch.no_grad():
        expected = model(x)
        graphs = [torch.export.export(model, (x,)).module(), torch.jit.trace(model, x, check_trace=False)]
        if stage_attns in (MIXED[0], *PLAIN):  # slow, and the same for all
            torch._dynamo.reset()
            graphs.append(torch.compile(model, fullgraph=True, backend='eager'))
        for graph in graphs:
            for out, other in zip(graph(x), expected):
                torch.testing.assert_close(out, other, rtol=1e-4, atol=1e-4)


@mixed
def test_with_cp_gives_the_same_gradients(host, stage_attns):
    options = dict(stage_attns=stage_attns, drop_path_rate=0.3)
    plain, saving = (build(host, with_cp=cp, **options).train() for cp in (False, True))
    x = image()
    for model in (plain, saving):
        torch.manual_seed(3)
        loss(model(x)).backward()
    for (name, mine), (_, other) in zip(plain.named_parameters(), saving.named_parameters()):
        torch.testing.assert_close(mine.grad, other.grad, msg=name)


@pytest.mark.parametrize('attn', NEW)
@pytest.mark.parametrize('host', ['LinearSwin', 'LinearCSWin'])
def test_what_compilers_pad_has_no_influence(host, attn, monkeypatch):
    """Windows that are cut in eager mode are padded and masked in graphs."""
    model, x = build(host, attn).double().eval(), image(2, 100, 72).double()
    expected = model(x)
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)
    for out, other in zip(model(x), expected):
        torch.testing.assert_close(out, other)


PUBLISHED = [
    ('LinearDeiT', 'hmhsa-tiny'),
    ('LinearDeiT', 'angular-tiny'),
    ('LinearSwin', 'hydra-tiny'),
    ('LinearSwin', 'enhanced-tiny'),
    ('LinearPVTv2', 'hmhsa-b1'),
]


@pytest.mark.slow
@pytest.mark.parametrize(('host', 'arch'), PUBLISHED, ids=str)
def test_autocast_is_finite_at_the_size_of_a_detector(host, arch):
    """Thinner than the published models, with as many tokens."""
    spec = dict(MODELS.get(host).arch_zoo[arch])
    heads = tuple(max(n // 3, 1) for n in spec['num_heads'])
    spec.update(embed_dims=tuple(8 * n for n in heads), num_heads=heads, depths=(1,) * len(heads))
    spec['stage_attns'] = tuple(a[0] if isinstance(a, list) else a for a in spec['stage_attns'])
    options = dict(out_type='featmap') if host == 'LinearDeiT' else {}
    model = MODELS.build(dict(type=host, arch=spec, with_cp=True, **options)).train()
    with torch.autocast('cpu', torch.bfloat16):
        outs = model(torch.randn(1, 3, 800, 1333))
    assert all(out.isfinite().all() for out in outs)
    loss(outs).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_attentions_that_read_a_sequence_do_not_go_into_windows():
    with pytest.raises(ValueError, match='goes over the sequence of all tokens'):
        small_hosts.build('LinearSwin', dict(type='angular', conv='sequence'))


def test_heads_that_cannot_be_halved():
    arch = dict(small_hosts.ARCHS['LinearPVT'], embed_dims=(8, 16, 24, 36), num_heads=(1, 2, 3, 4))
    with pytest.raises(ValueError, match='num_heads=4: hallucinated attention halves the width of a head, 9'):
        small_hosts.build('LinearPVT', 'hallucinated', arch=arch)
