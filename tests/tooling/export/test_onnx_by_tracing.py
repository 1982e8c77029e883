# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``torch.onnx.export(..., dynamo=False, dynamic_axes=...)``, by which MMDeploy exports: right at other sizes and
batches."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'backbones'))

import small_hosts  # noqa: E402

ort = pytest.importorskip('onnxruntime')
AXES = {0: 'batch', 2: 'height', 3: 'width'}
CASES = [(host, stage_attns) for host in small_hosts.ARCHS for stage_attns in small_hosts.mixes(host)]


@pytest.mark.parametrize(('host', 'stage_attns'), CASES, ids=str)
def test_graphs_of_a_tracer_hold_at_other_sizes(host, stage_attns, tmp_path):
    model = small_hosts.build(host, stage_attns=stage_attns).eval()
    file = str(tmp_path / 'model.onnx')
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        options = dict(input_names=['image'], dynamic_axes=dict(image=AXES), opset_version=17)
        torch.onnx.export(model, (small_hosts.image(1, 64, 96),), file, dynamo=False, **options)
        session = ort.InferenceSession(file, providers=['CPUExecutionProvider'])
        for size in ((1, 64, 96), (2, 64, 96), (1, 97, 65), (2, 80, 131)):
            image = small_hosts.image(*size)
            outs = session.run(None, dict(image=image.numpy()))
            for out, expected in zip(outs, model(image), strict=True):
                torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-3, atol=1e-3)
