# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Insert small defects into a copy of the package, one at a time, and count those that a fast test notices.

    python -m projects.mutants mmlinattn/ops mmlinattn/attention/rala.py --sample 40 --seed 1 --out work_dirs/mutants

A defect is a swapped operator or comparison, a negated condition, a changed number or constant, or a removed statement;
all places of the files are equally likely. Each mutant runs the tests of the mirroring folder (or of ``--tests``) until
one fails. The diffs of unnoticed mutants are printed; ``results.json`` in ``--out`` has all. Run again to resume.
"""

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SWAPS = {
    ast.Add: '-', ast.Sub: '+', ast.Mult: '/', ast.Div: '*', ast.FloorDiv: '*', ast.Mod: '*', ast.Pow: '*',
    ast.Lt: '<=', ast.LtE: '<', ast.Gt: '>=', ast.GtE: '>', ast.Eq: '!=', ast.NotEq: '==', ast.Is: 'is not',
    ast.IsNot: 'is', ast.In: 'not in', ast.NotIn: 'in', ast.And: 'or', ast.Or: 'and',
}  # fmt: skip


def changes(node: ast.AST, text) -> Iterator[tuple[ast.AST, str]]:
    """Yield the mutations of a node: (replaced node, new text). ``text`` returns the source of a node."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield node, f'({text(node.left)} {SWAPS[type(node.op)]} {text(node.right)})'
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, f'({text(node.left)} {SWAPS[type(node.ops[0])]} {text(node.comparators[0])})'
    elif isinstance(node, ast.BoolOp):
        yield node, '(' + f' {SWAPS[type(node.op)]} '.join(map(text, node.values)) + ')'
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node, f'({text(node.operand)})'
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield node.test, f'(not ({text(node.test)}))'
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield node, str(node.value + 1)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node, 'pass'


def mutants(path: Path) -> list[tuple[int, str]]:
    """Return (line number, text of the mutated file) of every mutation inside the functions of a file."""
    source = path.read_text(encoding='utf-8')
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]

    def place(node) -> slice:
        return slice(starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset)

    def text(node) -> str:
        return source.encode()[place(node)].decode()

    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    for part, new in changes(node, text):
                        where = place(part)
                        changed = source.encode()[: where.start] + new.encode() + source.encode()[where.stop :]
                        found.append((part.lineno, changed.decode()))
    return found


def tests_of(path: Path, copy: Path) -> str:
    """Return the folder of tests that mirrors a file's folder in the checkout ``copy``, or ``tests`` if there is
    none."""
    folder = Path('tests', *path.parent.parts[1:])
    return str(folder if (copy / folder).is_dir() else 'tests')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('paths', nargs='+', help='files or folders of the package')
    parser.add_argument('--sample', type=int, default=20, help='number of defects [%(default)s]')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--tests', nargs='+', help='tests to run [those of the mirroring folder]')
    parser.add_argument('--seconds', type=float, default=600, help='time limit of a run; longer ones count as noticed')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/mutants'))
    args = parser.parse_args()
    copy, kept = args.out / 'copy', args.out / 'results.json'
    if not copy.exists():
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns('.git', '.venv*', 'work_dirs', '__pycache__'))
    results = json.loads(kept.read_text()) if kept.exists() else {}
    files = [file for path in args.paths for file in (sorted(Path(path).rglob('*.py')) or [Path(path)])]
    drawn = [(file, number) for file in files for number in range(len(mutants(copy / file)))]
    random.Random(args.seed).shuffle(drawn)
    passing: list[list[str]] = []
    env = dict(os.environ, PYTHONPATH=str(copy.resolve()), OMP_NUM_THREADS='1', PYTHONDONTWRITEBYTECODE='1')
    for file, number in drawn[: args.sample]:
        name = f'{file}#{number}'
        if name in results:
            continue
        source = (copy / file).read_text(encoding='utf-8')
        line, changed = mutants(copy / file)[number]
        tests = args.tests or [tests_of(file, copy)]
        command = [sys.executable, '-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider', '-m', 'not slow', *tests]
        if tests not in passing:
            subprocess.run(command, cwd=copy, env=env, check=True)  # otherwise every defect would count as noticed
            passing.append(tests)
        try:
            (copy / file).write_text(changed, encoding='utf-8')
            status = subprocess.run(command, cwd=copy, env=env, capture_output=True, timeout=args.seconds).returncode
        except subprocess.TimeoutExpired:
            status = 1
        finally:
            (copy / file).write_text(source, encoding='utf-8')
        results[name] = dict(line=line, noticed=status != 0)
        kept.write_text(json.dumps(results, indent=1))
        if status == 0:
            diff = difflib.unified_diff(
                source.splitlines(), changed.splitlines(), str(file), str(file), lineterm='', n=1
            )
            print('\n'.join(diff), flush=True)
    noticed = sum(result['noticed'] for result in results.values())
    print(f'{noticed} of {len(results)} defects fail a test')


if __name__ == '__main__':
    main()
