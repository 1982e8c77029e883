# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Tables and plots of a study: every column, every dot."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from mmlinattn.analysis import ablation, ablation_report
from mmlinattn.analysis.study_tasks import TASKS


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
32 pictures of 64 x 64 for every arm, 512 pictures to test on, chance 16.7 %. In percent, mean and standard deviation \
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
    assert ablation_report.table(INLINE) == TABLE


def test_a_table_of_another_task():
    """Scores under the task's metric, beside the papers' of the same kind; no chance where there is none."""
    runs = [run('full', seed, 20.0 + seed, 'box_AP') for seed in (0, 1)]
    runs += [run('without CPE', seed, 24.0 - seed, 'box_AP') for seed in (0, 1)]
    lines = ablation_report.table(of('rala', runs, 'detection')).splitlines()
    assert 'test on. In percent' in lines[0] and '400 steps of 16 pictures of 96 x 96' in lines[0]
    assert lines[2:6] == [
        '| arm | seeds | parameters | box AP | paper |',
        '| --- | --- | --- | --- | --- |',
        '| full | 2 | 13 k | 20.5 ± 0.7 | 47.3 COCO box AP |',
        '| without CPE | 2 | 13 k | 23.5 ± 0.7 | 47.0 COCO box AP |',
    ]
    assert lines[-1] == '| full | without CPE | +0.3 (COCO box AP) | -3.0 | -4.0, -2.0 | reversed |'
    # orderings of ImageNet only are none of detection
    runs = [run(arm, 0, 20.0, 'box_AP') for arm in ('relu, injective', 'relu, linear')]
    assert '| relu, injective | relu, linear | not in our tables | +0.0 | +0.0 |' in ablation_report.table(
        of('inline', runs, 'detection')
    )
    # nor where one of the two has a figure
    study = ablation.STUDIES['rala']()
    for pair in (('full', 'gate: tanh'), ('gate: tanh', 'full')):
        printed = ablation_report._paper_difference(study, *pair, 'ImageNet', TASKS['detection'])
        assert printed == 'not in our tables'


def test_results_without_a_word_of_their_task_are_of_the_largest():
    results = of('flatten', [run('focused', 0, 31.0)])
    del results['task']
    text = ablation_report.table(results)
    assert 'name the form of the largest' in text and '| focused | 1 | 13 k | 31.0 |' in text and 'better' not in text


@pytest.fixture
def saved(monkeypatch):
    """Name -> figure that was saved."""
    kept = {}
    monkeypatch.setattr(Figure, 'savefig', lambda self, path, **_: kept.update({path.name: self}))
    return kept


def test_dots_and_curves(saved, tmp_path):
    ablation_report.plot(INLINE, tmp_path / 'plot.png')
    left, right = saved['plot.png'].axes
    names = ['softmax (2)', 'softmax, confused (2)', 'relu, linear (1)', 'relu, injective (1)']
    assert [text.get_text() for text in left.get_yticklabels()] == [*names, 'identity, injective (1)']
    dots, means = left.lines[::2], left.lines[1::2]
    scores = [[40, 44], [42, 38], [40], [36], [30]]  # by seed
    assert [line.get_xdata().tolist() for line in dots] == scores
    assert [set(line.get_ydata()) for line in dots] == [{i} for i in range(5)]
    assert [set(line.get_xdata()) for line in means] == [{np.mean(values)} for values in scores]
    assert [list(line.get_ydata()) for line in means] == [[i - 0.3, i + 0.3] for i in range(5)]
    assert left.get_ylim()[0] > left.get_ylim()[1]  # the first arm on top
    assert left.get_xlabel() == 'accuracy, %: dots are seeds, the line is their mean'
    assert [list(line.get_xdata()) for line in right.lines] == [[2, 4]] * 5
    assert [line.get_ydata().tolist() for line in right.lines] == [[np.mean(v) / 2, np.mean(v)] for v in scores]
    band = right.collections[0].get_paths()[0].vertices
    assert (band[band[:, 0] == 2, 1].min(), band[:, 1].max()) == (20, 44)
    assert right.get_xlabel().startswith('training steps')
    assert right.get_ylabel() == 'accuracy, % (band: lowest and highest seed)'
    assert [line.get_color() for line in dots] == [line.get_color() for line in right.lines]
    assert len({line.get_color() for line in dots}) == 5
    assert [tuple(band.get_facecolor()[0, :3]) for band in right.collections] == [line.get_color() for line in dots]
    assert [to_hex(line.get_color()) for line in dots[:2]] == ['#1f77b4', '#ff7f0e']  # blue, orange
    title = saved['plot.png']._suptitle.get_text()
    assert title == 'study inline, task largest: arms (number of seeds), same pictures and steps for all'


