# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""pytest plugin (``-p touched``): which test touches which line, and how long each test takes.

Coverage runs since the start of each process (``COVERAGE_PROCESS_START``); here it is told the name of the test. Of the
cases of a parametrised test some are run, drawn by ``MUTANTS_SEED``: one that is left out touches much the same lines.
"""

import json
import os
import random
from collections import defaultdict
from pathlib import Path

import coverage
import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keep ``MUTANTS_CASES`` cases of each test function."""
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition('[')[0]].append(item)
    chance = random.Random(os.environ['MUTANTS_SEED'])
    number = int(os.environ['MUTANTS_CASES'])
    kept = {item for cases in functions.values() for item in chance.sample(cases, min(number, len(cases)))}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Lines touched from here on are this test's, its fixtures' included."""
    current = coverage.Coverage.current()
    current.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        current.switch_context('')


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """One line a test that passed: name and seconds, those of its fixtures too."""
    report = yield
    item.mutant_seconds = getattr(item, 'mutant_seconds', 0) + report.duration
    item.mutant_failed = getattr(item, 'mutant_failed', False) or not report.passed
    if report.when == 'teardown' and not item.mutant_failed:
        path = Path(os.environ['MUTANTS_OUT']) / f'passed.{os.getpid()}.jsonl'
        with open(path, 'a') as stream:
            stream.write(json.dumps([item.nodeid, round(item.mutant_seconds, 3)]) + '\n')
    return report
