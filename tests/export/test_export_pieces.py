# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What export decides beside the graph itself: sizes, types, what a file says of itself. Toys in place of models."""

import json
import re
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from torch import nn

import mmlinattn
from mmlinattn.export import FORMATS, ExportableModel, Sizes, cli, export_model, formats, models
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


def test_complaints_give_the_deviation_at_each_size():
    errors = {(1, 3, 64, 80): models.Deviation(0.0123, 0.001), (2, 3, 9, 9): models.Deviation(4e-4, 1e-4)}
    assert models._complaint('onnx', 'float32', errors) == (
        'the onnx graph in float32 deviates from the model by more than 0.001 standard deviations of an output '
        '(1x3x64x80: 1.2e-02, 2x3x9x9: 4.0e-04)'
    )
    errors[(2, 3, 9, 9)] = models.Deviation(float('inf'), float('inf'))
    assert models._complaint('onnx', 'float16', errors) == (
        'the onnx graph in float16 deviates from the model by more than 0.02 standard deviations in the mean of an '
        'output (1x3x64x80: 1.0e-03, 2x3x9x9: inf, inf: values that are not finite)'
    )
    assert models.TOLERANCE == 1e-3 and models.Deviation(1e-3, 9.0).within('float32')


# ---------------------------------------------------------------------------------------- formats


def test_what_each_format_takes():
    assert {name: (form.suffix, form.needs, sorted(form.refused)) for name, form in FORMATS.items()} == {
        'onnx': ('.onnx', ('onnx', 'onnxscript', 'onnxruntime'), ['bfloat16']),
        'torch-export': ('.pt2', (), ['int8']),
        'torchscript': ('.pt', (), ['int8']),
        'openvino': ('.xml', ('openvino',), ['bfloat16', 'int8']),
    }
    # docs/deploy.md
    assert {name: form.smallest_of_pyramids for name, form in FORMATS.items()} == {
        'onnx': 32,
        'torch-export': 65,
        'torchscript': 32,
        'openvino': 32,
    }
    # OpenVINO compresses to float16 what is written in float32
    assert [name for name, form in FORMATS.items() if not form.casts] == ['openvino']
    assert models.RMS_TOLERANCES == dict(float16=0.02, bfloat16=0.08, int8=0.2)
    only_onnx = 'weights are quantised by ONNX Runtime, for --format onnx; this format takes float32, float16'
    for name, taken in (('torch-export', ', bfloat16.'), ('torchscript', ', bfloat16.'), ('openvino', '.')):
        with pytest.raises(RunError) as error:
            FORMATS[name].check_takes('int8')
        assert str(error.value) == f'--dtype int8: {only_onnx}{taken}'
    for form in FORMATS.values():
        for dtype in set(formats.DTYPES) - set(form.refused):
            form.check_takes(dtype)
    with pytest.raises(RunError, match='^--dtype float64 has to be one of float32, float16, bfloat16, int8.$'):
        FORMATS['onnx'].check_takes('float64')
    missing = FORMATS['onnx']._replace(needs=('json', 'no_such_package'))
    with pytest.raises(RunError) as error:
        missing.check_installed()
    assert str(error.value) == (
        'this format needs the package no_such_package, which is not installed: pip install "mmlinattn[export]"'
    )


def test_examples_and_open_dimensions():
    one, two = torch.randn(1, 3, 4, 4), torch.randn(2, 3, 4, 4)
    assert formats.several(one, None) is one and formats.several(two, 32) is two
    doubled = formats.several(one, 32)
    assert doubled.shape == (2, 3, 4, 4) and doubled.is_contiguous() and torch.equal(doubled[1], one[0])
    assert formats.open_dimensions(None) is None
    (dims,) = formats.open_dimensions(65)
    assert {axis: (dim.__name__, dim.min) for axis, dim in dims.items()} == {
        0: ('batch', 1),
        2: ('height', 65),
        3: ('width', 65),
    }
    unbounded = torch.export.Dim('any').max
    assert all(dim.max == unbounded for dim in dims.values())


