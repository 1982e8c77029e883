# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
from torch import nn

from mmlinattn.layers import Block, ConvFFN, ResidualDWConv
from mmlinattn.ops.dispatch import autocasts


def ask(x):
    return x + 1 if autocasts(x) else x


@pytest.mark.parametrize('call', [ask, torch.compile(ask, fullgraph=True, backend='eager')], ids=['plain', 'compiled'])
def test_autocast_of_the_device_of_a_tensor(call):
    torch._dynamo.reset()
    x = torch.zeros(3)
    assert not call(x).any()
    with torch.autocast('cpu', torch.bfloat16):
        assert call(x).all()
        with torch.autocast('cpu', enabled=False):
            assert not call(x).any()
        assert call(x.to('meta')).shape == x.shape


def test_layers_that_ask_run_on_the_meta_device():
    block = Block(4, nn.Linear(4, 4), ConvFFN(4, 8), dict(type='LN'), layer_scale=0.1, position=ResidualDWConv(4))
    block.attn.forward = lambda x, out_scale: x
    x = torch.empty(2, 5, 6, 4, device='meta')
    assert block.to('meta')(x).shape == x.shape


@pytest.mark.parametrize('of_gelu', [False, True])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_the_residual_stream_is_not_rounded(dtype, of_gelu):
    """The input is a tap of the kernel elsewhere; under autocast the convolution rounds it."""
    layer, x = ResidualDWConv(4), 100 + torch.randn(1, 5, 6, 4)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    for grad in (True, False):
        with torch.autocast('cpu', dtype), torch.set_grad_enabled(grad):
            out = layer(x, of_gelu=of_gelu)
        assert torch.equal(out, x)  # so is gelu(x), of such numbers
