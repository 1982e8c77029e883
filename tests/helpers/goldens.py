# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Outputs of the authors' released models under rebuildable weights.

A case ``NAME`` in ``tests/data/goldens`` has up to three files:

- ``NAME.json``: input, parameter count, keys and shapes of the released state dict, shapes of the stage outputs.
- ``NAME.npz``: outputs of the authors' code in float64, subsampled by :func:`thin`.
- ``NAME.const.npz``: buffers of the release, if it has any.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parents[1] / 'data' / 'goldens'


def cases() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob('*.json'))


def info(name: str) -> dict:
    return json.loads((FOLDER / f'{name}.json').read_text())


def outputs(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f'{name}.npz') as archive:
        return dict(archive)


def weight(key: str, shape) -> Tensor:
    """Return a parameter or running statistic: noise with the name as its seed, scaled by its role."""
    noise = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(tuple(shape))
    role = key.split('.')[-1]
    if role == 'running_var':
        value = 1 + np.abs(noise) / 10
    elif role == 'weight':
        value = 1 + noise / 10 if len(shape) == 1 else noise / np.sqrt(np.prod(shape[1:]))
    else:  # biases, running means, layer scales, tables, tokens
        value = noise / 10
    return torch.from_numpy(value.astype(np.float32))


def state_dict(name: str) -> dict[str, Tensor]:
    stored = FOLDER / f'{name}.const.npz'
    constants = dict(np.load(stored)) if stored.exists() else {}
    state = {}
    for key, (kind, shape) in info(name)['state'].items():
        if kind == 'filled':
            state[key] = weight(key, shape)
        elif f'const:{key}' in constants:
            value = torch.from_numpy(np.asarray(constants[f'const:{key}']))
            state[key] = value.float() if value.is_floating_point() else value
    return state


def fill(model: torch.nn.Module) -> torch.nn.Module:
    """Fill a model by :func:`weight`, so that no zero or one hides a term, and return it."""
    state = {k: weight(k, v.shape) for k, v in model.state_dict().items() if v.is_floating_point()}
    model.load_state_dict(state, strict=False)
    return model


def image(name: str) -> Tensor:
    case = info(name)
    noise = np.random.RandomState(case['seed']).standard_normal(case['input'])
    return torch.from_numpy(noise.astype(np.float32))


def thin(output: Tensor) -> np.ndarray:
    """Subsample an output (NCHW feature map or logits) to about a thousand values, as in the golden files."""
    flat = output.detach().float().flatten()
    return flat[:: max(1, flat.numel() // 512)].numpy()


def error(output: Tensor, expected: np.ndarray) -> float:
    """Return the largest deviation from the stored values, relative to their standard deviation."""
    return float(np.abs(thin(output) - expected).max() / expected.std())
