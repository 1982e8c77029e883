# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Tables of the committed results, and verdicts."""

import json

import pytest
from test_variants import RESULTS

from projects.studies import report


@pytest.mark.parametrize('path', RESULTS, ids=[path.parent.name for path in RESULTS])
def test_tables_of_the_committed_results(path):
    assert report.table(json.loads(path.read_text())) == path.with_name('table.md').read_text(encoding='utf-8')


def test_one_seed_has_no_spread():
    assert report.spread([40.0]) == '40.0' and report.spread([40.0, 44.0]) == '42.0 ± 2.8'


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
