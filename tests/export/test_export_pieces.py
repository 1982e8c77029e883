# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What export decides beside the graph itself: sizes, types, what a file says of itself. Toys in place of models."""

import json
import types
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from torch import nn

import mmlinattn
from mmlinattn.export import FORMATS, ExportableModel, Sizes, export_model, formats, models
from mmlinattn.utils.errors import RunError


def test_sizes_to_check_at():
    assert Sizes(2, 64, 80).others() == [] and Sizes(2, 64, 80).shape == (2, 3, 64, 80)
    assert Sizes(2, 64, 80).describe() == 'image (2, 3, 64, 80), no other size'
    open_sizes = Sizes(2, 64, 80, dynamic=True)
    (one, *larger), (more, *smaller) = open_sizes.others()
    assert one == 1 and larger[0] == smaller[0] == 3 and larger[1] > 64 and larger[2] > 80
    assert more == 3 and 32 < smaller[1] < 64 and 32 < smaller[2] < 80
    assert any(side % 16 for side in larger[1:]) and any(side % 16 for side in smaller[1:])  # no whole windows
    assert open_sizes.describe() == 'image (batch, 3, height, width), batch >= 1, height and width >= 32'
    pyramid = Sizes(1, 65, 65, dynamic=True, smallest=65)
    assert pyramid.others()[1] == (2, 3, 66, 66) and '>= 65' in pyramid.describe()


@pytest.mark.parametrize(
    ('cfg', 'shape'),
    [
        (dict(default_scope='mmpretrain', test_pipeline=[dict(type='CenterCrop', crop_size=384)]), (384, 384)),
        (
            dict(
                default_scope='mmpretrain',
                test_pipeline=[
                    dict(type='CenterCrop', crop_size=512),
                    dict(type='mmpretrain.CenterCrop', crop_size=(96, 128)),  # what is left in the end
                    dict(type='Resize', crop_size=7),
                    dict(type='P'),
                ],
            ),
            (96, 128),
        ),
        (dict(default_scope='mmpretrain'), (224, 224)),
        (dict(default_scope='mmseg', crop_size=(512, 1024)), (512, 1024)),
        (dict(default_scope='mmseg'), (512, 512)),
        (dict(default_scope='mmdet', crop_size=(512, 1024)), (800, 1216)),
    ],
)
def test_default_shape_is_what_the_config_tests_at(cfg, shape):
    assert models.default_shape(Config(cfg)) == shape


def test_what_a_file_says_of_itself():
    given = dict(mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0), bgr_to_rgb=True, pad_size_divisor=32)
    cfg = Config(dict(model=dict(data_preprocessor=given), data_preprocessor=dict(mean=[9.0])))
    meta = dict(dataset_meta=dict(classes=('a', 'b')))
    found = models.metadata(cfg, 'detector', Sizes(1, 64, 80), meta, ['feat0', 'feat1'], 'float16')
    assert found == dict(
        mmlinattn=mmlinattn.__version__,
        task='detector',
        serves='image (1, 3, 64, 80), no other size',
        dtype='float16',
        outputs=['feat0', 'feat1'],
        input_range=[0, 255],
        channel_order='RGB',
        mean=[1.0, 2.0, 3.0],
        std=[4.0, 5.0, 6.0],
        pad_size_divisor=32,
        classes=['a', 'b'],
    )
    assert type(found['mean']) is list and json.loads(json.dumps(found)) == found
    beside = Config(dict(model={}, data_preprocessor=dict(to_rgb=True, mean=[9.0, 8.0, 7.0])))
    found = models.metadata(beside, 'classifier', Sizes(1, 64, 80), None, ['logits'], 'float32')
    assert (found['channel_order'], found['mean'], found['std']) == ('RGB', [9.0, 8.0, 7.0], [1.0, 1.0, 1.0])
    assert found['pad_size_divisor'] == 1 and found['classes'] is None
    # what a segmentor pads to at test time is what an application has to; size_divisor is that of training
    padded = Config(dict(model=dict(data_preprocessor=dict(size_divisor=512, test_cfg=dict(size_divisor=32)))))
    found = models.metadata(padded, 'segmentor', Sizes(1, 64, 80), None, ['logits'], 'float32')
    assert found['pad_size_divisor'] == 32
    bare = models.metadata(Config(dict(model={})), 'classifier', Sizes(1, 64, 80), None, ['logits'], 'float32')
    assert (bare['channel_order'], bare['mean']) == ('BGR', [0.0, 0.0, 0.0])


# ------------------------------------------------------------------------------- what is exported


