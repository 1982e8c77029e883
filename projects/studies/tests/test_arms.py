# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The arms are models of the papers' ablations, and those that the results in the repository are of."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmengine.model import BaseModule
from mmengine.registry import MODELS

from mmlinattn.attention import TOKEN_MIXERS, Grid, TokenMixer
from mmlinattn.tooling.analysis.weights import mixer_weights
from projects.studies.arms import STUDIES
from projects.studies.tasks import FIRST_TASK, TASKS
from projects.studies.training import attention_measures, num_parameters

RESULTS = sorted((Path(__file__).resolve().parents[1] / 'results').glob('*/results.json'))
PRINTED = dict(
    rala={
        'full': (82.8, 47.3, 47.9),
        'without KV augmentation': (82.1, 43.7, 43.6),
        'without output gate': (82.5, 46.3, 47.0),
        'without CPE': (82.7, 47.0, 47.6),
        'gate: identity': (82.8,),
        'gate: tanh': (82.7,),
        'kernel: relu': (82.8,),
        'kernel: softmax': (82.7,),
    },
    inline={'softmax': (72.2,), 'softmax, confused': (70.6,)},
    hallucinated={
        'plain': (69.3,),
        'copies': (68.8,),
        'IHH': (69.4,),
        'CHH': (69.2,),
        'IHH, CHH': (69.7,),
        'CHH, IHH': (69.3,),
        'smaller FFN ratio': (68.8,),
        'cFFN, r = 1': (69.1,),
        'cFFN, r = 2': (70.2,),
        'cFFN, r = 3': (70.0,),
        'cFFN of M1, r = 2': (70.0,),
    },
)


@pytest.mark.parametrize('name', STUDIES)
def test_arms_build_and_say_what_papers_print(name):
    study = STUDIES[name]()
    for arm in study.arms.values():
        model = MODELS.build(dict(arm.backbone)).train()
        images = torch.rand(2, 3, 64, 64)
        with torch.no_grad():
            one, other = (model(images)[-1] for _ in range(2))
        assert one.isfinite().all() and torch.equal(one, other)  # no path is dropped
    for better, worse, metric in study.pairs:
        assert better in study.arms and worse in study.arms
        if isinstance(metric, str):  # the paper's own order
            assert study.arms[better].paper[metric] > study.arms[worse].paper[metric]
    printed = {arm: tuple(value.paper.values()) for arm, value in study.arms.items() if value.paper}
    assert printed == PRINTED.get(name, {})


def test_every_attention_is_an_arm():
    arms = STUDIES['attentions']().arms
    assert {name: arm.backbone['stage_attns'] for name, arm in arms.items()} == {
        name: (name, name) for name in TOKEN_MIXERS.module_dict
    }


def mixers(study, arm):
    model = MODELS.build(dict(STUDIES[study]().arms[arm].backbone))
    return [module for module in model.modules() if isinstance(module, TokenMixer)]


def test_arms_differ_in_what_they_are_called_by():
    for mixer in mixers('flatten', 'focused, depth-wise'):
        assert mixer.focus and mixer.power == 3 and mixer.local.kernel_size == (5, 5)
    for mixer in mixers('flatten', 'relu linear'):
        assert not mixer.focus and mixer.local is None
    for mixer in mixers('inline', 'identity, injective, local residual'):
        assert mixer.kernel == 'identity' and mixer.injective and mixer.residual is not None
    for mixer in mixers('inline', 'exp, linear'):
        assert mixer.kernel == 'exp' and not mixer.injective and mixer.residual is None
    for mixer in mixers('hallucinated', 'CHH, IHH'):
        assert mixer.steps == ('chh', 'ihh')
    arms = STUDIES['rala']().arms
    sizes = {name: sum(p.numel() for p in MODELS.build(dict(arm.backbone)).parameters()) for name, arm in arms.items()}
    # the wider feed-forward network of the arms without a gate makes up for it (RALA Tab. 9)
    assert all(abs(size / sizes['full'] - 1) < 0.02 for size in sizes.values())


def test_confused_softmax():
    """InLine Tab. 1: by head, queries of one direction are one, and what is negative is nothing."""
    kind = STUDIES['inline']().arms['softmax, confused'].backbone['stage_attns'][0]['type']
    mixer, grid = kind(8, 2), Grid(1, 5)
    q, k, v = torch.randn(3, 1, 5, 8)
    q[0, 1] = torch.cat((3 * q[0, 0, :4], 0.5 * q[0, 0, 4:]))
    q[0, 2] = -q[0, 2].abs()
    unit = [F.normalize(head.relu(), dim=-1) for head in q.split(4, dim=-1)]
    expected = [(u @ key.mT / 2).softmax(-1) for u, key in zip(unit, k.split(4, dim=-1))]
    weights = mixer_weights(mixer, q.clone(), k.clone(), grid, grid)[0]
    torch.testing.assert_close(weights, torch.cat(expected))
    torch.testing.assert_close(weights[:, 0], weights[:, 1])
    torch.testing.assert_close(weights[:, 2], torch.full((2, 5), 0.2))
    out = mixer(q.clone(), k.clone(), v, grid, grid)
    torch.testing.assert_close(out, torch.cat([e @ value for e, value in zip(expected, v.split(4, dim=-1))], dim=-1))


@pytest.mark.parametrize('path', RESULTS, ids=[path.parent.name for path in RESULTS])
def test_models_are_those_of_the_results(path, monkeypatch):
    """Parameters of every arm, branches merged; blocks, heads and maps of one."""
    monkeypatch.setattr(BaseModule, 'init_weights', lambda self: None)  # changes no size, takes most of the time
    kept = json.loads(path.read_text())
    task, arms = TASKS[kept.get('task', FIRST_TASK)], STUDIES[kept['study']]().arms
    if task.metric == 'box_AP':
        pytest.importorskip('mmdet')
    for run in kept['runs']:
        if run['seed'] == 0:
            with torch.device('meta'):
                assert num_parameters(task.build(arms[run['arm']].backbone)) == run['params'], run['arm']
    model = task.build(arms[run['arm']].backbone).eval()
    before = model.state_dict().keys()
    num_parameters(model)
    assert model.state_dict().keys() == before  # the branches are still there
    side = kept['settings']['size']
    seen = attention_measures(model, torch.randint(256, (1, 3, side, side), dtype=torch.uint8))
    parts = ('block', 'mixer', 'heads', 'map', 'key_map', 'sampled_queries')
    assert [[block[part] for part in parts] for block in seen] == [
        [block[part] for part in parts] for block in run['attention']
    ]
