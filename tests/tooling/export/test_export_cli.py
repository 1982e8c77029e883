# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``tools/export.py``: files, checks and errors. Published models, one per format, are slow."""

import pytest
import torch
from helpers.graphs import metadata_of
from helpers.tool_runs import QUICK, ROOT, in_this_process
from mmengine.config import Config

from mmlinattn.layers.block import ConvFFN
from mmlinattn.tooling.export import FORMATS
from mmlinattn.tooling.export.formats import OpenVino
from mmlinattn.utils.building import build_model


def export(*words):
    in_this_process('export.py', *words)


CLASSIFIER = f"""
_base_ = {QUICK['mmpretrain']!r}
model = dict(head=dict(num_classes=3))
data_preprocessor = dict(num_classes=3, mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0], to_rgb=True)
test_dataloader = dict(dataset=dict(metainfo=dict(classes=('circle', 'square', 'star'))))
"""


@pytest.fixture
def config(tmp_path):
    pytest.importorskip('mmpretrain')
    path = tmp_path / 'classifier.py'
    path.write_text(CLASSIFIER)
    return path


def options(config, out, *more, checkpoint='none'):
    return [str(config), str(checkpoint), '--format', 'torchscript', '--out', str(out), '--shape', '64', '80', *more]


def test_a_dynamic_graph_is_written_checked_and_described(config, tmp_path, capsys):
    model = build_model(Config.fromfile(config)).eval()
    checkpoint, out = tmp_path / 'weights.pth', tmp_path / 'graph.pt'
    meta = dict(dataset_meta=dict(classes=('one', 'two', 'three')))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), checkpoint)
    export(*options(config, out, '--dynamic', '--batch', '2', checkpoint=checkpoint))
    said = capsys.readouterr().out
    assert 'outputs scores' in said and 'batch >= 1, height and width >= 32' in said
    assert said.count('deviation at') == 3 and 'deviation at 2x3x64x80' in said
    graph = torch.jit.load(str(out))
    with torch.no_grad():
        for image in (torch.randn(1, 3, 100, 50), torch.randn(3, 3, 33, 200)):
            torch.testing.assert_close(graph(image), model(image).softmax(1), rtol=1e-3, atol=1e-4)
    with pytest.raises(Exception, match=r'image has the shape \[1, 3, 31, 64\]; allowed is'):
        graph(torch.randn(1, 3, 31, 64))
    meta = metadata_of('torchscript', out)
    assert meta['classes'] == ['one', 'two', 'three'] and meta['task'] == 'classifier'
    assert (meta['mean'], meta['std'], meta['channel_order']) == ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], 'RGB')
    assert [path.name for path in tmp_path.glob('*graph*')] == ['graph.pt']


def test_a_static_graph_names_the_size_it_was_traced_for(config, tmp_path, capsys):
    out = tmp_path / 'graph.pt'
    export(*options(config, out))
    assert 'serves image (1, 3, 64, 80), no other size' in capsys.readouterr().out
    assert metadata_of('torchscript', out)['classes'] == ['circle', 'square', 'star']
    graph = torch.jit.load(str(out))
    assert graph(torch.randn(1, 3, 64, 80)).shape == (1, 3)
    with pytest.raises(Exception, match=r'traced for \[1, 3, 64, 80\] alone'):
        graph(torch.randn(1, 3, 80, 64))


def test_openvino_is_measured_in_its_default_precision_too(config, tmp_path, capsys, monkeypatch):
    pytest.importorskip('openvino')
    monkeypatch.setattr(OpenVino, 'default_precision', lambda self, path: 'bf16')  # of CPUs with units for it
    out = tmp_path / 'graph.xml'
    export(str(config), 'none', '--format', 'openvino', '--out', str(out), '--shape', '64', '80')
    said = capsys.readouterr().out
    assert 'deviation at 1x3x64x80: ' in said and 'deviation at 1x3x64x80 in bf16: ' in said
    assert "set compile_model(..., config={'INFERENCE_PRECISION_HINT': 'f32'})" in said


def test_onnx_graphs_have_convolutions_in_place_of_linear_layers_of_maps(config, tmp_path):
    onnx = pytest.importorskip('onnx')
    pytest.importorskip('onnxruntime')
    export(str(config), 'none', '--format', 'onnx', '--out', str(tmp_path / 'a.onnx'), '--shape', '64', '80')
    operators = [node.op_type for node in onnx.load(str(tmp_path / 'a.onnx')).graph.node]
    modules = list(build_model(Config.fromfile(config)).modules())
    convolutions = sum(isinstance(module, torch.nn.Conv2d) for module in modules)
    networks = sum(type(module) is ConvFFN for module in modules)
    assert networks and operators.count('Conv') == convolutions + 2 * networks


# --- whole models -----------------------------------------------------------------------------

WHOLE = {
    'torchscript': ('mmdet/ravlt_t_maskrcnn_1x.py', 'detector'),
    'openvino': ('mmseg/flatten_pvt_v2_b1_fpn_80k.py', 'segmentor'),
}


@pytest.mark.slow
@pytest.mark.parametrize('form', WHOLE)
def test_a_published_model_is_exported_at_every_size(form, tmp_path, capsys):
    out, (config, task) = tmp_path / f'model{FORMATS[form].suffix}', WHOLE[form]
    words = [str(ROOT / 'configs' / config), 'none', '--format', form, '--out', str(out), '--shape', '96', '128']
    export(*words, '--dynamic')
    assert capsys.readouterr().out.count('deviation at') == 3
    meta = metadata_of(form, out)
    assert meta['task'] == task and meta['mean'] == [123.675, 116.28, 103.53]
    outputs = FORMATS[form].load(out)(torch.randn(1, 3, 70, 100))
    if task == 'segmentor':
        assert outputs[0].shape == (1, 70, 100) and len(meta['classes']) == 150