class Backbone(nn.Module):
    deployed = 0

    def __init__(self):
        super().__init__()
        self.conv, self.drop, self.pool = nn.Conv2d(3, 2, 4, 4), nn.Dropout(0.9), nn.AdaptiveAvgPool2d(2)

    def switch_to_deploy(self):
        self.deployed += 1

    def forward(self, x):
        return self.drop(self.conv(x))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.neck = Backbone(), nn.Conv2d(2, 2, 1)
        self.branches = nn.ModuleList([nn.AdaptiveAvgPool2d((2, 3))])

    def extract_feat(self, x):
        x = self.neck(self.backbone(x))
        return x, F.max_pool2d(x, 1, stride=2)

    def forward(self, x, mode):
        assert mode == 'tensor'
        return self.neck(self.backbone(x))


class Segmentor(Toy):
    def __init__(self, align_corners=False):
        super().__init__()
        self.decode_head = types.SimpleNamespace(align_corners=align_corners)

    def encode_decode(self):
        pass


class Classifier(Toy):
    with_head = True

    def __init__(self):
        super().__init__()
        self.head = nn.Identity()

    def forward(self, x, mode):
        return super().forward(x, mode).mean((2, 3))


def test_models_are_told_apart_and_made_ready():
    for model, task in ((Toy(), 'detector'), (Segmentor(), 'segmentor'), (Classifier(), 'classifier')):
        found = ExportableModel(model.train())
        assert found.task == task and found.dtype == torch.float32
        assert not model.training and model.backbone.deployed == 1
        assert not any(p.requires_grad for p in model.parameters())
        for pool in (model.backbone.pool, model.branches[0]):  # of heads too
            assert type(pool).__name__ == 'BinMeans'
    headless = Classifier()
    headless.with_head = False
    assert ExportableModel(headless).task == 'detector'
    with pytest.raises(RunError, match='^Sequential is no classifier, segmentor or detector with a backbone.$'):
        ExportableModel(nn.Sequential())


@pytest.mark.parametrize('align_corners', [False, True])
def test_segmentors_give_maps_of_the_images_size(align_corners):
    model = Segmentor(align_corners)
    image = torch.randn(2, 3, 33, 50)
    logits = ExportableModel(model)(image)
    expected = F.interpolate(model(image, 'tensor'), (33, 50), mode='bilinear', align_corners=align_corners)
    assert torch.equal(logits, expected)


def test_outputs_are_float32_whatever_is_computed_in():
    image = torch.randn(2, 3, 36, 64)
    for model in (Toy(), Segmentor(), Classifier()):
        exportable = ExportableModel(model)
        exact = exportable(image)
        exportable.cast(torch.bfloat16)
        assert exportable.dtype == model.backbone.conv.weight.dtype == torch.bfloat16
        rounded = exportable(image)
        if exportable.task == 'detector':
            assert type(rounded) is tuple and exportable.output_names(exact) == ['feat0', 'feat1']
            exact, rounded = exact[1], rounded[1]
            assert exact.shape == (2, 2, 5, 8)
        else:
            assert exportable.output_names(exact) == ['logits']
        assert rounded.dtype == torch.float32 and not torch.equal(rounded, exact)
        torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)


def fake(suffix='.x', **settings):
    """A format that pickles the model's outputs, of every size that it is asked for."""
    calls = []

    def write(model, example, path, smallest, metadata):
        calls.append((tuple(example.shape), smallest, metadata, model.dtype))
        path.write_bytes(b'0' * 2**20)
        path.with_suffix('.bin').write_bytes(b'1' * 2**19)
        write.model = model

    def load(path):
        assert path.stat().st_size == 2**20
        return write.model

    return formats.Format(write, load, None, suffix, **settings), calls


def written(tmp_path, model, sizes, dtype='float32', **settings):
    form, calls = fake(**settings)
    with mock.patch.dict(FORMATS, fake=form):
        found = export_model(model, Config(dict(model={})), tmp_path / 'graph.x', 'fake', sizes, None, dtype)
    return found, calls


def test_files_take_their_places_and_deviations_are_told(tmp_path):
    (tmp_path / 'graph.x').write_text('older')
    found, ((shape, smallest, meta, dtype),) = written(tmp_path, Toy(), Sizes(2, 64, 80))
    assert (shape, smallest, dtype) == ((2, 3, 64, 80), None, torch.float32)
    assert found.files == [tmp_path / 'graph.bin', tmp_path / 'graph.x'] and found.metadata == meta
    assert sorted(path.name for path in tmp_path.iterdir()) == ['graph.bin', 'graph.x']
    assert (tmp_path / 'graph.x').stat().st_size == 2**20
    assert found.errors == {(2, 3, 64, 80): (0.0, 0.0)}
    assert meta['outputs'] == ['feat0', 'feat1'] and meta['task'] == 'detector' and meta['dtype'] == 'float32'


