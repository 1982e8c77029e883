# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Export models as graphs for ONNX Runtime, ``torch.export``, TorchScript and OpenVINO, for ``tools/export.py``."""

from .formats import BOX_FORMATS, FORMATS, Format
from .models import ExportableModel, Sizes, export_model

__all__ = ['BOX_FORMATS', 'FORMATS', 'ExportableModel', 'Format', 'Sizes', 'export_model']
