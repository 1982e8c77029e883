# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""A graph gives the model's numbers at sizes it was not made at."""

import warnings

import pytest
import torch
from helpers import graphs, small_backbones
from helpers.graphs import BACKBONES, TRACED_AT
from helpers.references import ATTENTIONS
from mmengine.registry import MODELS, init_default_scope
from torch._dynamo.testing import CompileCounter
from torch.export import Dim

from mmlinattn import ops
from mmlinattn.attention import Attention
from mmlinattn.tooling.export import FORMATS, ExportableModel
from mmlinattn.tooling.export.models import deviation

# Exporters take seconds for a graph: two stages of a backbone.
HALVES = dict(
    RAVLT=('rala', 'softmax'),
    LinearSwin=('focused', 'softmax'),
    LinearCSWin=('inline', 'softmax'),
    LinearDeiT=('focused',),
    LinearPVTv2=('efficient', 'enhanced'),
    LinearNextViT=('hydra', 'hallucinated'),
)
SLOW_FILES = [('torch-export', backbone) for backbone in HALVES]
SLOW_FILES += [('onnx', 'LinearSwin'), ('onnx', 'LinearNextViT'), ('openvino', 'LinearSwin')]


def trace(model, image):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('ignore', torch.jit.TracerWarning)
        return torch.jit.trace(model, image, check_trace=False)


# --- the old exporter, used by MMDeploy: it traces --------------------------------------------------------------------


def check_onnx(model, file):
    pytest.importorskip('onnxruntime')
    axes = dict(image={0: 'batch', 2: 'height', 3: 'width'})
    model.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        options = dict(input_names=['image'], dynamic_axes=axes, opset_version=17)
        torch.onnx.export(model, (graphs.image((1, 64, 96)),), file, dynamo=False, **options)
    graphs.check(FORMATS['onnx'].load(file), model)


@pytest.mark.parametrize(('backbone', 'attns'), [mix for mix in small_backbones.every_mix() if not mix.marks])
def test_graphs_of_a_tracer(backbone, attns, tmp_path):
    check_onnx(small_backbones.build(backbone, stage_attns=attns), tmp_path / 'model.onnx')


FPN_HEAD = dict(type='FPNHead', feature_strides=[4, 8, 16, 32])
UPER_HEAD = dict(type='UPerHead', pool_scales=(1, 2, 3, 6))


@pytest.mark.parametrize(
    ('backbone', 'head'), [('RAVLT', FPN_HEAD), pytest.param('LinearSwin', UPER_HEAD, marks=pytest.mark.slow)]
)
def test_segmentors_of_a_tracer(backbone, head, tmp_path):
    """Trace upsampling and pooling of MMSegmentation's heads with dynamic shapes, as :class:`ExportableModel` replaces
    them."""
    pytest.importorskip('mmseg')
    init_default_scope('mmseg')
    loss = dict(type='CrossEntropyLoss')
    head = dict(head, in_channels=[16] * 4, in_index=[0, 1, 2, 3], channels=16, num_classes=3, loss_decode=loss)
    neck = dict(type='FPN', in_channels=[8, 16, 24, 32], out_channels=16, num_outs=4)
    config = small_backbones.config(backbone, drop_path_rate=0.0)
    model = MODELS.build(dict(type='EncoderDecoder', backbone=config, neck=neck, decode_head=head))
    check_onnx(ExportableModel(model), tmp_path / 'model.onnx')


@pytest.mark.parametrize('attns', graphs.one_per_stage(), ids=str)
def test_a_trace_under_autocast_runs_outside_of_it(attns):
    model, image = graphs.build('LinearPVT', attns), graphs.image((1, 70, 96))
    # CPUs without instructions for bfloat16 compute in float32 otherwise
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16, cache_enabled=False), ops.use('reference'):
        expected, graph = model(image), trace(model, image)
    for out, other in zip(graph(image), expected):
        assert (out - other).norm() < 0.03 * other.norm()


@pytest.mark.parametrize(
    ('backbone', 'attns'),
    [('LinearPVT', ('inline',)), ('LinearDeiT', ('hallucinated',)), ('LinearCSWin', ('hallucinated',))],
)
def test_a_trace_in_float64_holds_nothing_of_the_default_dtype(backbone, attns):
    model, image = graphs.build(backbone, attns).double(), graphs.image((2, 70, 96)).double()
    torch.set_default_dtype(torch.bfloat16)
    try:
        graph = trace(model, image[:1, :, :64])
        outputs = graph(image)
    finally:
        torch.set_default_dtype(torch.float32)
    assert deviation(outputs, model(image)) < 1e-12


