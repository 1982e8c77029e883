# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.tracing import is_traced
from .base import TOKEN_MIXERS, TokenMixer
from .functional import inline_attention, linear_attention, overwrites
from .grid import Grid, add_local

KERNELS = {
    'identity': lambda x: x,
    'relu': F.relu,
    'leakyrelu': F.leaky_relu,
    'exp': lambda x: torch.exp(0.2 * x),
}


class PredictedConv(nn.Module):
    """Depth-wise convolution whose kernel is predicted for each image from its mean token (InLine Eq. 6).

    Two 1x1 convolutions, grouped by head, with GELU between, map the mean token (B, C) to a 3x3 kernel a channel.
    """

    def __init__(self, dim: int, num_heads: int, kernel_size: int = 3) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.fc1 = nn.Conv1d(dim, dim, 1, groups=num_heads)
        self.fc2 = nn.Conv1d(dim, dim * kernel_size**2, 1, groups=num_heads)

    @staticmethod
    def by_head(layer: nn.Conv1d, x: Tensor) -> Tensor:
        """The grouped 1x1 convolution on vectors (B, C): one batched product instead of a convolution a group."""
        weight = layer.weight.squeeze(-1).unflatten(0, (layer.groups, -1))
        return torch.einsum('bgi,goi->bgo', x.unflatten(-1, (layer.groups, -1)), weight).flatten(1) + layer.bias

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        """Convolve ``image`` (B, C, h, w) with the kernels of ``context`` (B, C)."""
        kernel = self.by_head(self.fc2, F.gelu(self.by_head(self.fc1, context)))
        batch, dim, height, width = image.shape
        kernel = kernel.reshape(batch * dim, 1, self.kernel_size, self.kernel_size).to(image.dtype)
        padding = self.kernel_size // 2
        if image.device.type != 'cpu' or is_traced():
            # all images as channels of one
            image = image.reshape(1, batch * dim, height, width)
            return F.conv2d(image, kernel, padding=padding, groups=batch * dim).reshape(batch, dim, height, width)
        # one by one they stay in channels-last memory, in which CPUs convolve several times as fast
        parts = zip(image.split(1), kernel.split(dim))
        parts = [F.conv2d(one, weight, padding=padding, groups=dim) for one, weight in parts]
        return parts[0] if batch == 1 else torch.cat(parts)


@TOKEN_MIXERS.register_module('inline')
class InLineMixer(TokenMixer):
    """Injective linear attention with the local residual (InLine Eq. 3-6).

    Args:
        dim (int): Width C.
        num_heads (int): Number of heads.
        kernel (str): phi: ``'identity'``, ``'relu'``, ``'leakyrelu'`` or ``'exp'`` (``exp(0.2 x)``).
        local_residual (bool): Add the depth-wise 3x3 convolution of the values with predicted kernels (Tab. 4).
        injective (bool): False is plain linear attention with division, the ablation of Tab. 3.

    Raises:
        ValueError: For an unknown ``kernel``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid=None,
        kernel: str = 'identity',
        local_residual: bool = True,
        injective: bool = True,
        init_cfg=None,
    ) -> None:
        super().__init__(dim, num_heads, grid, init_cfg)
        if kernel not in KERNELS:
            raise ValueError(f'kernel={kernel!r} has to be one of {list(KERNELS)}')
        self.kernel = kernel
        self.injective = injective
        self.context = local_residual
        self.residual = PredictedConv(dim, num_heads) if local_residual else None

    def forward(self, q, k, v, grid: Grid, key_grid: Grid, mask=None, rotary=None, bias=None, context=None):
        phi = KERNELS[self.kernel]
        queries, keys, values = phi(self.split_heads(q)), phi(self.split_heads(k)), self.split_heads(v)
        if self.injective:
            out = inline_attention(queries, keys, values, self.head_dim**-0.5, mask, inplace=overwrites())
        else:
            out = linear_attention(queries, keys, values, mask)
        out = self.merge_heads(out)
        if self.residual is not None:
            out = add_local(out, v, lambda image: self.residual(image, context), grid)
        return out