class Recorder:
    """Stands in for a package: notes how it is called."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return mock.MagicMock()

        return call


@pytest.mark.parametrize(('dtype', 'compressed'), [('float32', False), ('float16', True)])
def test_openvinos_settings(tmp_path, dtype, compressed):
    """Weights in float16 in a file of that type only, and computations of full precision on CPUs that have others."""
    openvino = Recorder()
    example = torch.randn(2, 3, 40, 48)
    with mock.patch.dict(sys.modules, openvino=openvino):
        for smallest in (None, 32):
            meta = dict(outputs=['logits'], dtype=dtype)
            formats.write_openvino(nn.Identity(), example, tmp_path / 'a.xml', smallest, meta)
        formats.load_openvino(tmp_path / 'a.xml')
    shapes = [args[0] for name, args, _ in openvino.calls if name == 'PartialShape']
    assert shapes == [[2, 3, 40, 48], '[1..,3,32..,32..]']
    saved = [(args[1], kwargs) for name, args, kwargs in openvino.calls if name == 'save_model']
    assert saved == [(str(tmp_path / 'a.xml'), dict(compress_to_fp16=compressed))] * 2
    assert openvino.calls[-1] == (
        'compile_model',
        (str(tmp_path / 'a.xml'), 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'}),
        {},
    )


def test_onnxs_settings(tmp_path):
    program = mock.MagicMock()
    program.model.metadata_props = {}
    meta = dict(outputs=['logits'], dtype='float32', task='classifier', mean=[1.0, 2.0], classes=None)
    with mock.patch('torch.onnx.export', return_value=program) as export:
        formats.write_onnx(nn.Identity(), torch.randn(1, 3, 4, 4), tmp_path / 'a.onnx', 65, meta)
    (_, (image,)), settings = export.call_args
    assert image.shape == (2, 3, 4, 4) and settings['dynamo'] is True
    assert settings['input_names'] == ['image'] and settings['output_names'] == ['logits']
    assert settings['dynamic_shapes'][0][2].min == 65
    program.save.assert_called_once_with(str(tmp_path / 'a.onnx'))
    read = {key: formats._parsed(value) for key, value in program.model.metadata_props.items()}
    assert read == meta and formats._parsed('a: b') == 'a: b'


def test_onnx_in_eight_bits_is_made_of_a_file_that_does_not_stay(tmp_path):
    program = mock.MagicMock()
    program.model.metadata_props = {}
    program.save.side_effect = lambda path: Path(path).write_text('whole')
    made = []

    def quantise(source, target):
        made.append((source.read_text(), source.parent.parent, target))
        target.write_text('small')

    with (
        mock.patch('torch.onnx.export', return_value=program),
        mock.patch.object(formats, 'quantise_linear_layers', quantise),
    ):
        meta = dict(outputs=['logits'], dtype='int8')
        formats.write_onnx(nn.Identity(), torch.randn(1, 3, 4, 4), tmp_path / 'a.onnx', None, meta)
    assert made == [('whole', tmp_path, tmp_path / 'a.onnx')]
    assert [path.name for path in tmp_path.iterdir()] == ['a.onnx'] and (tmp_path / 'a.onnx').read_text() == 'small'


def test_what_onnx_files_say_is_read_without_their_weights(tmp_path):
    onnx = pytest.importorskip('onnx')
    graph = onnx.helper.make_graph([], 'g', [], [])
    model = onnx.helper.make_model(graph)
    onnx.helper.set_model_props(model, dict(task='classifier', mean='[1.0, 2.0]', classes='null'))
    onnx.save(model, str(tmp_path / 'a.onnx'))
    with mock.patch.object(onnx, 'load', wraps=onnx.load) as load:
        assert FORMATS['onnx'].read_metadata(tmp_path / 'a.onnx') == dict(
            task='classifier', mean=[1.0, 2.0], classes=None
        )
    assert load.call_args.kwargs == dict(load_external_data=False)


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


# ----------------------------------------------------------------------------------- command line


def test_options_and_their_defaults(capsys):
    required = ['config.py', 'none', '--format', 'onnx', '--out', 'x']
    found = vars(cli.parse_args(required))
    assert found == dict(
        config='config.py',
        checkpoint='none',
        format='onnx',
        out='x',
        shape=None,
        batch=1,
        dynamic=False,
        dtype='float32',
    )
    more = cli.parse_args([*required, '--shape', '96', '128', '--batch', '3', '--dynamic', '--dtype', 'int8'])
    assert (more.shape, more.batch, more.dynamic, more.dtype) == ([96, 128], 3, True, 'int8')
    for words, missing in (([], 'config, checkpoint, --format, --out'), (required[:1], 'checkpoint, --format, --out')):
        with pytest.raises(SystemExit):
            cli.parse_args(words)
        assert capsys.readouterr().err.endswith(f'the following arguments are required: {missing}\n')
    for option, names in (
        ('--format', ('onnx', 'torch-export', 'torchscript', 'openvino')),
        ('--dtype', ('float32', 'float16', 'bfloat16', 'int8')),
    ):
        with pytest.raises(SystemExit):
            cli.parse_args([*required, option, 'of another'])
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"argument {option}: invalid choice: 'of another'" in line
        assert re.findall(r'[\w-]+', line.partition('choose from')[2]) == list(names)


def test_the_tool_hands_its_options_on_and_says_what_came_of_it(tmp_path, monkeypatch, capsys):
    files = [tmp_path / 'g.xml', tmp_path / 'g.bin']
    for path, size in zip(files, (2**20, 2**19)):
        path.write_bytes(b'0' * size)
    asked = []

    def export(model, cfg, target, form, sizes, meta, dtype):
        asked.append((model, target, form, sizes, meta, dtype))
        errors = {(2, 3, 96, 128): models.Deviation(1.234e-5, 2e-6), (1, 3, 40, 50): models.Deviation(2e-5, 3e-6)}
        return models.Export(files, dict(outputs=['feat0', 'feat1'], serves='image, any'), errors)

    monkeypatch.setattr(cli, 'export_model', export)
    monkeypatch.setattr(cli, 'read_config', lambda path: Config(dict(default_scope='mmseg', crop_size=(96, 128))))
    monkeypatch.setattr(cli, 'build_model', lambda cfg: f'model of {cfg.default_scope}')
    monkeypatch.setattr(cli, 'check_checkpoint', lambda source, name: f'{name} {source}')
    monkeypatch.setattr(cli, 'load', lambda model, source, config: dict(loaded=(model, source, config)))
    out = str(tmp_path / 'g.xml')
    cli.main(['c.py', 'w.pth', '--format', 'torchscript', '--out', out, '--batch', '2', '--dynamic'])
    meta = dict(loaded=('model of mmseg', 'checkpoint w.pth', 'c.py'))
    assert asked == [
        ('model of mmseg', Path(out), 'torchscript', Sizes(2, 96, 128, True), meta, 'float32'),
    ]
    assert capsys.readouterr().out == (
        f'wrote {files[0]} and {files[1]}: torchscript, float32, 1.5 MiB, outputs feat0, feat1\n'
        'serves image, any\n'
        'deviation at 2x3x96x128: 1.2e-05 standard deviations, 2.0e-06 in the mean\n'
        'deviation at 1x3x40x50: 2.0e-05 standard deviations, 3.0e-06 in the mean\n'
    )
    monkeypatch.setenv('HOME', str(tmp_path))
    out = '~/g.pt'
    cli.main(['c.py', 'none', '--format', 'torchscript', '--out', out, '--shape', '64', '32', '--dtype', 'float16'])
    assert asked[1][1:] == (Path(tmp_path) / 'g.pt', 'torchscript', Sizes(1, 64, 32, False), None, 'float16')


def test_what_can_be_said_before_a_model_is_built(tmp_path, monkeypatch, capsys):
    """One line each, and nothing is built; what is wrong with the config comes from the builder."""

    def said(*options):
        with pytest.raises(SystemExit) as end:
            cli.main(['c.py', 'none', '--format', 'torchscript', '--out', str(tmp_path / 'g.pt'), *options])
        assert end.value.code == 1
        return capsys.readouterr().err

    built = []

    def build(cfg):
        built.append(cfg.default_scope)
        raise cli.CheckpointError('c.py has no model')

    monkeypatch.setattr(cli, 'read_config', lambda path: Config(dict(default_scope='mmseg')))
    monkeypatch.setattr(cli, 'build_model', build)
    here = str(tmp_path)
    assert said('--out', here) == f'error: --out {here!r} is a folder; name a file in it.\n'
    absent = str(tmp_path / 'no' / 'g.pt')
    no_place = 'its folder does not exist or cannot be written to.\n'
    assert said('--out', absent) == f'error: --out {absent!r}: {no_place}'
    with mock.patch.object(cli.os, 'access', side_effect=lambda path, mode: (path, mode) != (tmp_path, cli.os.W_OK)):
        assert said() == f'error: --out {str(tmp_path / "g.pt")!r}: {no_place}'
    assert said('--batch', '-1') == 'error: --batch -1 has to be at least 1.\n'
    assert said('--shape', '64', '31') == 'error: --shape 64 31: a side has 32 pixels at least.\n'
    needy = FORMATS['torchscript']._replace(needs=('no_such_package',))
    with mock.patch.dict(FORMATS, torchscript=needy):
        assert said().startswith('error: this format needs the package no_such_package, which is not installed: pip ')
    assert built == []
    assert said('--shape', '32', '32') == 'error: c.py has no model\n' and built == ['mmseg']


def test_how_a_checkpoint_is_read(monkeypatch):
    """Onto the CPU, wherever it was saved, without a line in the log; its layout may depend on its name."""
    model, asked = nn.Linear(2, 2), []
    checkpoint = dict(state_dict={}, meta=None)

    def convert(*args):
        asked.append(args)
        return types.SimpleNamespace(complete=True, state_dict=dict(weight=torch.ones(2, 2), bias=torch.ones(2)))

    def read(*args, **options):
        asked.append((args, options))
        return checkpoint

    monkeypatch.setattr(cli, 'CheckpointLoader', types.SimpleNamespace(load_checkpoint=read))
    monkeypatch.setattr(cli, 'convert_state', convert)
    assert cli.load(model, 'a.pth', 'c.py') == {} and (model.weight == 1).all()
    assert asked == [(('a.pth', 'cpu'), dict(logger='silent')), (checkpoint, 'a.pth', model)]
    for error in (OSError('no route to host'), cli.CheckpointError('no checkpoint')):
        monkeypatch.setattr(cli, 'convert_state', mock.Mock(side_effect=error))
        with pytest.raises(RunError, match=f'^{error}$'):
            cli.load(model, 'a.pth', 'c.py')


def test_keys_that_do_not_fit_are_counted(tmp_path, monkeypatch):
    checkpoint = tmp_path / 'weights.pth'
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.save(dict(state_dict=model.state_dict(), meta=dict(epoch=3)), checkpoint)
    report = types.SimpleNamespace(missing=['a', 'b'], unexpected=[], mismatched=['c'])
    conversion = types.SimpleNamespace(complete=True, report=report, state_dict=model.state_dict())
    monkeypatch.setattr(cli, 'convert_state', lambda *args: conversion)
    assert cli.load(other, str(checkpoint), 'c.py') == dict(epoch=3)
    assert torch.equal(other.weight, model.weight)
    torch.save(model.state_dict(), checkpoint)
    assert cli.load(other, str(checkpoint), 'c.py') == {}
    conversion.complete = False
    with pytest.raises(RunError) as error:
        cli.load(other, str(checkpoint), 'c.py')
    assert str(error.value) == (
        f'checkpoint {str(checkpoint)!r} does not fit the model of c.py: 2 missing, e.g. a; 1 mismatched, e.g. c.'
    )
    checkpoint.write_bytes(b'nothing')
    with pytest.raises(RunError):
        cli.load(other, str(checkpoint), 'c.py')