def test_from_which_size_on_a_dynamic_graph_serves(tmp_path):
    """Classifiers from 32, others from where the format can."""
    for model, smallest in ((Toy(), 65), (Segmentor(), 65), (Classifier(), 32)):
        found, (call,) = written(tmp_path, model, Sizes(1, 96, 96, dynamic=True), smallest_of_pyramids=65)
        assert call[1] == smallest and f'height and width >= {smallest}' in found.metadata['serves']
        assert len(found.errors) == 3
    _, (call,) = written(tmp_path, Toy(), Sizes(1, 32, 32), smallest_of_pyramids=65)
    assert call[1] is None  # of a fixed size it is no matter
    for sizes, said in ((Sizes(1, 64, 96, True), '64 96: a side has 65'), (Sizes(1, 96, 31), '96 31: a side has 32')):
        with pytest.raises(RunError, match=f'^--shape {said} pixels at least.$'):
            written(tmp_path, Toy(), sizes, smallest_of_pyramids=65)


def test_half_types_are_recorded_or_left_to_the_writer(tmp_path):
    for dtype, casts, inside in (
        ('bfloat16', True, torch.bfloat16),
        ('bfloat16', False, torch.float32),
        ('float16', True, torch.float16),
        ('int8', True, torch.float32),
    ):
        found, (call,) = written(tmp_path, Classifier(), Sizes(1, 64, 64), dtype, casts=casts)
        assert call[3] == inside and found.metadata['dtype'] == dtype
        (error,) = found.errors.values()
        assert (error.largest > 0) is (inside != torch.float32)  # held against the model in float32
    with pytest.raises(RunError, match='^--dtype int8: not here; this format takes float32, float16, bfloat16.$'):
        written(tmp_path, Classifier(), Sizes(1, 64, 64), 'int8', refused=dict(int8='not here'))


