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


@pytest.mark.parametrize('command', mmlinattn_console.TOOLS)
def test_options_after_the_command_are_the_tools(monkeypatch, capsys, command):
    monkeypatch.setattr(sys, 'argv', ['mmlinattn', command, '--help'])
    monkeypatch.setattr(mmlinattn_console, 'started_as', None)
    with pytest.raises(SystemExit) as end:
        mmlinattn_console.main()
    assert mmlinattn_console.tools_folder() == ROOT / 'tools'
    assert not end.value.code and capsys.readouterr().out.startswith(f'usage: mmlinattn {command} [')


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


def test_help_of_tools_imports_no_torch():
    tools = [ROOT / 'tools' / file for file in mmlinattn_console.TOOLS.values()]
    script = """
import runpy, sys
for tool in sys.argv[1:]:
    sys.argv = [tool, '--help']
    try:
        runpy.run_path(tool, run_name='__main__')
    except SystemExit as end:
        assert not end.code, tool
    assert 'torch' not in sys.modules, tool
"""
    subprocess.run([sys.executable, '-c', script, *map(str, tools)], check=True, stdout=subprocess.DEVNULL)
