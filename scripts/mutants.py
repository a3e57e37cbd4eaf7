"""scripts/mutants: turns one condition, operator or number at a time, and runs the tests.

First all tests run once, and each place where a mistake could be put in tells that it runs, in
whatever process. Then each mistake, drawn from a seed, meets the tests that run its place, in a
fork of this process, which has imported torch; the first failure ends that.
"""

import argparse
import ast
import importlib
import mmap
import os
import pickle
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch.distributed  # noqa: F401 - see above

ROOT = Path(__file__).parents[1]
ROOMS = ("core", "train")
TESTS = ("tests/unit", "tests/scenarios", "tests/model")
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
UNRUN = "no test runs it"
UNFINISHED = "not done in time"
# What runs nowhere, or is for people.
SKIPPED = (ast.Assert, ast.JoinedStr, ast.Raise)


@dataclass(frozen=True)
class Mutant:
    """One expression of a file, and what stands there instead."""

    place: int  # among all
    file: Path
    line: int
    start: int  # of the expression, in bytes
    stop: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"

    def of(self, source: bytes) -> bytes:
        """The file with the mistake in it."""
        return source[: self.start] + f"({self.text})".encode() + source[self.stop :]


def mutants() -> list[Mutant]:
    """All that can be made of these rooms."""
    files = sorted(f for room in ROOMS for f in (ROOT / "elastic_etcd" / room).rglob("*.py"))
    found = [(file.relative_to(ROOT), *each) for file in files for each in changes(file)]
    return [Mutant(place, *each) for place, each in enumerate(found)]


def changes(file: Path) -> Iterator[tuple[int, int, int, str]]:
    """Line, start, stop and new text of what can be changed in this file."""
    source = file.read_bytes()
    starts = starts_of_lines(source)
    for node in expressions(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        for text in changed(node):
            yield node.lineno, start, stop, text


def starts_of_lines(source: bytes) -> list[int]:
    """In bytes, of each line."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions below `node` that run, without types."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, SKIPPED):
                if isinstance(child, ast.expr):
                    yield child
                yield from expressions(child)


def changed(node: ast.expr) -> Iterator[str]:
    """The texts of what is almost `node`."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in OTHER:
            yield ast.unparse(ast.Compare(left, [OTHER[type(op)]()], right))  # type: ignore[list-item]
        case ast.BoolOp(op, values):
            yield ast.unparse(ast.BoolOp(OTHER[type(op)](), values))  # type: ignore[arg-type]
        case ast.BinOp(left, op, right) if type(op) in OTHER and not _is_type(node):
            yield ast.unparse(ast.BinOp(left, OTHER[type(op)](), right))  # type: ignore[arg-type]
        case ast.UnaryOp(ast.Not(), operand):
            yield ast.unparse(operand)
        case ast.IfExp(test, body, orelse):
            yield ast.unparse(ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse))
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() as number):
            yield str(number + 1)


def _is_type(node: ast.BinOp) -> bool:
    return isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)


@dataclass
class Record:
    """How long each test takes, and what runs in it."""

    imported: set[int] = field(default_factory=set)  # places that run without a test
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ran: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    failed: set[str] = field(default_factory=set)

    def tests_of(self, mutant: Mutant, every: list[Mutant]) -> dict[str, float]:
        """The tests that may notice it and their seconds, quick files first."""
        places, named = {mutant.place}, set[str]()
        if places & self.imported:  # what it makes may be used anywhere
            places = {each.place for each in every if each.file == mutant.file}
            files = {file_of(test) for test in self.seconds}
            word = re.compile(rf"\b{mutant.file.stem}\b")
            named = {file for file in files if word.search((ROOT / file).read_text())}
        chosen = [
            test
            for test in self.seconds.keys() - self.failed
            if file_of(test) in named
            or not places.isdisjoint(self.ran[test] | self.ran[file_of(test)])
        ]
        total: dict[str, float] = defaultdict(float)
        for test in chosen:
            total[file_of(test)] += self.seconds[test]
        chosen.sort(key=lambda t: (total[file_of(t)], file_of(t), self.seconds[t], t))
        return {test: self.seconds[test] for test in chosen}


