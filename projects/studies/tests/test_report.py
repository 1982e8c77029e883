# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Tables and plots of a study: every column, every dot."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from projects.studies import report
from projects.studies.tasks import TASKS


def block(state, output, projected, confused, local, uniform):
    return dict(
        rank=dict(
            **({} if state is None else dict(state=dict(effective=state, at_most=16))),
            output=dict(effective=output, at_most=20),
            projected=dict(effective=projected, at_most=24),
        ),
        confusion=dict(share=confused),
        locality=dict(share=local, sum=9.0, if_uniform=uniform),
    )


def run(arm, seed, score, metric='accuracy', attention=(), **more):
    attention = list(attention)
    return dict(arm=arm, seed=seed, params=12_600, curve=[[2, score / 2], [4, score]], attention=attention, **more) | {
        metric: score
    }


def of(study, runs, task='largest'):
    return dict(study=study, task=task, settings=TASKS[task].settings._asdict(), runs=runs)


BLOCKS = [block(2.0, 3.0, 4.0, 0.25, 0.5, 0.125), block(4.0, 5.0, 7.0, 0.75, 0.25, 0.25)]
MASKED = {'3x3': 20.0, '9 others': 40.0}
# later seeds first, as processes that share a study may write them
INLINE = of(
    'inline',
    [
        run('identity, injective', 0, 30.0, attention=BLOCKS),
        run('relu, injective', 0, 36.0, attention=BLOCKS[:1]),
        run('relu, linear', 1, 40.0, attention=[block(None, 3.0, 4.0, 0.5, 0.5, 0.125)]),
        run('softmax', 1, 44.0, attention=[block(5.0, 6.0, 8.5, 0.0, 0.5, 0.25)], masked=MASKED),
        run('softmax', 0, 40.0, attention=BLOCKS, masked={'3x3': 10.0, '9 others': 40.0}),
        run('softmax, confused', 1, 38.0, attention=BLOCKS),
        run('softmax, confused', 0, 42.0, attention=BLOCKS),
    ],
)
TABLE = """\
Study `inline` (InLine Tab. 1-4); task: name the form of the largest of three to five shapes in clutter. 300 steps of \
32 images of 64 x 64 for every arm, 512 images to test on, chance 16.7 %. In percent, mean and standard deviation \
over seeds.

| arm | seeds | parameters | accuracy | paper | effective rank of the state | effective rank of the output | \
as projected | confused pairs | weight in 3x3 (if uniform) |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| softmax | 2 | 13 k | 42.0 ± 2.8 | 72.2 ImageNet | 4.0 of 16 | 5.0 of 20 | 7.0 of 24 | 25.00% | 0.438 (0.219) |
| softmax, confused | 2 | 13 k | 40.0 ± 2.8 | 70.6 ImageNet | 3.0 of 16 | 4.0 of 20 | 5.5 of 24 | 50.00% | \
0.375 (0.188) |
| relu, linear | 1 | 13 k | 40.0 |  |  | 3.0 of 20 | 4.0 of 24 | 50.00% | 0.500 (0.125) |
| relu, injective | 1 | 13 k | 36.0 |  | 2.0 of 16 | 3.0 of 20 | 4.0 of 24 | 25.00% | 0.500 (0.125) |
| identity, injective | 1 | 13 k | 30.0 |  | 3.0 of 16 | 4.0 of 20 | 5.5 of 24 | 50.00% | 0.375 (0.188) |

| better in the paper | than | paper | here | seed by seed | ordering |
| --- | --- | --- | --- | --- | --- |
| softmax | softmax, confused | +1.6 (ImageNet) | +2.0 | -2.0, +6.0 | within the spread |
| relu, injective | relu, linear | +2.5 (ImageNet) |  |  | one seed |

| accuracy with masked weights | none | 3x3 | 9 others |
| --- | --- | --- | --- |
| softmax | 42.0 ± 2.8 | 15.0 ± 7.1 | 40.0 ± 0.0 |
"""


def test_the_whole_table_of_a_study():
    assert report.table(INLINE) == TABLE