@pytest.mark.parametrize('place', ['write', 'load'])
def test_what_a_format_cannot_express(tmp_path, place):
    form, _ = fake()

    def fails(*args):
        raise ValueError('no\n  such operator ' + 'x' * 500)

    with mock.patch.dict(FORMATS, fake=form._replace(**{place: fails})), pytest.raises(RunError) as error:
        export_model(Toy(), Config(dict(model={})), tmp_path / 'graph.x', 'fake', Sizes(1, 64, 64))
    said = str(error.value)
    assert said.startswith('fake cannot express this model: ValueError: no such operator xxx') and len(said) < 450
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('shape', [(1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize('value', [0.0, -4.0])
def test_outputs_that_are_all_alike_have_a_deviation(shape, value):
    """One logit of one image has no standard deviation; of zeros, the error itself is told."""
    expected = torch.full(shape, value)
    assert models.deviation(expected, expected) == (0, 0)
    assert models.deviation(expected + 0.5, expected) == pytest.approx((0.5 / (abs(value) or 1),) * 2)
    assert models.deviation(expected, expected + float('nan')) == (float('inf'),) * 2
    assert models.deviation([expected, torch.ones(2)], [expected, torch.tensor([1.0, 3.0])]).largest > 1


# ---------------------------------------------------------------------------------------- formats


def test_onnx_graphs_give_all_their_outputs(tmp_path, capfd):
    onnx = pytest.importorskip('onnx')
    pytest.importorskip('onnxruntime')
    helper, nodes = onnx.helper, dict(feat1='Neg', feat0='Abs', feat2='Relu')
    image, *outs = (helper.make_tensor_value_info(name, 1, [2]) for name in ('image', *nodes))
    graph = helper.make_graph(
        [helper.make_node(kind, ['image'], [name]) for name, kind in nodes.items()], 'g', [image], outs
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 18)], ir_version=9)
    onnx.save(model, str(tmp_path / 'a.onnx'))
    found = formats.load_onnx(tmp_path / 'a.onnx')(torch.tensor([1.0, -2.0]))
    assert [out.tolist() for out in found] == [[-1.0, 2.0], [1.0, 2.0], [1.0, 0.0]]  # in the order of the graph
    assert capfd.readouterr() == ('', '')  # runtimes are as quiet as exporters


class Means(nn.Module):
    """Two outputs of any size, cheap to record."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, image):
        means = image.mean((2, 3))
        return means * self.weight, means + 1


@pytest.mark.parametrize(
    'name', ['torch-export', 'torchscript', 'openvino', pytest.param('onnx', marks=pytest.mark.slow)]
)
@pytest.mark.parametrize('smallest', [None, 40])
@pytest.mark.filterwarnings('error')
@torch.no_grad()
def test_files_give_what_was_written(tmp_path, name, smallest):
    """Outputs in their order, at every size from the smallest on or at one; and what they say of themselves. Of what
    exporters and runtimes are about to give up nothing is heard."""
    form = FORMATS[name]
    for package in form.needs:
        pytest.importorskip(package)
    # a file of PyTorch may have any name
    path, model = tmp_path / ('graph.xml' if name == 'openvino' else 'graph'), Means().requires_grad_(False)
    meta = dict(outputs=['feat0', 'feat1'], dtype='float32', classes=['a', 'b'], mean=[1.5], pad=None)
    form.write(model, torch.randn(1, 3, 48, 64), path, smallest, meta)
    assert form.read_metadata(path) == meta
    run = form.load(path)
    shapes = [(1, 3, 48, 64)] * 2 + ([] if smallest is None else [(1, 3, 40, 100), (3, 3, 65, 41)])
    images = [torch.randn(shape) for shape in shapes]
    found = [run(image) for image in images]  # what one image gives stays when the next one comes
    for outs, image in zip(found, images):
        assert len(outs) == 2
        for out, truth in zip(outs, model(image)):
            torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)
    refused = [(2, 3, 48, 64), (1, 3, 64, 64)] if smallest is None else [(1, 4, 48, 64)]
    refused += [(1, 3, 39, 64), (1, 3, 64, 39)] if name != 'onnx' else []
    for shape in refused:
        with pytest.raises(Exception, match=r'(?i)shape|size|guard|dimension|expected'):
            run(torch.randn(shape))
    if name == 'openvino':
        import openvino

        graph = openvino.Core().read_model(str(path))
        assert [port.get_any_name() for port in (*graph.inputs, *graph.outputs)] == ['image', 'feat0', 'feat1']


def test_exporters_are_quiet_and_others_are_heard():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter('always')
        with formats.quiet():
            warnings.warn('of an exporter', stacklevel=1)
        warnings.warn('of somebody else', stacklevel=1)
        with pytest.raises(KeyError), formats.quiet():
            raise KeyError('of an exporter')
        warnings.warn('after an error', stacklevel=1)
    assert [str(warning.message) for warning in heard] == ['of somebody else', 'after an error']


def test_linear_layers_keep_to_seven_bits(tmp_path):
    """A scale a channel; a graph without linear layers is refused, and nothing but the target is left."""
    onnx = pytest.importorskip('onnx')
    pytest.importorskip('onnxruntime')
    weight = torch.tensor([[1.0, 100.0], [-2.0, 50.0], [0.5, -25.0]])

    def save(node, path):
        given, made = (onnx.helper.make_tensor_value_info(n, 1, [2, w]) for n, w in (('image', 3), ('logits', 2)))
        made = made if node == 'MatMul' else onnx.helper.make_tensor_value_info('logits', 1, [2, 3])
        inputs = ['image', 'w'] if node == 'MatMul' else ['image']
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node(node, inputs, ['logits'])],
            'g',
            [given],
            [made],
            [onnx.numpy_helper.from_array(weight.numpy(), 'w')] if node == 'MatMul' else [],
        )
        opset = onnx.helper.make_opsetid('', 18)
        onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9), str(path))

    source, target = tmp_path / 'float32.onnx', tmp_path / 'int8.onnx'
    save('MatMul', source)
    formats.quantise_linear_layers(source, target)
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(str(target)).graph.initializer}
    (quantised,) = (value for name, value in stored.items() if name.endswith('quantized'))
    scales = next(value for name, value in stored.items() if name.endswith('scale'))
    assert quantised.dtype == 'int8' and abs(quantised.astype(int)).max() <= 64 and scales.shape == (2,)
    torch.testing.assert_close(torch.from_numpy(quantised * scales), weight, rtol=0, atol=0.9)
    x = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]])
    (found,) = formats.load_onnx(target)(x)
    torch.testing.assert_close(found, x @ weight, rtol=0.03, atol=0.6)
    save('Relu', source)
    with pytest.raises(RunError, match='^no linear layer was found to quantise$'):
        formats.quantise_linear_layers(source, target)


def test_checked_graphs_serve_what_they_say():
    graph = torch.jit.trace(nn.Identity(), torch.ones(1, 3, 32, 32))
    dynamic = formats.Checked(graph, [1, 3, 32, 32], 32)
    for shape in ((1, 3, 32, 32), (5, 3, 32, 100)):
        assert dynamic(torch.ones(shape)).shape == shape
    for shape in ((1, 4, 32, 32), (1, 3, 31, 32), (1, 3, 32, 31), (3, 32, 32)):
        with pytest.raises(ValueError, match=r'allowed is \(B, 3, H, W\), H and W >= 32$'):
            dynamic(torch.ones(shape))


def test_a_package_that_is_missing_is_named():
    form = FORMATS['onnx']._replace(needs=('json', 'no_such_package'))
    with pytest.raises(RunError, match=r'needs the package no_such_package, .*: pip install "mmlinattn\[export\]"'):
        form.check_installed()
