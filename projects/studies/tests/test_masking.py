# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The masking experiment (InLine Tab. 2): which keys lose their weights, and what becomes of the rest."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import DATASETS
from torch import nn

from mmlinattn.attention import GlobalAttention, Grid, ReducedAttention, StageContext, WindowAttention, get_mixer
from mmlinattn.backbones import LinearDeiT
from mmlinattn.ops.tensors import merge_heads, split_heads
from mmlinattn.tooling.analysis import measures
from mmlinattn.tooling.analysis.weights import mixer_weights
from mmlinattn.utils.errors import RunError
from projects.studies import masking
from projects.studies.masking import masked, masked_weights, masking_accuracies


def places(height, width):
    index = torch.arange(height * width)
    return torch.stack((index // width, index % width), dim=-1)


@pytest.mark.parametrize('others', [False, True])
@pytest.mark.parametrize('window', [1, 3, 5, 7])
def test_which_keys_are_masked(window, others):
    """Each in its neighbourhood, or as many as a whole one outside of it; values of one head that show the weights."""
    grid, at = Grid(9, 10), places(9, 10)
    mixer = get_mixer('softmax')[0](90, 1)
    q, k, v = torch.zeros(1, 90, 90), torch.zeros(1, 90, 90), torch.eye(90)[None]
    with masked(mixer, window, others):
        out = mixer(q, k, v, grid, grid)[0]
    hidden, near = out < 1e-5, measures.neighbours(at, at, window // 2)
    torch.testing.assert_close(out.sum(dim=1), torch.ones(90))
    if not others:
        assert torch.equal(hidden, near)
        return
    assert not (hidden & near).any()
    assert torch.equal(hidden.sum(dim=1), (90 - near.sum(dim=1)).clamp(max=window**2))


MIXERS = [
    *('softmax', 'rala', 'efficient', 'enhanced', 'hydra', 'hallucinated'),
    dict(type='inline'),
    dict(type='focused'),
    dict(type='angular', form='paper'),
    dict(type='angular', conv=None),
]


@pytest.mark.parametrize('mixer', MIXERS, ids=str)
def test_the_rest_of_an_attention_stays_as_it_is(mixer):
    """Convolutions of the values, divisors that are no sums, outputs of length one; with a mask and a bias."""
    kind, options = get_mixer(mixer)
    mixer, grid, at = kind(8, 2, grid=(4, 5), **options).eval(), Grid(4, 5), places(4, 5)
    q, k, v = (torch.randn(2, 20, width).abs() for width in mixer.widths)
    mask = torch.arange(20).expand(2, 20) != 7
    given = dict(mask=mask, bias=torch.randn(1, mixer.num_heads, 20, 20) if mixer.bias else None)
    v = v * mask.unsqueeze(-1)
    weights = mixer_weights(mixer, q, k, grid, grid, **given)
    rest = weights.masked_fill(measures.neighbours(at, at), 0)
    if mixer.normalised:
        rest = rest / rest.sum(dim=-1, keepdim=True)
    whole, expected = (w @ split_heads(v, mixer.num_heads) for w in (weights, rest))
    if mixer.unit_output:
        whole, expected = F.normalize(whole, dim=-1), F.normalize(expected, dim=-1)
    context = torch.randn(2, 8) if mixer.context else None
    with torch.no_grad():
        plain = mixer(q.clone(), k.clone(), v, grid, grid, context=context, **given)
        with masked(mixer, 3):
            out = mixer(q.clone(), k.clone(), v, grid, grid, context=context, **given)
    torch.testing.assert_close(out - plain, merge_heads(expected - whole), rtol=1e-3, atol=1e-4)
    assert not mixer._forward_hooks and not mixer._forward_pre_hooks


def test_the_rest_of_the_weights_is_scaled():
    weights = torch.tensor([[[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [-0.25, 0.5, 0.75]]]])
    near = torch.tensor([[True, False, False]] * 3)
    assert masked_weights(weights, near)[0, 0].tolist() == [[0, 0.5, 0.5], [0, 0, 0], pytest.approx([0, 0.4, 0.6])]
    # what is left is next to nothing: its sign stays
    rest = masked_weights(torch.tensor([[[[1.0, -1e-7], [1.0, 1e-7]]]]), torch.tensor([[True, False]] * 2))
    assert rest[0, 0, :, 1].tolist() == pytest.approx([0.1, 0.1])
    # random others are keys that have a weight, image by image, in any head: what padding has cannot be lost
    weights = torch.zeros(2, 2, 1, 12)
    weights[0, 0, 0, [0, 5, 6]], weights[0, 1, 0, [0, 7]], weights[1, :, 0, [0, 3, 4, 8]] = 1, 1, 1
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        rest = masked_weights(weights, torch.arange(12)[None] == 0, 2, generator, divide=False)
        assert ((weights != 0) & (rest == 0)).any(dim=1).sum(dim=-1).tolist() == [[2], [2]]
        assert (rest[..., 0] == weights[..., 0]).all()


def test_random_keys_are_those_of_the_seed():
    grid, (q, k, v) = Grid(6, 6), torch.randn(3, 1, 36, 8)
    mixer = get_mixer('softmax')[0](8, 2)

    def out(*seed):
        with masked(mixer, 3, True, *seed):
            return [mixer(q.clone(), k.clone(), v, grid, grid) for _ in range(2)]

    first, again, other = out(0), out(), out(1)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.allclose(first[0], other[0]) and not torch.allclose(first[0], first[1])  # anew for each call
    with pytest.raises(KeyError), masked(mixer, 3):
        raise KeyError
    assert not mixer._forward_hooks and not mixer._forward_pre_hooks


def test_weights_are_built_in_parts(monkeypatch):
    """However few fit at a time, they are the same."""
    attention, x = GlobalAttention(8, 2, 'inline').eval(), torch.randn(2, 4, 5, 8)
    found = []
    for numel in (masking.BLOCK_NUMEL, 3 * 2 * 2 * 20, 1):
        monkeypatch.setattr(masking, 'BLOCK_NUMEL', numel)
        with masked(attention, 3):
            found.append(attention(x, StageContext.of(x)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_neighbourhoods_on_reduced_keys_are_of_cells():
    """4 x 6 queries, keys of 2 x 2 cells: without the cell of the query itself, five are left."""
    attention = ReducedAttention(8, 2, 'softmax', 2, dict(type='LN')).eval()
    nn.init.eye_(attention.proj.weight), nn.init.zeros_(attention.proj.bias)
    given = []
    attention.mixer.register_forward_pre_hook(lambda mixer, args, kwargs: given.append(args), with_kwargs=True)
    with masked(attention, 1):
        x = torch.randn(1, 4, 6, 8)
        out = attention(x, StageContext.of(x))
    q, k, v, grid, key_grid = given[0][:5]
    index = torch.arange(24)
    own = F.one_hot(index // 6 // 2 * 3 + index % 6 // 2, 6).bool()
    expected = masked_weights(mixer_weights(attention.mixer, q, k, grid, key_grid), own) @ split_heads(v, 2)
    torch.testing.assert_close(out, merge_heads(expected).view_as(out), rtol=1e-4, atol=1e-5)


def test_class_tokens_and_other_regions_of_a_rolled_map_are_no_neighbours():
    model = LinearDeiT(dict(embed_dims=(32,), depths=(1,), num_heads=(2,), stage_attns=('softmax',))).eval()
    with masked(model, 99):  # the class token alone is left
        out = model(torch.randn(1, 3, 64, 64))[0]
    assert out.isfinite().all()
    attention, x = WindowAttention(8, 2, 'softmax', (4, 4), shift=True).eval(), torch.randn(1, 8, 8, 8)
    with masked(attention, 3, True):
        assert attention(x, StageContext.of(x)).isfinite().all()


class Averaged(ReducedAttention):
    reduction = 'sequence'


@pytest.mark.parametrize('window', [0, 2, -1])
def test_windows_and_keys_without_a_neighbourhood(window):
    with pytest.raises(ValueError, match=f'window={window} has to be odd'), masked(nn.Identity(), window):
        pass
    with pytest.raises(ValueError, match='have no neighbourhood'):
        with masked(Averaged(8, 2, 'softmax', 2, dict(type='LN')), 3):
            pass


# --- accuracies -------------------------------------------------------------------------------------------------------


class Numbers:
    def __init__(self, number, gone=None):
        if gone:
            raise gone('gone')
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, i):
        return dict(inputs=torch.tensor([float(i)]), data_samples=i)


class Guesses(nn.Module):
    """Right about every image whose number is no multiple of its divisor; what is masked changes that."""

    def __init__(self, variant):
        super().__init__()
        self.variant = variant

    def test_step(self, batch):
        divisor = {(): 100, ((3, False),): 2, ((3, True),): 5}.get(tuple(self.variant), 3)
        return [
            SimpleNamespace(pred_label=torch.tensor(i), gt_label=torch.tensor([99, i + (i % divisor == 0)]))
            for i in batch['data_samples']
        ]


def test_accuracies_with_masked_weights(monkeypatch):
    monkeypatch.setitem(DATASETS._module_dict, 'Numbers', Numbers)
    variant, done = [], []

    @contextlib.contextmanager
    def masked(model, window, others):
        variant.append((window, others))
        yield
        variant.pop()

    monkeypatch.setattr(masking, 'masked', masked)
    loader = dict(dataset=dict(type='Numbers', number=40))
    found = masking_accuracies(Guesses(variant), loader, 20, lambda *args: done.append(args))
    assert found['images'] == 20 and list(found['accuracy'].items()) == [
        *(('none', 95), ('3x3', 50), ('9 others', 80)),
        *((name, 65) for name in ('5x5', '25 others', '7x7', '49 others')),
    ]
    assert {total for _, total in done} == {140} and sum(n for n, _ in done) == 140
    assert masking_accuracies(Guesses(variant), loader, 50)['images'] == 40  # all there are
    for kind in (FileNotFoundError, ValueError, KeyError, AssertionError):
        loader['dataset']['gone'] = kind
        with pytest.raises(RunError, match="the test data cannot be read: '?gone'?; --data-root"):
            masking_accuracies(Guesses(variant), loader, 20)
