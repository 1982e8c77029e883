# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from ..forms import accumulation_dtype
from ..memory import heads_of, tokens_of
from ..softmax_attention import masked_logit


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int, mask: Optional[Tensor] = None) -> Tensor:
    wide = accumulation_dtype(q)
    q, k, v = heads_of(q, num_heads), heads_of(k, num_heads).to(wide), heads_of(v, num_heads)
    if mask is not None:
        k = k.masked_fill(~mask[:, None, :, None], masked_logit(wide))
    state = k.softmax(dim=-2).transpose(-1, -2) @ v.to(wide)
    # the state is a mean of values: half precision holds it
    return tokens_of(q.softmax(dim=-1, dtype=wide).to(v.dtype) @ state.to(v.dtype))
