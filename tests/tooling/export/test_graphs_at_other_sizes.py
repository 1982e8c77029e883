# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""A graph gives the model's numbers at sizes it was not made at."""

import warnings

import graphs
import pytest
import torch
from graphs import ATTNS, HOSTS, TRACED_AT
from torch._dynamo.testing import CompileCounter
from torch.export import Dim

from mmlinattn.ops.windows import OpenWindows, Windows
from mmlinattn.tooling.export import FORMATS

MIXES = [ATTNS[i:] + ATTNS[:i] for i in range(4)]  # each of these in every stage
MIXES += [('hallucinated', 'efficient', 'hydra', 'enhanced'), ('angular', 'enhanced', 'hallucinated', 'efficient')]

# Exporters take seconds for a graph: two stages of a host. At once one host for each way to arrange tokens: whole maps,
# windows, stripes, a class token.
HALVES = [
    ('RAVLT', ('rala', 'softmax')),
    ('LinearSwin', ('focused', 'softmax')),
    ('LinearCSWin', ('inline', 'softmax')),
    ('LinearDeiT', ('focused',)),
]
MORE_HALVES = [
    ('LinearPVT', ('focused', 'softmax')),
    ('LinearPVTv2', ('angular', 'enhanced')),
    ('LinearNextViT', ('hydra', 'hallucinated')),
]


def halves(form, some, *marks):
    return [pytest.param(form, *half, id='-'.join((form, half[0], *half[1])), marks=marks) for half in some]


def trace(model, shape):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('ignore', torch.jit.TracerWarning)
        return torch.jit.trace(model, graphs.image(shape), check_trace=False)


def mixes():
    """All hosts with two mixes, one of a host at once."""
    for i, host in enumerate(HOSTS):
        for j, attns in enumerate(MIXES):
            if j in (i % len(MIXES), (i + 4) % len(MIXES)):
                marks = [] if j == i % len(MIXES) else pytest.mark.slow
                yield pytest.param(host, attns, id=f'{host}-{"-".join(attns)}', marks=marks)


@pytest.mark.parametrize(('host', 'attns'), list(mixes()))
def test_torch_jit_trace(host, attns):
    """Traced at a size of maps smaller than windows, or of such that are larger."""
    model = graphs.build(host, attns)
    traced_at = [TRACED_AT, (1, 353, 481)][MIXES.index(attns) % 2]
    graphs.check(trace(model, traced_at), model)


@pytest.mark.parametrize('attns', MIXES[:1] + MIXES[4:], ids='-'.join)
def test_a_trace_under_autocast_runs_outside_of_it(attns):
    model, image = graphs.build('LinearPVT', attns), graphs.image((1, 70, 96))
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16, cache_enabled=False):
        expected = model(image)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', torch.jit.TracerWarning)
            graph = torch.jit.trace(model, image, check_trace=False)
    for out, other in zip(graph(image), expected):
        assert (out - other).norm() < 0.03 * other.norm()


@pytest.mark.parametrize('host', ['LinearSwin', 'LinearCSWin'])
def test_torch_jit_trace_of_one_pixel_maps(host):
    model = graphs.build(host, MIXES[0])
    graphs.check(trace(model, (2, 32, 32)), model, graphs.SHAPES[:2])


