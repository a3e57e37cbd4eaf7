"""The traps in docs/contributing/failures.md stay true: each test that it names is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "contributing" / "failures.md").read_text().partition("\n## Traps\n")[2]
ROWS = re.findall(r"^\| (.+?) \| (.*?) ?\| (`.+`) \|$", SECTION.partition("\n## ")[0], re.MULTILINE)


@cache
def functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


def test_all_traps_are_listed() -> None:
    assert len(ROWS) == 18, "see the column of tests if one is missing"


@pytest.mark.parametrize(("trap", "tests"), [(trap, tests) for trap, _, tests in ROWS])
def test_the_tests_of_a_trap_have_its_name(trap: str, tests: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    assert len(named) == tests.count("`") // 2
    for file, name in named:
        assert name in functions(ROOT / file), f"{file} has no {name}"
    words = re.sub(r"[^a-z0-9]+", "_", trap.lower()).strip("_")
    assert words in named[0][1], f"the first of them should be called after {words}"
