# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The formats a model can be written in: how each is written, and run again."""

import json
import tempfile
import warnings
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn

from ..utils.errors import RunError

METADATA = 'metadata.json'  # name of the metadata inside the files of PyTorch
INSTALL = 'pip install "mmlinattn[export]"'
DTYPES = ('float32', 'float16', 'bfloat16', 'int8')


@contextmanager
def quiet():
    """Exporters warn of their own deprecations, and tracers of every check of a size."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


class Format:
    """A kind of file.

    Attributes:
        suffix: Usual end of the file's name.
        needs: Packages to write and run it with.
        smallest_of_pyramids: Pixels a side from which on a model with a head or neck on maps of up to stride 64 serves.
        refused: Types of :data:`DTYPES` that such a file cannot have, and why.
        casts: Whether a graph of a half type is recorded from a model of that type; else :meth:`write` sees to the
            type, as it does to int8.
    """

    suffix: str
    needs: tuple[str, ...] = ()
    smallest_of_pyramids = 32
    refused = dict(int8='weights are quantised by ONNX Runtime, for --format onnx')
    casts = True

    def write(self, model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
        """Write a graph; ``smallest`` is the pixels a side from which on it is to serve every size, None for one."""
        raise NotImplementedError

    def load(self, path: Path) -> Callable:
        """A function of an image."""
        raise NotImplementedError

    def read_metadata(self, path: Path) -> dict:
        """What the file says of itself."""
        raise NotImplementedError

    def check_installed(self) -> None:
        """
        Raises:
            RunError: A package the format needs is missing.
        """
        for name in self.needs:
            if find_spec(name) is None:
                raise RunError(f'this format needs the package {name}, which is not installed: {INSTALL}')

    def check_takes(self, dtype: str) -> None:
        """
        Raises:
            RunError: Files of this format cannot have the type.
        """
        if dtype in self.refused:
            taken = ', '.join(name for name in DTYPES if name not in self.refused)
            raise RunError(f'--dtype {dtype}: {self.refused[dtype]}; this format takes {taken}.')


def _open(example: Tensor, smallest: Optional[int]) -> tuple[Tensor, Any]:
    """The example, of which exporters take a batch of one for a number that never changes, and ``dynamic_shapes``."""
    if smallest is None:
        return example, None
    Dim = torch.export.Dim
    example = example if len(example) > 1 else example.expand(2, -1, -1, -1).contiguous()
    return example, ({0: Dim('batch', min=1), 2: Dim('height', min=smallest), 3: Dim('width', min=smallest)},)


class TorchExport(Format):
    suffix = '.pt2'
    smallest_of_pyramids = 65  # of a map of one pixel, convolutions in upstream heads and necks ask whether it is

    # files of any name: a path has to end with .pt2
    @quiet()
    def write(self, model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
        example, shapes = _open(example, smallest)
        program = torch.export.export(model, (example,), dynamic_shapes=shapes)
        with open(path, 'wb') as file:
            torch.export.save(program, file, extra_files={METADATA: json.dumps(metadata)})

    @quiet()
    def load(self, path: Path) -> Callable:
        with open(path, 'rb') as file:
            return torch.export.load(file).module()

    @quiet()
    def read_metadata(self, path: Path) -> dict:
        files = {METADATA: ''}
        with open(path, 'rb') as file:
            torch.export.load(file, extra_files=files)
        return json.loads(files[METADATA])


class Checked(nn.Module):
    """A traced graph that refuses images of sizes it was not made for.

    Args:
        graph (ScriptModule): The graph.
        shape (list[int]): Of the traced image.
        smallest (int, optional): Pixels a side from which on every size is served; None for that shape alone.
    """

    def __init__(self, graph: torch.jit.ScriptModule, shape: list[int], smallest: Optional[int]) -> None:
        super().__init__()
        self.graph = graph
        self.shape = shape
        self.smallest = smallest or 0

    def forward(self, image: Tensor):
        shape = list(image.shape)
        if self.smallest > 0:
            if shape[1] != self.shape[1] or min(shape[2], shape[3]) < self.smallest:
                raise ValueError(
                    f'image has the shape {shape}; allowed is (B, {self.shape[1]}, H, W), H and W >= {self.smallest}'
                )
        elif shape != self.shape:
            raise ValueError(f'image has the shape {shape}; the graph was traced for {self.shape} and serves no other')
        return self.graph(image)


class TorchScript(Format):
    suffix = '.pt'

    @quiet()
    def write(self, model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
        graph = torch.jit.trace(model, example, check_trace=False)
        graph = torch.jit.script(Checked(graph, list(example.shape), smallest))
        torch.jit.save(torch.jit.freeze(graph.eval()), str(path), _extra_files={METADATA: json.dumps(metadata)})

    @quiet()
    def load(self, path: Path) -> Callable:
        return torch.jit.load(str(path))

    @quiet()
    def read_metadata(self, path: Path) -> dict:
        files = {METADATA: ''}
        torch.jit.load(str(path), _extra_files=files)
        return json.loads(files[METADATA])


class Onnx(Format):
    suffix = '.onnx'
    needs = ('onnx', 'onnxscript', 'onnxruntime')
    refused = dict(bfloat16='ONNX Runtime has no kernels for it on CPUs, so that the file could not be checked')

    @quiet()
    def write(self, model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
        example, shapes = _open(example, smallest)
        names = dict(input_names=['image'], output_names=metadata['outputs'])
        program = torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
        for key, value in metadata.items():
            program.model.metadata_props[key] = value if isinstance(value, str) else json.dumps(value)
        if metadata['dtype'] != 'int8':
            program.save(str(path))
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / 'float32.onnx'
            program.save(str(whole))
            quantise_linear_layers(whole, path)

    def load(self, path: Path) -> Callable:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
        return lambda image: [torch.from_numpy(out) for out in session.run(None, {'image': image.numpy()})]

    def read_metadata(self, path: Path) -> dict:
        import onnx

        found: dict = {}
        for prop in onnx.load(str(path), load_external_data=False).metadata_props:
            try:
                found[prop.key] = json.loads(prop.value)
            except ValueError:  # text
                found[prop.key] = prop.value
        return found


def quantise_linear_layers(source: Path, target: Path) -> None:
    """Weights of linear layers in 8-bit integers, a scale for each output channel; what they multiply is rounded to 8
    bits while the graph runs, by a scale of each tensor.

    The integers keep to 7 bits: on CPUs with AVX2 or AVX-512 that lack VNNI, ONNX Runtime's products of 8-bit numbers
    saturate, and give other numbers.

    Raises:
        RunError: The graph has no product with a constant matrix.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    # folds the transposes of weights, which hide them from the quantiser
    folded = source.with_name('folded.onnx')
    quant_pre_process(str(source), str(folded), skip_symbolic_shape=True)
    model = onnx.load(str(folded))
    # the quantiser transposes weights of Gemm, but not what is noted down of their shapes
    weights = {tensor.name for tensor in model.graph.initializer}
    noted = [value for value in model.graph.value_info if value.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(noted)
    onnx.save(model, str(folded))
    how = dict(per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)
    quantize_dynamic(str(folded), str(target), op_types_to_quantize=['MatMul', 'Gemm'], **how)
    if not any('MatMulInteger' in node.op_type for node in onnx.load(str(target)).graph.node):
        raise RunError('no linear layer was found to quantise')


class OpenVino(Format):
    suffix = '.xml'
    needs = ('openvino',)
    refused = dict(
        Format.refused, bfloat16='OpenVINO takes it as a setting of whoever runs the file (INFERENCE_PRECISION_HINT)'
    )
    casts = False

    @quiet()
    def write(self, model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
        import openvino

        # bounds are kept in the file, and images below them refused
        shape = list(example.shape) if smallest is None else f'[1..,{example.shape[1]},{smallest}..,{smallest}..]'
        graph = torch.jit.trace(model, example, check_trace=False)
        converted = openvino.convert_model(graph, example_input=example, input=[openvino.PartialShape(shape)])
        for port, name in zip((*converted.inputs, *converted.outputs), ('image', *metadata['outputs'])):
            port.set_names({name})
        converted.set_rt_info(json.dumps(metadata), ['mmlinattn'])
        openvino.save_model(converted, str(path), compress_to_fp16=metadata['dtype'] == 'float16')

    def load(self, path: Path) -> Callable:
        import openvino

        # by default CPUs with bfloat16 or float16 units round to it
        compiled = openvino.compile_model(str(path), 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})
        return lambda image: [torch.from_numpy(out.copy()) for out in compiled(image.numpy()).values()]

    def read_metadata(self, path: Path) -> dict:
        import openvino

        return json.loads(openvino.Core().read_model(str(path)).get_rt_info(['mmlinattn']).astype(str))


FORMATS: dict[str, Format] = {
    'onnx': Onnx(),
    'torch-export': TorchExport(),
    'torchscript': TorchScript(),
    'openvino': OpenVino(),
}
