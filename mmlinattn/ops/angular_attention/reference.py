# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import math
from typing import Optional

from torch import Tensor

from ..forms import accumulation_dtype
from ..kernels import unit
from ..masks import count_tokens
from ..memory import heads_of, tokens_of


def angular_attention(
    q: Tensor, k: Tensor, v: Tensor, num_heads: int, mask: Optional[Tensor] = None, released: bool = True
) -> Tensor:
    wide, dtype = accumulation_dtype(q), v.dtype
    # sums over tokens of the released form are not divided by their number, which float16 would not hold
    q, k, v = (heads_of(t.to(wide), num_heads) for t in (q, k, v))
    q, k = unit(q), unit(k)
    if released:
        out = unit(v / 2 + q @ (k.transpose(-1, -2) @ v) / math.pi)
        return tokens_of(out.to(dtype))
    count = count_tokens(k, mask)
    k = k if mask is None else k * mask[:, None, :, None].to(wide)
    numerator = v.sum(dim=-2, keepdim=True) / 2 + q @ (k.transpose(-1, -2) @ v) / math.pi
    weight = count / 2 + q @ k.sum(dim=-2, keepdim=True).transpose(-1, -2) / math.pi
    return tokens_of((numerator / weight).to(dtype))
