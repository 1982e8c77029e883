# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Records that the console hides, and the log file has."""

import io
import logging

import pytest

from mmlinattn.tooling.console import HIDDEN, quiet_console

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