@pytest.mark.parametrize('backbone', HALVES)
def test_a_trace_runs_on_another_device(backbone):
    model = graphs.build(backbone, HALVES[backbone])
    graph = trace(model, graphs.image((1, 64, 96)))
    graphs.check(graph, model, graphs.SHAPES[:1])
    image = graphs.image(graphs.SHAPES[1])
    shapes = [out.shape for out in graph(image)]
    outputs = graph.to('meta')(image.to('meta'))
    assert [out.shape for out in outputs if out.is_meta] == shapes
    assert 'Device = prim::Constant' not in str(graph.inlined_graph)


SEQUENTIAL = [spec for spec in ATTENTIONS.values() if Attention(16, 2, spec).mixer.sequential]


@pytest.mark.parametrize('spec', SEQUENTIAL, ids=str)
def test_a_trace_of_attentions_over_the_token_sequence(spec, tmp_path):
    check_onnx(graphs.build('LinearDeiT', [spec]), tmp_path / 'model.onnx')


@pytest.mark.parametrize('backbone', ['LinearSwin', 'LinearCSWin'])
def test_a_trace_of_maps_smaller_than_a_window(backbone):
    model = graphs.build(backbone, ('inline', 'softmax', 'focused', 'focused'))
    graphs.check(trace(model, graphs.image((2, 32, 32))), model, [(1, 32, 32), *graphs.SHAPES[:2]])


# --- other graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('form', 'backbone'),
    [('openvino', 'LinearPVTv2'), *(pytest.param(*file, marks=pytest.mark.slow) for file in SLOW_FILES)],
)
@torch.no_grad()
def test_files(tmp_path, form, backbone):
    for package in FORMATS[form].needs:
        pytest.importorskip(package)
    attns, path = HALVES[backbone], tmp_path / 'graph.xml'
    model = graphs.build(backbone, attns)
    outputs = [f'feat{i}' for i in range(len(attns))]
    FORMATS[form].write(model, graphs.image(TRACED_AT), path, 32, dict(outputs=outputs))
    graph = FORMATS[form].load(path)
    graphs.check(graph, model)
    for shape in ((1, 3, 24, 64), (1, 4, 64, 64)):
        if form == 'onnx' and shape[2] < 32:
            continue  # an ONNX graph has no smallest size
        with pytest.raises(Exception, match=r'(?i)shape|size|guard|dimension|expected'):
            graph(torch.randn(shape))


@pytest.mark.skipif(not hasattr(Dim, 'AUTO'), reason='since torch 2.6')
def test_torch_export_finds_dynamic_shapes_by_itself_and_keeps_gradients():
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
@pytest.mark.skipif(not hasattr(Dim, 'AUTO'), reason='since torch 2.6')
def test_torch_onnx_export_with_gradients(tmp_path):
    """Call PyTorch's exporter outside of ``torch.no_grad``: it decomposes attention with a learned bias in another grad
    mode than it records it."""
    pytest.importorskip('onnxruntime')
    pytest.importorskip('onnxscript')
    model, image = graphs.build('LinearSwin', ('inline', 'softmax')), graphs.image((1, 64, 96))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        torch.onnx.export(model, (image,), tmp_path / 'model.onnx', dynamo=True, input_names=['image'])
    assert deviation(FORMATS['onnx'].load(tmp_path / 'model.onnx')(image), model(image)) < graphs.TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize('backbone', ['RAVLT', 'LinearSwin'])
def test_torch_compile_makes_one_graph_for_many_sizes(backbone):
    """Use several windows and pixels along each axis: PyTorch specialises a size of 1."""
    torch._dynamo.reset()
    model, counter = graphs.build(backbone, HALVES[backbone]), CompileCounter()
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=counter)
    graphs.check(compiled, model, [(2, 150, 213), (3, 224, 320), (2, 353, 481)])
    assert counter.frame_count == 1


@pytest.mark.parametrize('backbone', BACKBONES)
def test_torch_jit_script_raises(backbone):
    with pytest.raises(NotImplementedError, match=f'does not take {backbone}; torch.jit.trace and torch.export do'):
        torch.jit.script(graphs.build(backbone, 'inline'))
