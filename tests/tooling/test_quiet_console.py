# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Records that the console hides, and the log file has; warnings of dependencies."""

import io
import logging
import re
import sys
import warnings

import pytest
from helpers.engine_toys import Count, make_runner, validation

from mmlinattn.tooling.console import HIDDEN, quiet_console, quiet_upstream
from mmlinattn.tooling.running import ToolRunner

INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR
RECORDS = [(INFO, HIDDEN[0]), (WARNING, f'{HIDDEN[-1]} x'), (ERROR, f'{HIDDEN[-1]} y'), (INFO, f'Not {HIDDEN[1]}')]


@pytest.mark.parametrize(('level', 'shown'), [(INFO, RECORDS[2:]), (logging.DEBUG, RECORDS)])
def test_records_by_their_beginning_and_level(tmp_path, level, shown):
    logger, console = logging.Logger('mine'), io.StringIO()
    for handler in (logging.StreamHandler(console), logging.FileHandler(tmp_path / 'a.log')):
        handler.setLevel(level)
        logger.addHandler(handler)
    quiet_console(logger)
    for record in RECORDS:
        logger.log(*record)
    assert console.getvalue() == ''.join(f'{text}\n' for _, text in shown)
    assert (tmp_path / 'a.log').read_text() == ''.join(f'{text}\n' for _, text in RECORDS)


def test_a_run_shows_its_course_alone(tmp_path, capsys):
    make_runner(tmp_path, [], kind=ToolRunner, log_level='INFO', **validation(dict(type=Count))).train()
    lines = capsys.readouterr().out.splitlines()
    course = re.compile(r'.* - mmengine - .* - (Epoch\((train|val)\) \[|Saving checkpoint|`save_param_scheduler` is)')
    assert lines and [line for line in lines if not course.match(line)] == []


@pytest.mark.parametrize('options', [[], ['default']])
def test_warnings_of_dependencies_are_shown_by_an_option_of_python(monkeypatch, options):
    monkeypatch.setattr(sys, 'warnoptions', options)
    monkeypatch.setitem(sys.modules, 'pycocotools', None)  # its print stays as it is in this process
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter('always')
        quiet_upstream()
        for text, kind in (('old', FutureWarning), ('x is deprecated', UserWarning), ('mine', UserWarning)):
            warnings.warn(text, kind, stacklevel=2)
    assert [str(each.message) for each in shown] == ['old', 'x is deprecated', 'mine'][0 if options else 2 :]
