# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Tables and plots of a study: every column, every dot."""

import pytest

from projects.studies import report
from projects.studies.task import Settings


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


def run(variant, seed, score, attention=()):
    curve = [[2, score / 2], [4, score]]
    return dict(variant=variant, seed=seed, params=12_600, curve=curve, attention=list(attention), accuracy=score)


def of(study, runs):
    return dict(study=study, settings=Settings()._asdict(), runs=runs)


BLOCKS = [block(2.0, 3.0, 4.0, 0.25, 0.5, 0.125), block(4.0, 5.0, 7.0, 0.75, 0.25, 0.25)]
# later seeds first, as processes that share a study may write them
INLINE = of(
    'inline',
    [
        run('identity, injective', 0, 30.0, attention=BLOCKS),
        run('relu, injective', 0, 36.0, attention=BLOCKS[:1]),
        run('relu, linear', 1, 40.0, attention=[block(None, 3.0, 4.0, 0.5, 0.5, 0.125)]),
        run('softmax', 1, 44.0, attention=[block(5.0, 6.0, 8.5, 0.0, 0.5, 0.25)]),
        run('softmax', 0, 40.0, attention=BLOCKS),
        run('softmax, confused', 1, 38.0, attention=BLOCKS),
        run('softmax, confused', 0, 42.0, attention=BLOCKS),
    ],
)
TABLE = """\
Study `inline` (InLine Tab. 1, 3 and 4); task: name the form of the largest of three to five shapes in clutter. 300 \
steps of 32 images of 64 x 64 for every variant, 512 images to test on, chance 16.7 %. In percent, mean and standard \
deviation over seeds.

| variant | seeds | parameters | accuracy | paper | effective rank of the state | effective rank of the output | \
as projected | confused pairs | weight in 3x3 (if uniform) |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| softmax | 2 | 13 k | 42.0 ± 2.8 | 72.2 ImageNet | 4.0 of 16 | 5.0 of 20 | 7.0 of 24 | 25.00% | 0.438 (0.219) |
| softmax, confused | 2 | 13 k | 40.0 ± 2.8 | 70.6 ImageNet | 3.0 of 16 | 4.0 of 20 | 5.5 of 24 | 50.00% | \
0.375 (0.188) |
| relu, linear | 1 | 13 k | 40.0 |  |  | 3.0 of 20 | 4.0 of 24 | 50.00% | 0.500 (0.125) |
| relu, injective | 1 | 13 k | 36.0 |  | 2.0 of 16 | 3.0 of 20 | 4.0 of 24 | 25.00% | 0.500 (0.125) |
| identity, injective | 1 | 13 k | 30.0 |  | 3.0 of 16 | 4.0 of 20 | 5.5 of 24 | 50.00% | 0.375 (0.188) |

| better in the paper | than | paper | here | ordering |
| --- | --- | --- | --- | --- |
| softmax | softmax, confused | +1.6 (ImageNet) | +2.0 | within the spread |
| relu, injective | relu, linear | +2.5 (ImageNet) | -4.0 | one seed |
"""


def test_the_whole_table_of_a_study():
    assert report.table(INLINE) == TABLE


@pytest.mark.parametrize(
    ('better', 'worse', 'found'),
    [
        ([3, 4], [1, 2], 'holds'),
        ([1, 2], [3, 4], 'reversed'),
        ([1, 3], [2, 4], 'within the spread'),
        ([3, 4], [2, 3], 'within the spread'),
        ([3], [1, 2], 'one seed'),
        ([3, 4], [1], 'one seed'),
    ],
)
def test_verdicts(better, worse, found):
    assert report.verdict(better, worse) == found
