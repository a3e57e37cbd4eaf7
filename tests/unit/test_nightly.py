"""scripts/nightly: each long test is in one of its parts, and a part that fails hides no other."""

import ast
import runpy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench_lib.__main__ import NAMES
from tests.support.job import ROOT

NIGHTLY = runpy.run_path(str(ROOT / "scripts" / "nightly.py"))
PARTS, Part = NIGHTLY["PARTS"], NIGHTLY["Part"]


def marked(file: Path) -> Iterator[str]:
    """The parts that are named in marks of this file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.nightly":
            (keyword,) = node.keywords
            assert isinstance(keyword.value, ast.Constant)
            yield str(keyword.value.value)


def test_each_marked_test_is_in_a_part_and_each_part_has_tests() -> None:
    used = Counter(part for file in (ROOT / "tests").rglob("*.py") for part in marked(file))
    assert set(used) <= set(PARTS)
    assert {name for name, part in PARTS.items() if not part.commands} <= set(used)


@pytest.mark.parametrize("folder", ["compose", "frameworks", "gpu", "netns", "users"])
def test_all_of_these_are_for_the_night(folder: str) -> None:
    files = list((ROOT / "tests" / folder).glob("test_*.py"))
    assert files
    assert [file.name for file in files if list(marked(file)) != [folder]] == []


def test_paths_in_commands_exist() -> None:
    words = {word for part in PARTS.values() for line in part.commands for word in line.split()}
    paths = {word for word in words if word.startswith(("scripts/", "tests/"))}
    assert "tests/users" in paths
    assert {path for path in paths if not list(ROOT.glob(path))} == set()


def test_each_benchmark_runs_in_a_part_or_in_a_test() -> None:
    tested = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    in_tests = {name for name in NAMES if f'"scripts.bench_lib", "{name}", *options' in tested}
    in_part = {command.split()[0] for command in NIGHTLY["BENCHMARKS"]}
    assert in_tests | in_part == NAMES.keys()
    assert in_tests & in_part == set()


def test_a_part_that_fails_hides_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    parts = {
        "fails": Part("", 1, ("exit 3", "echo not reached")),
        "lacks": Part("", 1, ("exit 77",)),
        "passes": Part("", 1, ("echo reached",)),
    }
    assert NIGHTLY["run_all"](parts) == 1
    told = capfd.readouterr().out.splitlines()
    assert "reached" in told
    assert "not reached" not in told
    short = [line.split()[:2] for line in told[-3:]]
    assert short == [["fails", "FAILED"], ["lacks", "not"], ["passes", "passed"]]
    assert NIGHTLY["run_all"]({"passes": parts["passes"], "lacks": parts["lacks"]}) == 0


def test_its_help_names_each_part_and_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["nightly", "--help"])
    with pytest.raises(SystemExit, match="0"):
        NIGHTLY["main"]()
    told = capsys.readouterr().out
    assert [name for name, part in PARTS.items() if f"  {name} " not in told] == []
    assert all(f"{part.minutes:3} min  {part.what}" in told for part in PARTS.values())