@pytest.mark.parametrize(
    ('form', 'host', 'attns'),
    [
        *halves('torch-export', HALVES + MORE_HALVES[1:], pytest.mark.slow),
        *halves('onnx', HALVES[1:2] + MORE_HALVES[2:], pytest.mark.slow),
        *halves('openvino', MORE_HALVES[1:2]),
        *halves('openvino', HALVES[1:2], pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_files(tmp_path, form, host, attns):
    for package in FORMATS[form].needs:
        pytest.importorskip(package)
    model, path = graphs.build(host, attns), tmp_path / 'graph.xml'
    outputs = [f'feat{i}' for i in range(len(attns))]
    FORMATS[form].write(model, graphs.image(TRACED_AT), path, 32, dict(outputs=outputs))
    graph = FORMATS[form].load(path)
    graphs.check(graph, model)
    for shape in ((1, 3, 24, 64), (1, 4, 64, 64))[form == 'onnx' :]:
        with pytest.raises(Exception, match=r'(?i)shape|size|guard|dimension|expected'):
            graph(torch.randn(shape))


@pytest.mark.skipif(not hasattr(Dim, 'AUTO'), reason='since torch 2.6')
def test_torch_export_finds_the_open_sizes_by_itself_and_keeps_gradients():
    model = graphs.build('LinearPVT', ('inline',))
    sizes = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)
    graph = torch.export.export(model, (graphs.image(TRACED_AT),), dynamic_shapes=sizes).module()
    graphs.check(graph, model)
    x = graphs.image((1, 70, 90)).requires_grad_()
    sum(out.square().mean() for out in graph(x)).backward()
    gradient, x.grad = x.grad, None
    sum(out.square().mean() for out in model(x)).backward()
    torch.testing.assert_close(gradient, x.grad, rtol=1e-3, atol=1e-4 * x.grad.abs().max().item())


@pytest.mark.slow
def test_torch_export_between_two_sizes_with_a_fixed_batch():
    model = graphs.build('LinearCSWin', ('focused', 'softmax', 'rala', 'softmax'))
    sizes = {2: Dim('height', min=64, max=2048), 3: Dim('width', min=64, max=2048)}
    with torch.no_grad():
        program = torch.export.export(model, (graphs.image((2, 256, 320)),), dynamic_shapes=(sizes,))
    graphs.check(program.module(), model, [(2, 131, 197), (2, 64, 350)])


@pytest.mark.slow
@pytest.mark.parametrize(('host', 'attns'), HALVES[:2], ids=str)
def test_torch_compile_makes_one_graph_for_many_sizes(host, attns):
    """Of maps of more than one window and one pixel: of those of one, PyTorch makes graphs of their own."""
    torch._dynamo.reset()
    model, counter = graphs.build(host, attns), CompileCounter()
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=counter)
    graphs.check(compiled, model, [(2, 150, 213), (3, 224, 320), (2, 353, 481)])
    assert counter.frame_count == 1


@pytest.mark.parametrize('host', HOSTS)
def test_torch_jit_script_is_refused(host):
    with pytest.raises(NotImplementedError, match=f'does not take {host}; torch.jit.trace and torch.export do'):
        torch.jit.script(graphs.build(host, 'inline'))


@pytest.mark.parametrize('size', [(1, 1), (3, 5), (7, 7), (8, 7), (14, 13), (20, 30)], ids=str)
@pytest.mark.parametrize('shift', [False, True])
@pytest.mark.parametrize('window', [(7, 7), (None, 4), (4, None), (5, 3)], ids=str)
def test_open_windows_hold_what_those_of_known_size_hold(window, size, shift):
    """The same neighbours see each other: what is not padding, in the windows, regions and places of the map."""
    x = torch.arange(size[0] * size[1]).reshape(1, *size, 1) + 1
    within = OpenWindows(*size, window, shift).grid(x).within  # what a window has of a map that is smaller
    assert tuple(map(int, within)) == tuple(min(n, side or n) for n, side in zip(size, window))
    sees = []
    for windows in (Windows.fit(*size, window, shift), OpenWindows(*size, window, shift)):
        tokens, real, regions = windows.partition(x)[..., 0], windows.real(x), windows.regions_of_tokens(x)
        torch.testing.assert_close(windows.merge(windows.partition(x)), x)
        assert regions is None or (int(regions.min()) >= 0 and int(regions.max()) < 4)
        matrix = torch.zeros(x.numel() + 1, x.numel() + 1, dtype=torch.bool)
        for i, row in enumerate(tokens):
            alike = (
                torch.ones(len(row), len(row), dtype=torch.bool)
                if regions is None
                else regions[i][:, None] == regions[i]
            )
            kept = torch.ones_like(row, dtype=torch.bool) if real is None else real[i]
            a, b = (alike & kept[:, None] & kept).nonzero().T
            matrix[row[a], row[b]] = True
        sees.append(matrix)
    assert torch.equal(*sees)
