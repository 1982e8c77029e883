# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The formats a model can be written in: how each is written, and run again."""

import importlib
import json
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn

from ..utils.errors import RunError

METADATA = 'metadata.json'  # name of the metadata inside the files of PyTorch
INSTALL = 'pip install "mmlinattn[export]"'


DTYPES = ('float32', 'float16', 'bfloat16', 'int8')


class Format(NamedTuple):
    """``write(model, example, path, smallest, metadata)``, with ``smallest`` the pixels a side from which on the graph
    is to serve every size, None for one size; ``load(path)`` giving a function of an image; ``read_metadata(path)``;
    the usual ``suffix`` of the file, and the packages that the format ``needs``.

    ``smallest_of_pyramids``: of models with a head or neck on maps of up to stride 64.
    ``refused``: the types of :data:`DTYPES` that the format does not take, and why.
    ``casts``: whether a graph of a half type is recorded from a model of that type; else ``write`` sees to the type,
    as it does to int8.
    """

    write: Callable
    load: Callable
    read_metadata: Callable
    suffix: str
    needs: tuple[str, ...] = ()
    smallest_of_pyramids: int = 32
    refused: dict[str, str] = {}
    casts: bool = True

    def check_installed(self) -> None:
        """
        Raises:
            RunError: A package the format needs is missing.
        """
        for name in self.needs:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise RunError(f'this format needs the package {name}, which is not installed: {INSTALL}') from error

    def check_takes(self, dtype: str) -> None:
        """
        Raises:
            RunError: Files of this format cannot have the type.
        """
        if dtype not in DTYPES:
            raise RunError(f'--dtype {dtype} has to be one of {", ".join(DTYPES)}.')
        if dtype in self.refused:
            taken = ', '.join(name for name in DTYPES if name not in self.refused)
            raise RunError(f'--dtype {dtype}: {self.refused[dtype]}; this format takes {taken}.')


@contextmanager
def quiet():
    """Exporters warn of their own deprecations, and tracers of every check of a size."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


def open_dimensions(smallest: Optional[int]):
    """The ``dynamic_shapes`` of PyTorch's exporters, one entry for the image; None for a graph of fixed size."""
    if smallest is None:
        return None
    Dim = torch.export.Dim
    return ({0: Dim('batch', min=1), 2: Dim('height', min=smallest), 3: Dim('width', min=smallest)},)


def several(example: Tensor, smallest: Optional[int]) -> Tensor:
    """The example in a batch of two at least: exporters take a batch of one for a number that never changes."""
    return example if smallest is None or len(example) > 1 else example.expand(2, -1, -1, -1).contiguous()


# --- torch.export -----------------------------------------------------------------------------


def exported_program(model: nn.Module, example: Tensor, smallest: Optional[int]):
    with quiet():
        return torch.export.export(model, (several(example, smallest),), dynamic_shapes=open_dimensions(smallest))


