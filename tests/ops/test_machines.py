# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Numbers do not depend on the machine: older CPUs are emulated by forbidding newer instructions, in a process each."""

import json
import os
import subprocess
import sys

import pytest
import torch

CODE = """
import json, sys
import torch
from mmengine.registry import MODELS
import mmlinattn

torch.set_num_threads(int(sys.argv[1]))
# channels and reductions of keys with which oneDNN's own bfloat16 convolutions are wrong on CPUs with AMX
narrow = dict(embed_dims=(16, 24, 32, 48), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4))
configs = [
    dict(type='RAVLT', arch='tiny'),
    dict(type='LinearSwin', arch='flatten-tiny'),
    dict(type='LinearSwin', arch='inline-tiny'),
    dict(type='LinearPVT', arch=narrow),
    dict(type='LinearPVTv2', arch=narrow),
]
result = []
for config in configs:
    torch.manual_seed(0)
    model, x = MODELS.build(config), torch.randn(2, 3, 74, 90)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    with torch.inference_mode():
        model.eval()
        result.append([out.double().norm().item() for out in model(x)])
        with torch.autocast('cpu', torch.bfloat16):
            result.append([out.double().norm().item() for out in model(x)])
    for module in model.train().modules():
        if hasattr(module, 'drop_prob'):
            module.drop_prob = 0.0
    sum(out.square().mean() for out in model(x)).backward()
    result.append([p.grad.double().norm().item() for p in model.parameters() if p.dim() > 1][:8])
print(json.dumps(result))
"""


def run(threads: int = 1, **environment: str) -> list[list[float]]:
    command = [sys.executable, '-W', 'ignore', '-c', CODE, str(threads)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope='module')
def expected():
    return run(ONEDNN_MAX_CPU_ISA='AVX2', ATEN_CPU_CAPABILITY='default', MMLINATTN_OPS='reference')


@pytest.mark.slow
@pytest.mark.parametrize(
    'machine',
    [
        dict(threads=2),
        dict(threads=1, ONEDNN_MAX_CPU_ISA='AVX512_CORE', ATEN_CPU_CAPABILITY='avx2'),
        dict(threads=2, ONEDNN_MAX_CPU_ISA='AVX2', ATEN_CPU_CAPABILITY='avx2'),
    ],
    ids=lambda machine: ' '.join(f'{key.rpartition("_")[2]}={value}' for key, value in machine.items()),
)
def test_results_are_those_of_the_oldest_machine(machine, expected):
    found = run(**machine)
    for i, (ours, theirs) in enumerate(zip(found, expected)):
        tolerance = 0.03 if i % 3 == 1 else 1e-3  # of bfloat16, and of gradients in float32
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=tolerance, atol=1e-4)
