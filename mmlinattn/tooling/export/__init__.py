# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Models as graphs for ONNX Runtime, PyTorch without Python code, TorchScript and OpenVINO: ``tools/export.py``."""

from .formats import FORMATS, Format
from .models import ExportableModel, Sizes, export_model

__all__ = ['FORMATS', 'ExportableModel', 'Format', 'Sizes', 'export_model']
