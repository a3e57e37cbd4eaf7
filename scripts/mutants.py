"""scripts/mutants: turns one condition, operator or number at a time, and runs the tests.

Where a mistake is put in is drawn from a seed. The tests of the mutated file's room run in a copy
of the tree, those that name its module first, and end at the first failure.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = {
    "core": ("tests/unit", "tests/scenarios", "tests/model/test_model.py"),
    "train": ("tests/unit",),
}
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
UNFINISHED = "not done in time"
# What runs nowhere, or is for people.
SKIPPED = (ast.Assert, ast.JoinedStr, ast.Raise)


@dataclass(frozen=True)
class Mutant:
    """One expression of a file, and what stands there instead."""

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


def mutants(file: Path) -> Iterator[Mutant]:
    """All that can be made of this file."""
    source = (ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in expressions(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        for text in changed(node):
            yield Mutant(file, node.lineno, start, stop, text)


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


def tests_for(file: Path) -> list[str]:
    """The files of tests of its room, those first that name its module."""
    room, name = file.parts[1], file.stem
    files = [ROOT / path for path in ROOMS[room]]
    found = [f for each in files for f in ([each] if each.is_file() else each.glob("test_*.py"))]
    of_room = {f: f.read_text() for f in found}
    chosen = [f for f, text in of_room.items() if "elastic_etcd" in text or f.parent.name != "unit"]
    chosen.sort(key=lambda f: (f"test_{name}" not in f.name, name not in of_room[f], f))
    return [str(f.relative_to(ROOT)) for f in chosen]


def all_pass(tree: Path) -> bool:
    """Whether the tests pass without a mutant: else all would seem to be noticed."""
    for room in ROOMS:
        file = Path("elastic_etcd", room, "__init__.py")
        if why := first_failure(tests_for(file), tree, None):
            print(f"the tests of {room} fail as it is: {why}", flush=True)
            return False
    return True


def try_out(mutant: Mutant, tree: Path, seconds: float) -> str:
    """What notices it, as `first_failure` gives it; prints that, too."""
    source = (ROOT / mutant.file).read_bytes()
    (tree / mutant.file).write_bytes(mutant.of(source))
    why = first_failure(tests_for(mutant.file), tree, seconds)
    (tree / mutant.file).write_bytes(source)
    print(f"{mutant}\n    {why or 'SURVIVED'}", flush=True)
    return why


def first_failure(tests: list[str], tree: Path, seconds: float | None) -> str:
    """The first test that fails, or that they don't end; "" if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [*command, *tests],
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            told, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return UNFINISHED
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in told.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (lines or [f"exit {process.returncode}"])[0] if process.returncode else ""


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="from which they are drawn")
    parser.add_argument("--seconds", type=float, default=1200, help="for the tests of one mutant")
    parser.add_argument("--only", default="", help="files whose path has this in it")
    parser.add_argument(
        "--trust", action="store_true", help="don't run the tests without a mutant first"
    )
    parser.add_argument("--list", action="store_true", help="show them, and run nothing")
    asked = parser.parse_args()
    files = [f for room in ROOMS for f in (ROOT / "elastic_etcd" / room).glob("*.py")]
    names = sorted(f.relative_to(ROOT) for f in files)
    every = [m for name in names if asked.only in str(name) for m in mutants(name)]
    drawn = random.Random(asked.seed)  # noqa: S311 - to be had again
    chosen = drawn.sample(every, min(asked.count, len(every)))
    print(f"{len(chosen)} of {len(every)} mutants", flush=True)
    if asked.list:
        print(*chosen, sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        if not asked.trust and not all_pass(tree):
            return 1
        found = [try_out(mutant, tree, asked.seconds) for mutant in chosen]
    unfinished = found.count(UNFINISHED)
    print(f"{len(found) - found.count('') - unfinished} of {len(found)} were noticed, ", end="")
    print(f"and with {unfinished} the tests were not done in {asked.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
