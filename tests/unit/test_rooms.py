"""The sizes of rooms, files and functions: printed (`pytest -s`), and held to their budgets."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import elastic_etcd

PACKAGE = Path(elastic_etcd.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.parent.name != "pb")
TREES = {file: ast.parse(file.read_text()) for file in FILES}
# Files of one name, and why; every other name has one meaning.
SAME_FILE: dict[str, str] = {}
LONGEST = 5  # functions and constructors that are named
BUDGETS = {  # what, the bound that holds now, and the goal
    what: (int(now), int(goal))
    for what, now, goal in re.findall(
        r"^\| ([a-z', ]+) \| (\d+) \| (\d+) \|$",
        (ROOT / "docs" / "contributing" / "budgets.md").read_text(),
        re.MULTILINE,
    )
}
ROOMS = [what for what in BUDGETS if re.match("lines of (?!the package|tests|scripts)", what)]
LOADED = """
import sys
import elastic_etcd.launch, elastic_etcd.agent.agent
for name, module in sys.modules.items():
    if name.partition(".")[0] == "elastic_etcd":
        print(getattr(module, "__file__", None) or "")
"""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_a_file_has_a_name_of_its_own() -> None:
    names = Counter(file.name for file in FILES if file.name != "__init__.py")
    assert {name for name, count in names.items() if count > 1} == SAME_FILE.keys()


def test_the_sizes_are_printed() -> None:
    rooms = _rooms()
    for room, lines in rooms.most_common():
        print(f"{lines:7} {room}")
    print(f"{sum(file.read_text().count('Callable[') for file in FILES)} times Callable[")
    print("functions by lines:", _most((_lines(node), name) for name, node in _functions()))
    print("constructors by parameters:", _most(_constructors()))
    print("files with one importer:", *_with_one_importer())
    assert rooms.keys() > {"core", "etcd", "agent", "train"}


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """What docs/contributing/budgets.md has numbers for."""
    rooms, pages = _rooms(), (ROOT / "docs").rglob("*.md")
    words = {page.relative_to(ROOT / "docs"): len(page.read_text().split()) for page in pages}
    users = [page for page in words if len(page.parts) == 1 and page.name != "flags.md"]
    print("\n".join(f"{words[page]:6} words: {page}" for page in sorted(users)))
    return {
        "lines of the package": rooms.total(),
        "lines that an agent loads": _text_lines(_loaded()),
        **{what: sum(rooms[room] for room in re.findall(r"\w+", what)[2:]) for what in ROOMS},
        "files of the package": len(_importers()),
        "files with one importer": len(_with_one_importer()),
        "lines of tests": _text_lines((ROOT / "tests").rglob("*.py")),
        "lines of scripts": _text_lines((ROOT / "scripts").rglob("*.py")),
        "words of documents": sum(words.values()),
        "words of users' pages": sum(words[page] for page in users),
    }


def test_each_room_has_one_budget(sizes: dict[str, int]) -> None:
    assert sizes.keys() == BUDGETS.keys()
    assert sum(sizes[what] for what in ROOMS) == sizes["lines of the package"]


@pytest.mark.parametrize("what", BUDGETS)
def test_each_budget_is_kept(what: str, sizes: dict[str, int]) -> None:
    now, goal = BUDGETS[what]
    print(f"{what}: {sizes[what]}, at most {now}, goal {goal}")
    assert sizes[what] <= now, (
        f"{sizes[what]} {what}, budget {now}: take away as much as you bring. The budgets, in "
        "docs/contributing/budgets.md, are a person's decision"
    )


def _rooms() -> Counter[str]:
    """The lines of each."""
    rooms = Counter[str]()
    for file in FILES:
        rooms[_room(file)] += _text_lines([file])
    return rooms


def _room(file: Path) -> str:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "top"


def _text_lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def _loaded() -> list[Path]:
    """The files that an agent of a job without further flags has imported."""
    ran = subprocess.run(
        [sys.executable, "-c", LOADED], stdout=subprocess.PIPE, text=True, check=True
    )
    return [file for file in FILES if str(file) in ran.stdout.splitlines()]


def _with_one_importer() -> list[str]:
    return [str(file.relative_to(PACKAGE)) for file, others in _importers().items() if others == 1]


def _importers() -> dict[Path, int]:
    """How many files import each of them, by any kind of import."""
    found = {file: set[Path]() for file in FILES if file.name != "__init__.py"}
    names = {".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts): f for f in found}
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                imported = [str(node.module), *(f"{node.module}.{a.name}" for a in node.names)]
            for name in imported:
                if name in names:
                    found[names[name]].add(file)
    return {file: len(others) for file, others in found.items()}


def _functions() -> Iterator[tuple[str, Function]]:
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{file.stem}.{node.name}", node


def _constructors() -> Iterator[tuple[int, str]]:
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                        count = len(each.args.args) + len(each.args.kwonlyargs) - 1
                        yield count, f"{file.stem}.{node.name}"


def _lines(node: Function) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def _most(found: Iterator[tuple[int, str]]) -> str:
    return ", ".join(f"{count} {name}" for count, name in sorted(found, reverse=True)[:LONGEST])
