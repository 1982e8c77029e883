# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Each format: files reproduce the model at the sizes they name, and raise for others."""

import pytest
import torch
from helpers.graphs import metadata_of
from torch import nn

from mmlinattn.tooling.export import FORMATS, Format
from mmlinattn.utils.errors import RunError


class Means(nn.Module):
    """Model with two outputs of any size."""

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
def test_files_reproduce_the_model(tmp_path, name, smallest):
    """Compare outputs and metadata, at one size or with dynamic shapes, without deprecation warnings."""
    form = FORMATS[name]
    for package in form.needs:
        pytest.importorskip(package)
    # a file of PyTorch may have any name
    path, model = tmp_path / ('graph.xml' if name == 'openvino' else 'graph'), Means().requires_grad_(False)
    meta = dict(outputs=['feat0', 'feat1'], classes=['a', 'b'], mean=[1.5], pad=None)
    form.write(model, torch.randn(1, 3, 48, 64), path, smallest, meta)
    assert metadata_of(name, path) == meta
    run = form.load(path)
    shapes = [(1, 3, 48, 64)] * 2 + ([] if smallest is None else [(1, 3, 40, 100), (3, 3, 65, 41)])
    images = [torch.randn(shape) for shape in shapes]
    found = [run(image) for image in images]  # outputs outlive the next call
    for outs, image in zip(found, images):
        assert len(outs) == 2
        for out, truth in zip(outs, model(image)):
            torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)
    refused = [(2, 3, 48, 64), (1, 3, 64, 64)] if smallest is None else [(1, 4, 48, 64)]
    refused += [(3, 48, 64)] + ([(1, 3, 39, 64), (1, 3, 64, 39)] if name != 'onnx' else [])
    for shape in refused:
        with pytest.raises(Exception, match=r'(?i)shape|size|guard|dimension|expected|rank'):
            run(torch.randn(shape))
    if name == 'openvino':
        import openvino

        graph = openvino.Core().read_model(str(path))
        assert [port.get_any_name() for port in (*graph.inputs, *graph.outputs)] == ['image', 'feat0', 'feat1']


def test_a_package_that_is_missing_is_named():
    form = Format()
    form.needs = ('json', 'no_such_package')
    with pytest.raises(RunError, match=r'needs the package no_such_package, .*: pip install json no_such_package$'):
        form.check_installed()