def file_of(test: str) -> str:
    """The test's file."""
    return test.partition("::")[0]


class Recording:
    """A plugin of pytest, which makes a record of all tests."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self.record = Record(imported=self._ran())

    def _ran(self) -> set[int]:
        """The places that have run since the last call."""
        ran = {found.start() for found in re.finditer(b"\1", self._page)}
        self._page[:] = bytes(len(self._page))
        return ran

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # What is set up may be for other tests of its file, too.
        of = file_of(report.nodeid) if report.when == "setup" else report.nodeid
        self.record.ran[of] |= self._ran()
        if report.failed:
            self.record.failed.add(report.nodeid)
        if not report.skipped:
            self.record.seconds[report.nodeid] += report.duration


class Chosen:
    """A plugin of pytest, which runs these tests in this order."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in self._seconds if name in found]
        for item in items:
            limit = 30 + 10 * self._seconds[item.nodeid]
            item.add_marker(pytest.mark.timeout(limit), append=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def run_tests(tests: list[str], plugin: object, *options: str) -> int:
    """Runs pytest in this process, on the tree that it is in."""
    hypothesis.settings.register_profile("same", derandomize=True, database=None)
    hypothesis.settings.load_profile("same")  # what tests/conftest.py registers goes on from there
    quiet = "-q -p no:cacheprovider -W ignore::pytest.PytestAssertRewriteWarning"
    chosen = ["-m", "not nightly", *quiet.split()]
    return pytest.main([*chosen, *options, *tests], [plugin])


def recorded(tests: list[str], page: Path) -> Record:
    """The record of these tests, where the files mark what runs on that page."""
    for file in {mutant.file for mutant in mutants()}:
        importlib.import_module(".".join(file.with_suffix("").parts))
    with page.open("r+b") as opened:
        recording = Recording(mmap.mmap(opened.fileno(), 0))
    run_tests(tests, recording)
    return recording.record


def first_failure(seconds: dict[str, float]) -> str:
    """The first of these tests that fails; "" if all pass."""
    if not seconds:
        return UNRUN
    chosen = Chosen(seconds)
    code = run_tests(sorted({file_of(test) for test in seconds}), chosen, "-x")
    return chosen.failed or (f"pytest ends with {code}" if code else "")


def fork(tree: Path, function: Callable[..., object], *args: object) -> int:
    """Calls the function in a process of its own, whose modules are those of the tree."""
    sys.stdout.flush()
    (tree / "result").unlink(missing_ok=True)
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        with (tree / "told").open("w") as told:
            os.dup2(told.fileno(), 1)
            os.dup2(told.fileno(), 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = sys.path[0] = str(tree)
        del sys.modules["__main__"].__file__  # else what multiprocessing starts would load it
        (tree / "result").write_bytes(pickle.dumps(function(*args)))
    except BaseException:  # noqa: BLE001 - this process ends here
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end(pid: int, tree: Path) -> Any:
    """Ends that process; gives what the function has returned, None if it had not."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    result = tree / "result"
    return pickle.loads(result.read_bytes()) if result.exists() else None  # noqa: S301 - our own


def record(tree: Path, tests: list[str], every: list[Mutant]) -> Record:
    """What runs in each of these tests."""
    page = tree / "page"
    page.write_bytes(bytes(len(every)))
    for file in {mutant.file for mutant in every}:
        mark(tree / file, page, [mutant for mutant in every if mutant.file == file])
    pid = fork(tree, recorded, tests, page)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    made: Record | None = end(pid, tree)
    assert made, (tree / "told").read_text()
    for test in sorted(made.failed):
        print(f"left out, as it fails without a mutant: {test}", flush=True)
    return made


def mark(file: Path, page: Path, places: list[Mutant]) -> None:
    """Lets each place of the file mark on the page that it runs."""
    source = file.read_bytes()
    module = ast.parse(source)
    first = module.body[ast.get_docstring(module) is not None]
    opened = f"with open({str(page)!r}, 'r+b') as _: "
    opened += "_ran = __import__('mmap').mmap(_.fileno(), 0)\n"
    edits = [(starts_of_lines(source)[first.lineno - 1], 0, 0, opened)]
    for each in places:  # at one byte an expression ends first, and the outer one begins first
        edits.append((each.start, 2, -each.stop, f"(_ran.__setitem__({each.place}, 1) or ("))
        edits.append((each.stop, 1, 0, "))"))
    for at, _, _, text in sorted(edits, reverse=True):
        source = source[:at] + text.encode() + source[at:]
    file.write_bytes(source)


def copy_tree(tree: Path) -> None:
    """The files that git knows, or would."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        text=True,
        capture_output=True,
    ).stdout
    for name in filter(None, listed.splitlines()):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


@dataclass
class Trial:
    """A mutant whose tests run."""

    mutant: Mutant
    tree: Path
    tests: InitVar[dict[str, float]]
    seconds: InitVar[float]

    def __post_init__(self, tests: dict[str, float], seconds: float) -> None:
        file = self.tree / self.mutant.file
        file.write_bytes(self.mutant.of(file.read_bytes()))
        os.utime(file, (self.mutant.place, self.mutant.place))  # as no bytecode that there is
        self.pid = fork(self.tree, first_failure, tests)
        self.fd = os.pidfd_open(self.pid)
        self.until = time.monotonic() + seconds

    def fileno(self) -> int:
        return self.fd

    def end(self) -> str:
        """What has noticed the mutant; "" if nothing has."""
        noticed = end(self.pid, self.tree)
        os.close(self.fd)
        shutil.copy2(ROOT / self.mutant.file, self.tree / self.mutant.file)
        return UNFINISHED if noticed is None else str(noticed)


def try_all(
    chosen: list[Mutant],
    tests: Callable[[Mutant], dict[str, float]],
    trees: list[Path],
    seconds: float,
) -> list[str]:
    """What notices each of these mutants, one at a time in each tree; prints it, too."""
    waiting, found = chosen[::-1], []
    running: list[Trial] = []
    try:
        while waiting or running:
            while waiting and trees:
                running.append(Trial(waiting[-1], trees.pop(), tests(waiting.pop()), seconds))
            ended, _, _ = select.select(
                running, [], [], max(0, running[0].until - time.monotonic())
            )
            trial = (ended or running)[0]
            running.remove(trial)
            trees.append(trial.tree)
            found.append(trial.end())
            print(f"{trial.mutant}\n    {found[-1] or 'SURVIVED'}", flush=True)
    finally:
        for trial in running:
            trial.end()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="from which they are drawn")
    parser.add_argument("--seconds", type=float, default=900, help="for the tests of one mutant")
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants at once")
    parser.add_argument(
        "--only", nargs="*", default=[""], help="mutants with such a text, as --list shows them"
    )
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files of tests, or folders")
    parser.add_argument("--list", action="store_true", help="show them, and run nothing")
    asked = parser.parse_args()
    every = mutants()
    of = [m for m in every if any(text in str(m) for text in asked.only)]
    drawn = random.Random(asked.seed)  # noqa: S311 - to be had again
    chosen = drawn.sample(of, min(asked.count, len(of)))
    print(f"{len(chosen)} of {len(of)} mutants", flush=True)
    if asked.list:
        print(*chosen, sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Path(folder, str(number)) for number in range(asked.jobs + 1)]
        for tree in trees:
            copy_tree(tree)
        made = record(trees.pop(), list(asked.tests), every)
        found = try_all(chosen, lambda mutant: made.tests_of(mutant, every), trees, asked.seconds)
    noticed = [each for each in found if each not in ("", UNRUN, UNFINISHED)]
    print(f"{len(noticed)} of {len(found)} were noticed; {found.count('')} were not, ", end="")
    print(f"{found.count(UNRUN)} run in no test, {found.count(UNFINISHED)} took too long")
    return 0


if __name__ == "__main__":
    sys.exit(main())
