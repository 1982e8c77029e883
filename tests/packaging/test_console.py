# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Find and run tools by the command ``mmlinattn``. ``test_packaging.py`` runs it on an installed wheel."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mmlinattn_console

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize('given', [[], ['tran', 'mine.py'], ['--config']])
def test_another_command_raises_with_the_known_ones(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['mmlinattn', *given])
    with pytest.raises(SystemExit) as end:
        mmlinattn_console.main()
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert all(name in said for name in mmlinattn_console.TOOLS)


def test_installed_tool_gets_the_arguments_before_the_package_is_imported(tmp_path):
    """Report missing packages by the tool; importing mmlinattn would raise a traceback."""
    shutil.copy2(ROOT / 'mmlinattn_console.py', tmp_path)
    tools = tmp_path / 'mmlinattn' / '.mim' / 'tools'
    tools.mkdir(parents=True)
    (tmp_path / 'mmlinattn' / '__init__.py').write_text('raise ImportError("mmengine")')
    (tmp_path / 'tools').mkdir()  # of another distribution in site-packages
    (tools / 'train.py').write_text('import sys\nprint(__name__, sys.argv)\nsys.exit(3)')
    command = [sys.executable, tmp_path / 'mmlinattn_console.py', 'train', 'my file.py', '--amp']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stdout == f'__main__ {[str(tools / "train.py"), "my file.py", "--amp"]}\n'


def test_help_of_commands_imports_no_torch():
    """Find the tools of the checkout, and pass them the options after the command."""
    script = """
import sys, mmlinattn_console
for command in mmlinattn_console.TOOLS:
    sys.argv, mmlinattn_console.started_as = ['mmlinattn', command, '--help'], None
    try:
        mmlinattn_console.main()
    except SystemExit as end:
        assert not end.code, command
    assert 'torch' not in sys.modules, command
"""
    done = subprocess.run([sys.executable, '-c', script], cwd=ROOT, check=True, capture_output=True, text=True)
    usages = [line.split()[:3] for line in done.stdout.splitlines() if line.startswith('usage: ')]
    assert usages == [['usage:', 'mmlinattn', command] for command in mmlinattn_console.TOOLS]
    assert mmlinattn_console.tools_folder() == ROOT / 'tools'
