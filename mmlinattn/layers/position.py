# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotary_table(
    height: int, width: int, head_dim: int, device=None, dtype: torch.dtype = torch.float32, base: float = 10000.0
) -> Tensor:
    """Two-dimensional rotary position encoding of the released RAVLT.

    The first half of a head turns with the row, the second half with the column, by ``1 / base ** linspace(0, 1, head_dim / 4)``
    radians a token, index 0 at the top left. Channel pairs are interleaved: (0, 1), (2, 3), ...

    Args:
        height, width (int): Grid.
        head_dim (int): Channels of a head, a multiple of 4.
        device, dtype: Of the result; the angles themselves are computed in ``dtype``.
        base (float): Largest wavelength over 2 pi, in tokens.

    Returns:
        Tensor: (height * width, head_dim / 2, 2): cos and sin of each channel pair's angle.

    Raises:
        ValueError: If ``head_dim`` is no multiple of 4.
    """
    if head_dim % 4:
        raise ValueError(f'rotary encoding: head_dim={head_dim} has to be a multiple of 4 (change num_heads or rotary=False)')
    speed = base ** -torch.linspace(0, 1, head_dim // 4, device=device, dtype=dtype)
    rows = torch.arange(height, device=device, dtype=dtype)[:, None] * speed
    columns = torch.arange(width, device=device, dtype=dtype)[:, None] * speed
    angles = torch.cat(
        (rows[:, None].expand(height, width, -1), columns[None].expand(height, width, -1)),
        dim=-1,
    ).flatten(0, 1)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


class ResidualDWConv(nn.Conv2d):
    """``x + DWConv(x)`` on (B, H, W, C) maps: conditional position encoding, and the local term of RAVLT's FFN.

    Args:
        dim (int): Channels C.
        kernel_size (int): Odd size of the depth-wise convolution.
    """

    def __init__(self, dim: int, kernel_size: int = 3) -> None:
        super().__init__(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        identity = torch.zeros(1, 1, kernel_size, kernel_size)
        identity[..., kernel_size // 2, kernel_size // 2] = 1
        self.register_buffer('identity', identity, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        image = x.permute(0, 3, 1, 2)
        if x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(x.device.type):
            # the identity is a tap of the kernel: one pass over the map less. In half precision the tap would round the
            # residual stream, so there the sum stays outside.
            out = self._conv_forward(image, self.weight + self.identity, self.bias)
            return out.permute(0, 2, 3, 1)
        return x + F.conv2d(image, self.weight, self.bias, 1, self.padding, 1, self.groups).permute(0, 2, 3, 1)
