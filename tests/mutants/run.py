# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Put small defects into a copy of the package, one at a time, and see whether a test fails.

    bash tools/run_mutants.sh --minutes 30 --seed 1 mmlinattn/ops

Cosmic Ray finds the places, changes them and keeps the results (``session.sqlite``). What is added here: the copy, the
sample, the tests that touch a changed line, and one process that has imported PyTorch and forks for each run. Killed
and started again, with the same ``--out``, it goes on. docs/testing.md explains.
"""

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import coverage
from cosmic_ray import plugins
from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import use_mutation
from cosmic_ray.operators.operator import Operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult
from parso.python.tree import Keyword

ROOT = Path(__file__).resolve().parents[2]
PATHS = [f'mmlinattn/{name}' for name in ('ops', 'attention', 'layers', 'backbones', 'checkpoints', 'engine')]
COVERAGE = """
[run]
source =
    {copy}/mmlinattn
    {copy}/tools
omit = */triton*.py
data_file = {out}/data
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
"""
CHANGED = ('mmlinattn', 'tools')  # folders of the copy that mutants are written to
FIRST = 12  # tests of the first, short run
WRITTEN = 'defects/Replace'  # changes that were written by hand, in place of an operator's name


class RemoveStatement(Operator):
    """A call whose result nobody takes, or an augmented assignment, becomes ``pass``."""

    def mutation_positions(self, node):
        """Statements such as ``x.add_(y)``, ``check(x)``, ``x += y``."""
        is_augmented = node.type == 'expr_stmt' and node.children[1].type == 'operator' and node.children[1] != '='
        is_call = (
            node.type in ('atom_expr', 'power')
            and node.parent.type == 'simple_stmt'
            and node.children[-1].type == 'trailer'
            and node.children[-1].children[0] == '('
        )
        if is_augmented or is_call:
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        """The statement, replaced."""
        return Keyword('pass', node.start_pos, prefix=node.get_first_leaf().prefix)

    @classmethod
    def examples(cls):
        """Cosmic Ray's own tests ask for them."""
        return ()


plugins.OPERATOR_PROVIDERS['more'] = {'RemoveStatement': RemoveStatement}


def read_defects(path: Path, copy: Path) -> list[WorkItem]:
    """Changes written by hand, one JSON object a line: ``file``, ``old`` (found there once), ``new``, ``id``."""
    items = []
    for number, line in enumerate(path.read_text().splitlines()):
        defect = json.loads(line)
        if not defect['file'].startswith(tuple(f'{name}/' for name in CHANGED)):
            raise SystemExit(f'{path}:{number + 1}: file {defect["file"]!r} is in none of {", ".join(CHANGED)}')
        text, old, new = (copy / defect['file']).read_text(), defect['old'], defect['new']
        name = defect.get('id', f'{number:05d}')
        if text.count(old) != 1 or old == new:
            raise SystemExit(
                f'{path}:{number + 1}: `old` occurs {text.count(old)} times in {defect["file"]}, or is `new`'
            )
        same = len(os.path.commonprefix([old, new]))
        before = text[: text.index(old) + same]
        start = (before.count('\n') + 1, 0)
        texts = {'old': old, 'new': new}
        items.append(
            WorkItem.single(name, MutationSpec(copy / defect['file'], WRITTEN, 0, start, (start[0], 1), texts))
        )
    return items


@contextmanager
def changed(change: MutationSpec):
    """The file with the change, which is taken back in the end; its text before and after (None: not a change)."""
    if change.operator_name != WRITTEN:
        operator = plugins.get_operator(change.operator_name)(**change.operator_args)
        with use_mutation(change.module_path, operator, change.occurrence) as texts:
            yield texts
        return
    before = change.module_path.read_text()
    after = before.replace(change.operator_args['old'], change.operator_args['new'])
    try:
        change.module_path.write_text(after)
        yield before, after
    finally:
        change.module_path.write_text(before)


def log(text: str) -> None:
    print(text, flush=True)


