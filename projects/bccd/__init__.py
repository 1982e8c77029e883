# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Train detectors from scratch on 292 photographs of blood cells, with our backbones and MMDetection's."""
