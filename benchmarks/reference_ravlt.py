# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Reference implementation of RAVLT for benchmarks and tests.

It has NCHW feature maps with permutes around each LayerNorm and attention, 1x1 convolutions, N x N softmax attention
maps, and one tensor for each factor of RALA Eq. 2-6. It computes the same function as
:class:`mmlinattn.backbones.RAVLT` with its weights.
"""

import torch
import torch.nn.functional as F


def pointwise(x, linear):
    """Apply a linear layer to an NCHW feature map as a 1x1 convolution."""
    return F.conv2d(x, linear.weight[:, :, None, None], linear.bias)


def layer_norm(x, norm):
    """Normalise the channels of an NCHW feature map."""
    return norm(x.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2).contiguous()


def rotate_every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotary(height, width, head_dim, like):
    speed = 10000 ** -torch.linspace(0, 1, head_dim // 4, device=like.device, dtype=like.dtype)
    speed = speed[:, None].repeat(1, 2).flatten()
    rows = torch.arange(height, device=like.device, dtype=like.dtype)[:, None] * speed
    columns = torch.arange(width, device=like.device, dtype=like.dtype)[:, None] * speed
    angles = torch.cat((rows[:, None].repeat(1, width, 1), columns[None].repeat(height, 1, 1)), dim=-1)
    return torch.sin(angles).flatten(0, 1), torch.cos(angles).flatten(0, 1)


def attention(x, attn, softmax, sin, cos):
    height, width = x.shape[2:]
    tokens = height * width
    heads, head_dim = attn.mixer.num_heads, attn.mixer.head_dim
    q, k, v, gate = pointwise(x, attn.qkv).chunk(4, dim=1)
    lepe = F.conv2d(v, attn.local.weight, attn.local.bias, padding=2, groups=v.shape[1])
    q, k, v = (t.reshape(t.shape[0], heads, head_dim, tokens).permute(0, 1, 3, 2).contiguous() for t in (q, k, v))
    if softmax:
        q, k = q * cos + rotate_every_two(q) * sin, k * cos + rotate_every_two(k) * sin
        out = torch.softmax(q @ k.transpose(-1, -2) * head_dim**-0.5, dim=-1) @ v
    else:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        weight = torch.softmax(head_dim**-0.5 * q.mean(dim=-2, keepdim=True) @ k.transpose(-1, -2), dim=-1)
        k = k * weight.transpose(-1, -2) * tokens
        q_rotary, k_rotary = q * cos + rotate_every_two(q) * sin, k * cos + rotate_every_two(k) * sin
        normaliser = 1 / (q @ k.mean(dim=-2, keepdim=True).transpose(-1, -2) + 1e-6)
        state = (k_rotary.transpose(-1, -2) * tokens**-0.5) @ (v * tokens**-0.5)
        out = q_rotary @ state * normaliser
    out = out.permute(0, 1, 3, 2).reshape(x.shape)
    return pointwise((out + lepe) * gate, attn.proj)


def forward(model, x):
    """Return the stage outputs of a RAVLT ``model`` for images ``x`` (B, 3, H, W), computed from its weights in NCHW
    layout."""
    outs = []
    for i in range(model.num_stages):
        x = model.patch_embeds[i].layers(x)
        sin, cos = rotary(x.shape[2], x.shape[3], model.head_dims[i], x)
        for block, spec in zip(model.stages[i], model.block_attns[i]):
            x = x + F.conv2d(x, block.position.weight, block.position.bias, padding=1, groups=x.shape[1])
            branch = attention(layer_norm(x, block.norm1), block.attn, spec == 'softmax', sin, cos)
            x = x + block.gamma1[:, None, None] * branch
            hidden = F.gelu(pointwise(layer_norm(x, block.norm2), block.ffn.fc1))
            dwconv = block.ffn.dwconv
            hidden = hidden + F.conv2d(hidden, dwconv.weight, dwconv.bias, padding=1, groups=hidden.shape[1])
            x = x + block.gamma2[:, None, None] * pointwise(hidden, block.ffn.fc2)
        if i in model.out_indices:
            outs.append(model.out_norms[str(i)](x) if model.out_norm else x)
    return tuple(outs)
