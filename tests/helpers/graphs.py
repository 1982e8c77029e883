# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Small backbones for the tests of graphs with dynamic batch size, height and width."""

import copy
import itertools
import json
import warnings

import torch

from helpers import small_backbones
from mmlinattn.tooling.export.models import deviation

# one block per stage; two in the middle stages of Swin, the second with shifted windows
ARCHS = {backbone: dict(arch, depths=(1,) * len(arch['depths'])) for backbone, arch in small_backbones.ARCHS.items()}
ARCHS['LinearSwin']['depths'] = (1, 2, 2, 1)
ARCHS['RAVLT'] = dict(ARCHS['LinearPVT'], num_heads=(1, 1, 2, 4))
ARCHS['RAVLT'].pop('grids')
BACKBONES = tuple(ARCHS)
# batch, height, width: multiples of windows, stripes and strides; remainders; feature maps smaller than a window
SHAPES = [(1, 113, 150), (3, 224, 320), (2, 353, 481), (1, 40, 260)]
TRACED_AT = (2, 65, 94)
# A graph with wrong sizes is off by 0.3 and more. Runtimes round differently, and some heads here have two channels
# with small norms.
TOLERANCE = 0.01


def one_per_stage(stages=4):
    """Return ``stage_attns`` of models that cover all registered attentions, one attention per stage."""
    names = itertools.cycle(small_backbones.every_attention())
    return [tuple(itertools.islice(names, stages)) for _ in range(-(-len(small_backbones.every_attention()) // stages))]


def build(backbone, attns):
    """Build a small backbone in eval mode, with one attention for all stages or one for each of the first stages.

    Stages without an attention are not built.
    """
    stages = len(ARCHS[backbone]['depths'])
    attns = (attns,) * stages if isinstance(attns, str) else tuple(attns)[:stages]
    options = {} if backbone == 'LinearDeiT' else dict(out_indices=tuple(range(len(attns))))
    attns += ('softmax',) * (stages - len(attns))  # of stages that are not built
    return small_backbones.build(backbone, arch=copy.deepcopy(ARCHS[backbone]), stage_attns=attns, **options).eval()


def image(shape):
    return torch.randn(shape[0], 3, *shape[1:])


@torch.no_grad()
def check(graph, model, shapes=SHAPES):
    for shape in shapes:
        x = image(shape)
        assert deviation(graph(x), model(x)) < TOLERANCE, shape


def metadata_of(form, path):
    files = {'metadata.json': ''}
    if form == 'torch-export':
        with open(path, 'rb') as file:
            torch.export.load(file, extra_files=files)
    elif form == 'torchscript':
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            torch.jit.load(str(path), _extra_files=files)
    elif form == 'openvino':
        import openvino

        return json.loads(openvino.Core().read_model(str(path)).get_rt_info(['mmlinattn']).astype(str))
    else:
        import onnx

        found = {prop.key: prop.value for prop in onnx.load(str(path), load_external_data=False).metadata_props}
        texts = ('mmlinattn', 'task', 'serves', 'channel_order')  # as they are, but for null
        return {key: value if key in texts and value != 'null' else json.loads(value) for key, value in found.items()}
    return json.loads(files['metadata.json'])