def test_one_seed_that_stands_out_counts_as_the_others_do(saved, tmp_path):
    """Means, no medians: over the seeds in table and plot, and over the blocks of a run."""

    def measured(*values):  # of three blocks, whose mean they are
        return [block(*(value * part for value in values)) for part in (0.5, 0.75, 1.75)]

    attention = [
        measured(1, 2, 3, 0.0, 0.1, 0.1),
        measured(2, 3, 4, 0.1, 0.2, 0.1),
        measured(6, 10, 11, 0.5, 0.45, 0.4),
    ]
    scores = (30.0, 31.0, 44.0)
    runs = [
        run('softmax', seed, score, attention=blocks, masked={'3x3': score / 2})
        for seed, (score, blocks) in enumerate(zip(scores, attention))
    ]
    runs += [run('softmax, confused', seed, 30.0, attention=attention[0]) for seed in range(3)]
    results = of('inline', runs)
    lines = ablation_report.table(results).splitlines()
    measures = '3.0 of 16 | 5.0 of 20 | 6.0 of 24 | 20.00% | 0.250 (0.200)'
    assert f'| softmax | 3 | 13 k | 35.0 ± 7.8 | 72.2 ImageNet | {measures} |' in lines
    ordering = '+0.0, +1.0, +14.0 | within the spread'
    assert f'| softmax | softmax, confused | +1.6 (ImageNet) | +5.0 | {ordering} |' in lines
    assert lines[-1] == '| softmax | 35.0 ± 7.8 | 17.5 ± 3.9 |'
    ablation_report.plot(results, tmp_path / 'plot.png')
    left, right = saved['plot.png'].axes
    assert left.lines[0].get_xdata().tolist() == list(scores) and set(left.lines[1].get_xdata()) == {35}
    assert right.lines[0].get_ydata().tolist() == [17.5, 35]
    band = right.collections[0].get_paths()[0].vertices
    assert {(x, y) for x, y in band.tolist()} == {(2, 15), (2, 22), (4, 30), (4, 44)}
    ablation_report.plot_ranks(results, tmp_path / 'ranks.png')
    assert list(saved['ranks.png'].axes[0].lines[0].get_xdata()) == [1, 2, 6]


def test_every_arm_of_a_large_study_has_its_own_colour():
    runs = {str(i): [] for i in range(11)}
    assert len({colour for colour, _ in ablation_report._coloured(runs)}) == 11
    assert len(ablation_report._coloured({str(i): [] for i in range(21)})) == 21


def test_scores_over_ranks(saved, tmp_path):
    """A model without a state has no dot there, and one in the other panels."""
    assert ablation_report.plot_ranks(INLINE, tmp_path / 'ranks.png')
    figure = saved['ranks.png']
    state, output, projected = figure.axes
    words = ['state of keys and values', 'output of the heads', 'with convolution and gate, as projected']
    assert [axis.get_title() for axis in figure.axes] == words
    arms = ['softmax', 'softmax, confused', 'relu, linear', 'relu, injective', 'identity, injective']
    assert [line.get_label() for line in output.lines] == arms
    assert [line.get_label() for line in state.lines] == [arm for arm in arms if arm != 'relu, linear']
    assert list(state.lines[0].get_xdata()) == [3, 5] and list(state.lines[0].get_ydata()) == [40, 44]
    assert list(output.lines[2].get_xdata()) == [3] and list(projected.lines[4].get_xdata()) == [5.5]
    most = [axis.get_xlabel() for axis in figure.axes]
    assert most == [f'effective rank, mean over blocks (at most {most})' for most in (16, 20, 24)]
    assert state.get_ylabel() == 'accuracy, %'
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(arms)
    title = figure._suptitle.get_text()
    assert title == 'study inline, task largest: a dot a trained model, its ranks and its accuracy'
    without = of('inline', [run('softmax', 0, 40.0)])
    assert not ablation_report.plot_ranks(without, tmp_path / 'none.png') and 'none.png' not in saved