def test_a_table_of_another_task():
    """Scores under the task's metric, beside the papers' of the same kind; no chance where there is none."""
    runs = [run('full', seed, 20.0 + seed, 'box_AP') for seed in (0, 1)]
    runs += [run('without CPE', seed, 24.0 - seed, 'box_AP') for seed in (0, 1)]
    lines = report.table(of('rala', runs, 'detection')).splitlines()
    assert 'test on. In percent' in lines[0] and '400 steps of 16 images of 96 x 96' in lines[0]
    assert lines[2:6] == [
        '| arm | seeds | parameters | box AP | paper |',
        '| --- | --- | --- | --- | --- |',
        '| full | 2 | 13 k | 20.5 ± 0.7 | 47.3 COCO box AP |',
        '| without CPE | 2 | 13 k | 23.5 ± 0.7 | 47.0 COCO box AP |',
    ]
    assert lines[-1] == '| full | without CPE | +0.3 (COCO box AP) | -3.0 | -4.0, -2.0 | reversed |'
    # orderings of ImageNet only are none of detection
    runs = [run(arm, 0, 20.0, 'box_AP') for arm in ('relu, injective', 'relu, linear')]
    assert '| relu, injective | relu, linear | not in our tables | +0.0 | +0.0 |' in report.table(
        of('inline', runs, 'detection')
    )


def test_results_without_a_word_of_their_task_are_of_the_largest():
    results = of('flatten', [run('focused', 0, 31.0)])
    del results['task']
    text = report.table(results)
    assert 'name the form of the largest' in text and '| focused | 1 | 13 k | 31.0 |' in text and 'better' not in text


@pytest.mark.parametrize('seed', [0, 1])
def test_masked_scores_stand_beside_those_of_the_same_runs(seed):
    """Of two runs one, the first or the second, was measured with masked weights."""
    runs = [run('softmax', i, 40.0 + i, **(dict(masked=MASKED) if i == seed else {})) for i in (0, 1)]
    lines = report.table(of('inline', runs)).splitlines()
    assert lines[-1] == f'| softmax | {40 + seed}.0 | 20.0 | 40.0 |'


@pytest.mark.parametrize(
    ('better', 'worse', 'found'),
    [
        ([3, 4], [1, 2], 'holds'),
        ([1, 2], [3, 4], 'reversed'),
        ([1, 3], [2, 4], 'within the spread'),
        ([1, 9], [2, 3], 'within the spread'),
        ([3, 4], [2, 3], 'within the spread'),
        ([3], [1, 2], 'one seed'),
        ([3, 4], [1], 'one seed'),
    ],
)
def test_verdicts(better, worse, found):
    assert report.verdict(better, worse) == found


def test_means_are_of_seeds_that_both_arms_have():
    runs = [run('full', 0, 60.0), run('full', 1, 62.0), run('of before', 0, 1.0)]
    runs += [run('without CPE', 1, 60.5), run('without CPE', 2, 1.0)]
    lines = report.table(of('rala', runs)).splitlines()
    assert '| full | without CPE | +0.1 (ImageNet) | +1.5 | +1.5 | within the spread |' in lines
    assert any(line.startswith('| of before | 1 |') for line in lines)


def test_what_is_written(monkeypatch, tmp_path):
    """One dot a run and one curve an arm."""
    kept, save = {}, Figure.savefig
    monkeypatch.setattr(
        Figure, 'savefig', lambda self, path, **k: kept.update({path.name: self}) or save(self, path, **k)
    )
    assert report.write(of('inline', []), tmp_path) == []
    paths = report.write(INLINE, tmp_path)
    assert [path.name for path in paths] == ['results.json', 'table.md', 'plot.png']
    assert all(path.is_file() for path in paths[1:]) and paths[1].read_text(encoding='utf-8') == TABLE
    left, right = kept['plot.png'].axes
    scores = [[40, 44], [42, 38], [40], [36], [30]]  # by seed
    assert [line.get_xdata().tolist() for line in left.lines[::2]] == scores
    assert [set(line.get_xdata()) for line in left.lines[1::2]] == [{np.mean(values)} for values in scores]
    assert [line.get_ydata().tolist() for line in right.lines] == [[np.mean(v) / 2, np.mean(v)] for v in scores]
    assert len({line.get_color() for line in right.lines}) == 5
