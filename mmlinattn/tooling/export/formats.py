# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write and read the file formats of exported models."""

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch import Tensor, nn

from ...utils.errors import RunError
from ..command_line import quiet
from .onnx_nodes import register_onnx_symbolic, split_products

METADATA = 'metadata.json'  # name of the metadata inside the files of PyTorch
OPSET = 17  # of traced ONNX graphs
THRESHOLD = 'boxes.score_thr'  # ExportableModel's buffer, and its name in ONNX graphs with boxes


class Format:
    """Base class of file formats: suffix, required packages, and functions that write and load a graph."""

    suffix: str  # usual suffix of the file
    needs: tuple[str, ...] = ()  # packages to write and run it with
    holds_boxes = False  # heads of detectors, with non-maximum suppression
    prefers_convolutions = False  # is faster with the modules of ``as_convolutions``
    smallest_of_pyramids = 32  # smallest side in pixels of models with coarse feature maps, up to stride 64

    def write(self, model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
        """Write a graph for all sides from ``smallest`` pixels on; None: for the example's size alone."""
        raise NotImplementedError

    def load(self, path: Path, score_thr: Optional[float] = None, precision: str = 'f32') -> Callable:
        """Load a file in a precision (``f32``, ``bf16`` or ``f16``), and return a function from an image to the outputs
        of its graph. ``score_thr`` replaces the score threshold of a graph with boxes."""
        raise NotImplementedError

    def default_precision(self, path: Path) -> str:
        """Return the precision that the runtime uses on this machine by default: ``f32``, ``bf16`` or ``f16``."""
        return 'f32'

    def check_installed(self) -> None:
        """Raise a RunError if a package of the format is not installed."""
        for name in self.needs:
            if find_spec(name) is None:
                command = f'pip install {" ".join(self.needs)}'
                raise RunError(f'this format needs the package {name}, which is not installed: {command}')


def _dynamic_shapes(example: Tensor, smallest: Optional[int]) -> tuple[Tensor, Any]:
    """Return the example input and the ``dynamic_shapes`` of ``torch.export``.

    ``smallest`` is the least height and width in pixels. With None the size is fixed, and ``dynamic_shapes`` is None.
    For dynamic sizes, the example gets a batch of at least two, because exporters specialise a batch of one.
    """
    if smallest is None:
        return example, None
    Dim = torch.export.Dim
    example = example if len(example) > 1 else example.expand(2, -1, -1, -1).contiguous()
    return example, ({0: Dim('batch', min=1), 2: Dim('height', min=smallest), 3: Dim('width', min=smallest)},)


class TorchExport(Format):
    suffix = '.pt2'
    smallest_of_pyramids = 65  # convolutions in upstream heads and necks have guards for feature maps of one pixel

    # through open files: torch.export takes no paths but .pt2
    @quiet()
    def write(self, model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
        example, shapes = _dynamic_shapes(example, smallest)
        # strict=True, the default before torch 2.7, reads the code and knows no context like StridedPools
        program = torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)
        with open(path, 'wb') as file:
            torch.export.save(program, file, extra_files={METADATA: json.dumps(metadata)})

    @quiet()
    def load(self, path: Path, score_thr: Optional[float] = None, precision: str = 'f32') -> Callable:
        with open(path, 'rb') as file:
            return torch.export.load(file).module()


class Checked(nn.Module):
    """Traced graph that raises for images of another ``shape``, or with a side below ``smallest`` pixels."""

    def __init__(self, graph: torch.jit.ScriptModule, shape: list[int], smallest: Optional[int]) -> None:
        super().__init__()
        self.graph, self.shape, self.smallest = graph, shape, smallest or 0

    def forward(self, image: Tensor):
        shape = list(image.shape)
        if self.smallest > 0:
            if shape[1] != self.shape[1] or min(shape[2], shape[3]) < self.smallest:
                allowed = f'(B, {self.shape[1]}, H, W), H and W >= {self.smallest}'
                raise ValueError(f'image has the shape {shape}; allowed is {allowed}')
        elif shape != self.shape:
            raise ValueError(f'image has the shape {shape}; the graph was traced for {self.shape} alone')
        return self.graph(image)


class TorchScript(Format):
    suffix = '.pt'

    @quiet()
    def write(self, model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
        graph = torch.jit.trace(model, example, check_trace=False)
        graph = torch.jit.script(Checked(graph, list(example.shape), smallest))
        torch.jit.save(torch.jit.freeze(graph.eval()), str(path), _extra_files={METADATA: json.dumps(metadata)})

    @quiet()
    def load(self, path: Path, score_thr: Optional[float] = None, precision: str = 'f32') -> Callable:
        return torch.jit.load(str(path))


class Onnx(Format):
    suffix = '.onnx'
    needs = ('onnx', 'onnxscript', 'onnxruntime')
    holds_boxes = True
    prefers_convolutions = True

    @quiet()
    def write(self, model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
        import onnx

        named = dict(input_names=['image'], output_names=metadata['outputs'], verbose=False)
        properties = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
        if 'boxes' in metadata['outputs']:  # torch.export would add guards for coarse pyramid levels of one pixel
            register_onnx_symbolic(OPSET)
            axes = {name: {0: 'batch'} for name in metadata['outputs']}
            axes['image'] = {0: 'batch', 2: 'height', 3: 'width'}
            named.update(dynamic_axes=None if smallest is None else axes, opset_version=OPSET)
            torch.onnx.export(model, (example,), str(path), dynamo=False, **named)
        else:
            example, shapes = _dynamic_shapes(example, smallest)
            program: Any = torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=shapes, **named)
            program.save(str(path))
        graph = onnx.load(str(path))
        split_products(graph)
        onnx.helper.set_model_props(graph, properties)
        onnx.save(graph, str(path))

    def load(self, path: Path, score_thr: Optional[float] = None, precision: str = 'f32') -> Callable:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if score_thr is not None:
            self.threshold = onnxruntime.OrtValue.ortvalue_from_numpy(np.array(score_thr, np.float32))
            options.add_initializer(THRESHOLD, self.threshold)  # has to outlive the session
        session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
        return lambda image: [torch.from_numpy(out) for out in session.run(None, {'image': image.numpy()})]


class OpenVino(Format):
    suffix = '.xml'
    needs = ('openvino',)
    holds_boxes = True

    @quiet()
    def write(self, model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
        import openvino

        # the file keeps the bounds, and raises for images below them
        shape = list(example.shape) if smallest is None else f'[1..,{example.shape[1]},{smallest}..,{smallest}..]'
        if 'boxes' in metadata['outputs']:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / 'graph.onnx'
                FORMATS['onnx'].write(model, example, file, smallest, metadata)
                converted = openvino.convert_model(str(file))
            converted.reshape(openvino.PartialShape(shape))
        else:
            graph = torch.jit.trace(model, example, check_trace=False)
            converted = openvino.convert_model(graph, example_input=example, input=[openvino.PartialShape(shape)])
        for port, name in zip((*converted.inputs, *converted.outputs), ('image', *metadata['outputs'])):
            port.set_names({name})
        converted.set_rt_info(json.dumps(metadata), ['mmlinattn'])
        openvino.save_model(converted, str(path), compress_to_fp16=False)

    def default_precision(self, path: Path) -> str:
        import openvino

        kind = openvino.compile_model(str(path), 'CPU').get_property('INFERENCE_PRECISION_HINT')
        return {'float': 'f32', 'f32': 'f32', 'bfloat16': 'bf16', 'float16': 'f16'}.get(kind.to_string(), 'f32')

    def load(self, path: Path, score_thr: Optional[float] = None, precision: str = 'f32') -> Callable:
        import openvino

        model = openvino.Core().read_model(str(path))
        if score_thr is not None:  # the conversion renames and copies constants: found by value
            written = np.float32(json.loads(model.get_rt_info(['mmlinattn']).astype(str))['score_threshold'])
            for node in [node for node in model.get_ops() if node.get_type_name() == 'LessEqual']:
                limit = node.input_value(1).get_node()
                if limit.get_type_name() == 'Constant' and limit.data.size == 1 and limit.data.item() == written:
                    lowered = openvino.op.Constant(np.full(limit.data.shape, score_thr, np.float32))
                    node.input(1).replace_source_output(lowered.output(0))
        compiled = openvino.compile_model(model, 'CPU', {'INFERENCE_PRECISION_HINT': precision})
        return lambda image: [torch.from_numpy(out.copy()) for out in compiled(image.numpy()).values()]


FORMATS: dict[str, Format] = {
    'onnx': Onnx(),
    'torch-export': TorchExport(),
    'torchscript': TorchScript(),
    'openvino': OpenVino(),
}
BOX_FORMATS = ' or '.join(name for name, form in FORMATS.items() if form.holds_boxes)