def make_copy(copy: Path) -> None:
    """What Git knows of or would, as it lies here: no mutant is ever written into the checkout."""
    listed = subprocess.run(
        ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    part = copy.with_name('copy.part')
    shutil.rmtree(part, ignore_errors=True)
    for name in filter(None, listed.stdout.decode().split('\0')):
        if (ROOT / name).is_file():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, part / name)
    mim = part / 'mmlinattn' / '.mim'
    mim.mkdir()
    for name in ('configs', 'tools', 'model-index.yml'):
        (mim / name).symlink_to(Path('..', '..', name))
    for name in CHANGED:
        shutil.copytree(part / name, copy.with_name('original') / name, symlinks=True, dirs_exist_ok=True)
    part.rename(copy)


def links(folder: str, names: list[str]) -> list[str]:
    """Those of a folder, which are there already."""
    return [name for name in names if os.path.islink(os.path.join(folder, name))]


class Map:
    """Which tests touch a line, from one run of each file of tests under coverage."""

    def __init__(self, out: Path, args):
        self.out, self.copy, self.folder = out, out / 'copy', out / 'coverage'
        self.make(args)
        self.seconds = {}
        for path in self.folder.glob('*/passed.*.jsonl'):
            self.seconds.update(map(json.loads, path.read_text().splitlines()))
        self.data = coverage.CoverageData(str(self.folder / 'combined'))
        self.data.read()
        self.by_file = {}

    def make(self, args) -> None:
        """Run the files of tests that have not been run, as many at once as there are jobs, each in a fork."""
        self.folder.mkdir(exist_ok=True)
        done = {path.name for path in self.folder.iterdir() if path.is_dir() and path.suffix != '.part'}
        waiting = [name for name in self.files(args.tests) if piece(name) not in done]
        if waiting:
            log(f'which test touches which line: {len(waiting)} files of tests ({self.folder}/*/output.txt)')
            (self.folder / 'combined').unlink(missing_ok=True)
        began, running = time.monotonic(), {}
        while waiting or running:
            while waiting and len(running) < args.jobs:
                name = waiting.pop(0)
                running[self.start(name, args)] = name
            pid, status = os.wait()
            name, code = running.pop(pid), os.waitstatus_to_exitcode(status)
            part = self.folder / f'{piece(name)}.part'
            if code not in (0, 1, 5):  # passed, failed, all of them slow
                raise SystemExit(f'pytest ended with {code}: see {part / "output.txt"}')
            part.rename(self.folder / piece(name))
            log(f'{time.monotonic() - began:6.0f} s {name}')
        if not (self.folder / 'combined').exists():
            combined = coverage.CoverageData(str(self.folder / 'combined.part'))
            combined.erase()
            for path in sorted(self.folder.glob('*/data.*')):
                part = coverage.CoverageData(str(path))
                part.read()
                combined.update(part)
            combined.write()
            if not combined.measured_contexts():
                raise SystemExit(f'no line of the package was seen to run: {self.folder} has no data of coverage')
            (self.folder / 'combined.part').rename(self.folder / 'combined')

    def files(self, tests: list[str]) -> list[str]:
        """Files of tests in the order given, those of folders by name."""
        found = []
        for name in tests or ['tests']:
            path = self.copy / name
            found += sorted(path.rglob('test_*.py')) if path.is_dir() else [path]
        return [str(path.relative_to(self.copy)) for path in dict.fromkeys(found)]

    def start(self, name: str, args) -> int:
        """The process that runs a file of tests."""
        part = self.folder / f'{piece(name)}.part'
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        (part / 'coveragerc').write_text(COVERAGE.format(copy=self.copy, out=part))

        def run() -> int:
            more = dict(COVERAGE_PROCESS_START=str(part / 'coveragerc'), MUTANTS_OUT=str(part))
            os.environ.update(more, MUTANTS_SEED=str(args.seed), MUTANTS_CASES=str(args.cases))
            coverage.process_startup()
            status = pytest_here(['-p', 'touched', *([] if args.slow else ['-m', 'not slow']), name])
            current = coverage.Coverage.current()
            current.stop()
            current.save()
            return status

        return fork(self.copy, part / 'output.txt', run)

    def lines(self, path: str) -> dict[int, set[str]]:
        """Tests by line of a file, those that passed only."""
        if path not in self.by_file:
            found = self.data.contexts_by_lineno(str(self.copy / path))
            # processes that a test starts have 'FILE::TEST (call)'
            self.by_file[path] = {
                line: {name.partition(' (')[0] for name in names} & set(self.seconds) for line, names in found.items()
            }
        return self.by_file[path]

    @cached_property
    def breadth(self) -> Counter:
        """Files that a test touches: one that touches few is about them."""
        counts = Counter()
        for path in self.data.measured_files():
            names = set().union(*self.data.contexts_by_lineno(path).values(), ())
            counts.update({name.partition(' (')[0] for name in names})
        return counts

    def tests(self, path: str, line: int) -> tuple[list[str], str]:
        """Tests for a change of a line, the most special and shortest first, and what they touch: the statement, or
        where that runs at import (tables, defaults, decorators) the function, the class or the file around it."""
        lines, tree = self.lines(path), ast.parse((self.copy / path).read_text())
        spans = []
        for node in ast.walk(tree):
            if not isinstance(node, ast.stmt) or not node.lineno <= line <= node.end_lineno:
                continue
            body = getattr(node, 'body', None)
            if not body:
                spans.append((node.lineno, node.end_lineno, 'statement'))
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                spans.append((node.lineno, node.end_lineno, 'class' if isinstance(node, ast.ClassDef) else 'function'))
            else:  # its first line, then the whole
                spans.append((node.lineno, max(node.lineno, body[0].lineno - 1), 'statement'))
        spans = [span for span in spans if span[0] <= line <= span[1]]
        spans.sort(key=lambda span: span[1] - span[0])
        in_function = any(kind == 'function' for _, _, kind in spans)
        spans.append((1, 10**9, 'file'))
        for start, end, kind in spans:
            found = set().union(*(names for number, names in lines.items() if start <= number <= end), ())
            if found:
                return self.ordered(found), kind
            # a line of a function that runs in no test, though others of it do
            if kind == 'statement' and in_function and not any(start <= number <= end for number in lines):
                break
        return [], 'nothing'

    def of_file(self, path: str) -> list[str]:
        """Tests that touch any line of a file, the most special and shortest first."""
        return self.ordered(set().union(*self.lines(path).values(), ()))

    def ordered(self, names: set[str]) -> list[str]:
        """The most special and shortest first."""
        return sorted(names, key=lambda name: (self.breadth[name] * (0.1 + self.seconds[name]), name))