def test_the_largest_rank_there_may_be_is_that_of_all_arms(saved, tmp_path):
    larger = dict(rank=dict(state=dict(effective=5.0, at_most=32)))
    runs = [run('softmax', 0, 40.0, attention=BLOCKS), run('relu, linear', 0, 30.0, attention=[larger])]
    for name, mixed in (('one.png', runs), ('other.png', [dict(r, arm=a['arm']) for r, a in zip(runs, runs[::-1])])):
        ablation_report.plot_ranks(of('inline', mixed), tmp_path / name)
        assert saved[name].axes[0].get_xlabel() == 'effective rank, mean over blocks (at most 32)'
        # scores on one scale, though one of the two has no dot in the other panels
        assert len({axis.get_ylim() for axis in saved[name].axes}) == 1 and len(saved[name].axes) == 3


@pytest.mark.parametrize('seed', [0, 1])
def test_masked_scores_stand_beside_those_of_the_same_runs(seed):
    """Of two runs one, the first or the second, was measured with masked weights."""
    runs = [run('softmax', i, 40.0 + i, **(dict(masked=MASKED) if i == seed else {})) for i in (0, 1)]
    lines = ablation_report.table(of('inline', runs)).splitlines()
    assert lines[-1] == f'| softmax | {40 + seed}.0 | 20.0 | 40.0 |'


def test_what_is_written(saved, tmp_path):
    assert ablation_report.write(of('inline', []), tmp_path) == [] and not list(tmp_path.iterdir())
    paths = ablation_report.write(INLINE, tmp_path)
    assert [path.name for path in paths] == ['results.json', 'table.md', 'plot.png', 'ranks.png']
    assert {path.parent for path in paths} == {tmp_path} and set(saved) == {'plot.png', 'ranks.png'}
    assert paths[1].read_text(encoding='utf-8') == TABLE
    paths = ablation_report.write(of('inline', [run('softmax', 0, 40.0)]), tmp_path)
    assert [path.name for path in paths] == ['results.json', 'table.md', 'plot.png']


def test_means_of_blocks():
    """Of the blocks that have a number; single heads count alike, what is not of a number is kept."""
    found = ablation_report.attention_of(dict(attention=[BLOCKS[0], block(None, 5.0, 8.0, 0.5, 0.5, 0.5), {}]))
    assert found == dict(state=(2, 16), output=(4, 20), projected=(6, 24), confused=(0.375, None), local=(0.5, 0.3125))
    assert ablation_report.attention_of(dict(attention=[])) == {}
    none = [dict(confusion=dict(share=share)) for share in (0.0, 0.5)]  # a share of zero is a number
    assert ablation_report.attention_of(dict(attention=none)) == dict(confused=(0.25, None))
    assert ablation_report.attention_of(dict(attention=none[:1])) == dict(confused=(0.0, None))
    entry = dict(block='a', heads=2, share=[0.25, 0.75], map=dict(rank=[1, 3], empty=[]), names=['a', 'b'])
    expected = dict(block='a', heads=2, share=0.5, map=dict(rank=2, empty=[]), names=['a', 'b'])
    assert ablation._over_heads(entry) == expected


def test_ranges_that_touch_and_arms_of_before():
    assert ablation_report.verdict([1, 2], [2, 3]) == ablation_report.verdict([2, 3], [1, 2]) == 'within the spread'
    assert ablation_report.verdict([3, 4], [1]) == ablation_report.verdict([3], [1, 2]) == 'one seed'
    lines = ablation_report.table(of('flatten', [run('of before', 0, 30.0), run('focused', 0, 31.0)])).splitlines()
    assert lines[4:6] == ['| focused | 1 | 13 k | 31.0 |', '| of before | 1 | 13 k | 30.0 |']


def test_spread():
    assert ablation_report.spread([40.0]) == '40.0'
    assert ablation_report.spread([40.0, 43.0]) == f'41.5 ± {math.sqrt(4.5):.1f}'  # of a sample: n - 1