def write_torch_export(model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
    program = exported_program(model, example, smallest)
    with open(path, 'wb') as file:  # a file of any name; a path has to end with .pt2
        torch.export.save(program, file, extra_files={METADATA: json.dumps(metadata)})


def load_torch_export(path: Path) -> Callable:
    with quiet(), open(path, 'rb') as file:
        return torch.export.load(file).module()


def read_torch_export(path: Path) -> dict:
    files = {METADATA: ''}
    with quiet(), open(path, 'rb') as file:
        torch.export.load(file, extra_files=files)
    return json.loads(files[METADATA])


# --- TorchScript ------------------------------------------------------------------------------


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
            if len(shape) != 4 or shape[1] != self.shape[1] or min(shape[2], shape[3]) < self.smallest:
                raise ValueError(
                    f'image has the shape {shape}; allowed is (B, {self.shape[1]}, H, W), H and W >= {self.smallest}'
                )
        elif shape != self.shape:
            raise ValueError(f'image has the shape {shape}; the graph was traced for {self.shape} and serves no other')
        return self.graph(image)


def write_torchscript(model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
    with quiet():
        graph = torch.jit.trace(model, example, check_trace=False)
        graph = torch.jit.script(Checked(graph, list(example.shape), smallest))
        torch.jit.save(torch.jit.freeze(graph.eval()), str(path), _extra_files={METADATA: json.dumps(metadata)})


def load_torchscript(path: Path) -> Callable:
    with quiet():
        return torch.jit.load(str(path))


def read_torchscript(path: Path) -> dict:
    files = {METADATA: ''}
    with quiet():
        torch.jit.load(str(path), _extra_files=files)
    return json.loads(files[METADATA])


# --- ONNX -------------------------------------------------------------------------------------


def write_onnx(model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
    with quiet():
        program = torch.onnx.export(
            model,
            (several(example, smallest),),
            dynamo=True,
            dynamic_shapes=open_dimensions(smallest),
            input_names=['image'],
            output_names=metadata['outputs'],
            verbose=False,
        )
    for key, value in metadata.items():
        program.model.metadata_props[key] = value if isinstance(value, str) else json.dumps(value)
    if metadata['dtype'] != 'int8':
        program.save(str(path))
        return
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / 'float32.onnx'
        program.save(str(whole))
        quantise_linear_layers(whole, path)


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
    quantize_dynamic(
        str(folded),
        str(target),
        op_types_to_quantize=['MatMul', 'Gemm'],
        per_channel=True,
        reduce_range=True,
        weight_type=QuantType.QInt8,
    )
    if not any('MatMulInteger' in node.op_type for node in onnx.load(str(target)).graph.node):
        raise RunError('no linear layer was found to quantise')


def load_onnx(path: Path) -> Callable:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
    return lambda image: [torch.from_numpy(out) for out in session.run(None, {'image': image.numpy()})]


def read_onnx(path: Path) -> dict:
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    return {prop.key: _parsed(prop.value) for prop in model.metadata_props}


def _parsed(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


# --- OpenVINO ---------------------------------------------------------------------------------


def write_openvino(model: nn.Module, example: Tensor, path: Path, smallest: Optional[int], metadata: dict) -> None:
    import openvino

    # bounds are kept in the file, and images below them refused
    shape = list(example.shape) if smallest is None else f'[1..,{example.shape[1]},{smallest}..,{smallest}..]'
    with quiet():
        graph = torch.jit.trace(model, example, check_trace=False)
        converted = openvino.convert_model(graph, example_input=example, input=[openvino.PartialShape(shape)])
    converted.inputs[0].set_names({'image'})
    for output, name in zip(converted.outputs, metadata['outputs']):
        output.set_names({name})
    converted.set_rt_info(json.dumps(metadata), ['mmlinattn'])
    openvino.save_model(converted, str(path), compress_to_fp16=metadata['dtype'] == 'float16')


def load_openvino(path: Path) -> Callable:
    import openvino

    # by default CPUs with bfloat16 or float16 units round to it
    compiled = openvino.compile_model(str(path), 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})
    return lambda image: [torch.from_numpy(out.copy()) for out in compiled(image.numpy()).values()]


def read_openvino(path: Path) -> dict:
    import openvino

    return json.loads(openvino.Core().read_model(str(path)).get_rt_info(['mmlinattn']).astype(str))


_ONLY_ONNX = 'weights are quantised by ONNX Runtime, for --format onnx'
FORMATS = {
    'onnx': Format(
        write_onnx,
        load_onnx,
        read_onnx,
        '.onnx',
        ('onnx', 'onnxscript', 'onnxruntime'),
        refused=dict(bfloat16='ONNX Runtime has no kernels for it on CPUs, so that the file could not be checked'),
    ),
    'torch-export': Format(
        write_torch_export,
        load_torch_export,
        read_torch_export,
        '.pt2',
        # of a map of one pixel, convolutions in upstream heads and necks ask whether it is
        smallest_of_pyramids=65,
        refused=dict(int8=_ONLY_ONNX),
    ),
    'torchscript': Format(write_torchscript, load_torchscript, read_torchscript, '.pt', refused=dict(int8=_ONLY_ONNX)),
    'openvino': Format(
        write_openvino,
        load_openvino,
        read_openvino,
        '.xml',
        ('openvino',),
        refused=dict(
            bfloat16='OpenVINO takes it as a setting of whoever runs the file (INFERENCE_PRECISION_HINT)',
            int8=_ONLY_ONNX,
        ),
        casts=False,
    ),
}