def environment(copy: Path) -> dict:
    """Children import the copy, write no bytecode (two mutants of a second would share it) and use one thread."""
    folders = [str(copy), str(copy / 'tests' / 'mutants')]
    names = dict(PYTHONPATH=os.pathsep.join(folders), PYTHONDONTWRITEBYTECODE='1', OMP_NUM_THREADS='1')
    return {**os.environ, **names, 'CUDA_VISIBLE_DEVICES': ''}


def piece(name: str) -> str:
    """The folder of what is known of a file of tests."""
    return name.replace('/', '-')


def pytest_here(arguments: list[str]) -> int:
    """pytest in this process; its status."""
    import pytest

    return pytest.main(['-q', '-p', 'no:cacheprovider', '--tb=short', *arguments])


def fork(copy: Path, output: Path, run) -> int:
    """``run`` in a fork of this process, which has the large libraries, and imports the package from the copy. Its id;
    it ends with the status that ``run`` returns, or 70."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.chdir(copy)
    os.environ.update(environment(copy))
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(copy), str(copy / 'tests' / 'mutants')]
    status = 70
    try:
        status = run()
        imported = getattr(sys.modules.get('mmlinattn'), '__file__', str(copy))
        assert imported.startswith(str(copy)), f'{imported} was tested'
    except BaseException:
        traceback.print_exc()
        status = 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))


def outcome_of(pid: int, seconds: float) -> str:
    """How a run of pytest ended, which is killed after so many seconds."""
    deadline, status = time.monotonic() + seconds, None
    while status is None:
        is_late = time.monotonic() >= deadline  # before the look: this process may have been stopped meanwhile
        done, code = os.waitpid(pid, os.WNOHANG)
        status = code if done else None
        if is_late:
            break
        time.sleep(0.05)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if status is None:
        os.waitpid(pid, 0)
        return 'timeout'
    code = os.waitstatus_to_exitcode(status)
    return {0: 'passed', 2: 'broken', 4: 'missing', 5: 'missing', 70: 'broken'}.get(code, 'failed')


class Session:
    """The mutants drawn, and their results."""

    def __init__(self, out: Path, args):
        self.out, self.copy, self.args = out, out / 'copy', args
        import_large_libraries()
        self.map = Map(out, args)

    def draw(self) -> list[WorkItem]:
        """Places in an order that the seed gives, one change of each: a binary operator has a dozen, a number two."""
        files = []
        for path in self.args.paths:
            path = self.copy / path
            files += sorted(path.rglob('*.py')) if path.is_dir() else [path]
        files = [path for path in files if not path.name.startswith('triton')]
        places = defaultdict(list)
        for path in files:
            skipped = no_behaviour(ast.parse(path.read_text()))
            for item in _all_work_items([path], {}):
                (change,) = item.mutations
                if not any(start <= change.start_pos < end for start, end in skipped):
                    places[str(path), change.start_pos].append(change)
        chance = random.Random(self.args.seed)
        order = sorted(places)
        chance.shuffle(order)
        drawn = [WorkItem.single(f'{i:05d}', chance.choice(places[place])) for i, place in enumerate(order)]
        log(f'{len(places)} places in {len(files)} files')
        return drawn[: self.args.sample]

    def run(self) -> None:
        """Mutant by mutant until the time is up."""
        end = time.monotonic() + 60 * self.args.minutes
        with use_db(str(self.out / 'session.sqlite'), WorkDB.Mode.create) as db:
            if not db.num_work_items:
                defects = self.args.defects
                db.add_work_items(read_defects(Path(defects), self.copy) if defects else self.draw())
            pending = sorted(db.pending_work_items, key=lambda item: item.job_id)
            for item in pending:
                if time.monotonic() > end:
                    break
                result = self.try_out(item)
                db.set_result(item.job_id, result)
                change = item.mutations[0]
                place = f'{change.module_path.relative_to(self.copy)}:{change.start_pos[0]}'
                log(f'{item.job_id} {result.output.splitlines()[0]:40} {place} {change.operator_name.split("/")[1]}')
            self.report(db)

    def try_out(self, item: WorkItem) -> WorkResult:
        """Three runs: the most special tests; those others that the time allows; all cases of these, and of tests that
        touch other lines of the file, as far as they come."""
        change = item.mutations[0]
        path = str(change.module_path.relative_to(self.copy))
        tests, what = self.map.tests(path, change.start_pos[0])
        with changed(change) as (before, after):
            diff = ''.join(unified(before, after or before, path))
            if after is None or not compiles(after):
                return WorkResult(WorkerOutcome.SKIPPED, 'no mutant', None, diff)
            rounds, seconds = [tests[:FIRST], [], []], 0.0
            for name in tests[FIRST:]:
                seconds += self.map.seconds[name]
                if seconds < self.args.seconds:
                    rounds[1].append(name)
            # what the map has not seen: a case that it left out may be the one that matters, or runs the line
            known = {*rounds[0], *rounds[1]}
            for name in [*tests, *self.map.of_file(path)]:
                function = name.partition('[')[0]
                if function not in known:
                    known.add(function)
                    rounds[2].append(function)
            number = 0
            for names in filter(None, rounds):
                is_last = names is rounds[2]
                due = sum(self.map.seconds.get(name, 0) for name in names)
                limit = 2 * self.args.seconds if is_last else 60 + 5 * due
                outcome = self.run_tests(names, limit)
                if outcome == 'missing':  # the mutant changes the names of the cases
                    functions = sorted({name.partition('[')[0] for name in names})
                    outcome = self.run_tests(functions, 60 + 10 * due)
                number += 0 if is_last else len(names)
                if outcome != 'passed' and not (is_last and outcome == 'timeout'):
                    tail = (self.out / 'output.txt').read_text(errors='replace')[-1500:]
                    return WorkResult(
                        WorkerOutcome.NORMAL, f'killed: {outcome} ({number} tests)\n{tail}', TestOutcome.KILLED, diff
                    )
            if not tests:
                text = 'untouched: no test that was mapped runs this line, nor fails'
                return WorkResult(WorkerOutcome.NO_TEST, text, None, diff)
            text = f'survived {number} of the {len(tests)} tests that touch the {what}'
            return WorkResult(WorkerOutcome.NORMAL, text, TestOutcome.SURVIVED, diff)

    def run_tests(self, names: list[str], seconds: float) -> str:
        """One pytest run: ``passed``, ``failed``, ``broken`` (nothing can be collected), ``missing`` (no such tests) or
        ``timeout``."""
        output = self.out / 'output.txt'
        chosen = [] if self.args.slow else ['-m', 'not slow']
        return outcome_of(fork(self.copy, output, lambda: pytest_here(['-x', *chosen, *names])), seconds)

    def report(self, db: WorkDB) -> None:
        """``report.md``: the figures, and the diff of each survivor (``git apply`` takes it)."""
        counts, parts = Counter(), []
        for job, result in sorted(db.results):
            first = result.output.splitlines()[0]
            kind = first.split(' (')[0] if first.startswith('killed') else first.split()[0].strip(':')
            counts[kind] += 1
            if result.test_outcome == TestOutcome.SURVIVED or result.worker_outcome == WorkerOutcome.NO_TEST:
                parts += [f'## {job}: {first}', '', '```diff', result.diff.strip(), '```', '']
        killed = sum(number for kind, number in counts.items() if kind.startswith('killed'))
        tried = killed + counts['survived'] + counts['untouched']
        drawn = f'of {self.args.defects}' if self.args.defects else f'seed {self.args.seed}'
        lines = [f'# Mutants, {drawn}: {killed} of {tried} killed', '']
        lines += [f'- {kind}: {number}' for kind, number in sorted(counts.items())]
        (self.out / 'report.md').write_text('\n'.join([*lines, '', *parts]))
        log('\n'.join([*lines, f'({db.num_work_items - sum(counts.values())} still to try; {self.out / "report.md"})']))


def no_behaviour(tree: ast.AST) -> list:
    """Spans ((line, column), (line, column)) of annotations and of ``__all__``, which no test has to see."""
    found = []
    for node in ast.walk(tree):
        parts = [getattr(node, 'annotation', None), getattr(node, 'returns', None)]
        if isinstance(node, ast.Assign) and any(getattr(name, 'id', '') == '__all__' for name in node.targets):
            parts.append(node)
        for part in filter(None, parts):
            found.append(((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)))
    return found


def compiles(code: str) -> bool:
    try:
        compile(code, 'mutant', 'exec')
    except SyntaxError:
        return False
    return True


def unified(before: str, after: str, path: str) -> list[str]:
    """A diff that ``git apply`` takes."""
    return list(
        difflib.unified_diff(before.splitlines(True), after.splitlines(True), fromfile=f'a/{path}', tofile=f'b/{path}')
    )


def import_large_libraries() -> None:
    """What takes seconds to import and is no part of this package; never the package itself."""
    import einops  # noqa: F401
    import mmcv  # noqa: F401
    import mmengine.runner  # noqa: F401
    import pytest  # noqa: F401
    import torchvision  # noqa: F401

    if 'mmlinattn' in sys.modules:
        raise SystemExit('mmlinattn was imported before the mutants: is a plugin of pytest or MMEngine doing that?')


def main() -> None:
    """Copy, map, mutants, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('paths', nargs='*', default=PATHS, help=f'files and folders to change [{" ".join(PATHS)}]')
    parser.add_argument('--minutes', type=float, default=60, help='no mutant begins after this time [60]')
    parser.add_argument('--seed', type=int, default=0, help='of the sample [0]')
    parser.add_argument('--sample', type=int, default=100, help='number of mutants [100]')
    parser.add_argument(
        '--defects', help='in place of a sample: changes written by hand, a JSON object a line: file, old, new, id'
    )
    parser.add_argument(
        '--seconds', type=float, default=60, help='of tests for a mutant that the first pass lets go [60]'
    )
    parser.add_argument('--cases', type=int, default=4, help='of a parametrised test, to find the lines it touches [4]')
    parser.add_argument('--tests', nargs='+', default=[], help='files and folders of tests [all]')
    parser.add_argument('--slow', action='store_true', help='slow tests, too')
    parser.add_argument(
        '--jobs', type=int, default=os.cpu_count(), help='files of tests at once in the first run [all cores]'
    )
    parser.add_argument('--out', default='work_dirs/mutants', help='copy, results, report [work_dirs/mutants]')
    args = parser.parse_args()
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / 'copy').exists():
        make_copy(out / 'copy')
    # a run that was killed may have left its mutant behind
    shutil.copytree(out / 'original', out / 'copy', symlinks=True, dirs_exist_ok=True, ignore=links)
    Session(out, args).run()


if __name__ == '__main__':
    main()
