# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Variants are the papers' ablations and the models of the committed results."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmengine.model import BaseModule
from mmengine.registry import MODELS

from mmlinattn.attention import Grid
from mmlinattn.tooling.analysis.weights import mixer_weights
from projects.studies.arguments import SOURCES
from projects.studies.task import Classifier
from projects.studies.training import attention_measures, num_parameters
from projects.studies.variants import STUDIES

RESULTS = sorted((Path(__file__).resolve().parents[1] / 'results').glob('*/results.json'))


def test_every_study_has_a_source():
    assert list(SOURCES) == list(STUDIES)


@pytest.mark.parametrize('name', STUDIES)
def test_variants_build_in_the_order_of_the_papers(name):
    study = STUDIES[name]()
    for variant in study.variants.values():
        model = MODELS.build(dict(variant.backbone)).train()
        images = torch.rand(2, 3, 64, 64)
        with torch.no_grad():
            one, other = (model(images)[-1] for _ in range(2))
        assert one.isfinite().all() and torch.equal(one, other)  # no path is dropped
    for better, worse, metric in study.pairs:
        assert better in study.variants and worse in study.variants
        if isinstance(metric, str):  # the paper's own order
            assert study.variants[better].paper[metric] > study.variants[worse].paper[metric]


def test_confused_softmax():
    """Check the weights of each head: equal for queries of one direction, and uniform for negative ones (InLine Tab.
    1)."""
    kind = STUDIES['inline']().variants['softmax, confused'].backbone['stage_attns'][0]['type']
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
    """Parameter counts of all variants, and the blocks, heads and maps of one, as in the saved results.

    Parameters are counted with merged branches; counting leaves the model as it is.
    """
    monkeypatch.setattr(BaseModule, 'init_weights', lambda self: None)  # slow, without effect on sizes
    kept = json.loads(path.read_text())
    variants = STUDIES[kept['study']]().variants
    for run in kept['runs']:
        if run['seed'] == 0:
            with torch.device('meta'):
                assert num_parameters(Classifier(variants[run['variant']].backbone)) == run['params'], run['variant']
    model = Classifier(variants[run['variant']].backbone).eval()
    before = model.state_dict().keys()
    num_parameters(model)
    assert model.state_dict().keys() == before  # the branches are still there
    side = kept['settings']['size']
    seen = attention_measures(model, torch.randint(256, (1, 3, side, side), dtype=torch.uint8))
    parts = ('block', 'mixer', 'heads', 'map', 'key_map', 'sampled_queries')
    assert [[block[part] for part in parts] for block in seen] == [
        [block[part] for part in parts] for block in run['attention']
    ]
