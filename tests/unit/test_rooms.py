"""The sizes of rooms, files and functions: printed for a person to judge (`pytest -s`)."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import elastic_etcd

PACKAGE = Path(elastic_etcd.__file__).parent
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.parent.name != "pb")
TREES = {file: ast.parse(file.read_text()) for file in FILES}
# Files of one name, and why; every other name has one meaning.
SAME_FILE: dict[str, str] = {}
LONGEST = 5  # functions and constructors that are named
Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_a_file_has_a_name_of_its_own() -> None:
    names = Counter(file.name for file in FILES if file.name != "__init__.py")
    assert {name for name, count in names.items() if count > 1} == SAME_FILE.keys()


def test_the_sizes_are_printed() -> None:
    rooms = Counter[str]()
    for file in FILES:
        rooms[_room(file)] += len(file.read_text().splitlines())
    for room, lines in rooms.most_common():
        print(f"{lines:7} {room}")
    importers = _importers()
    alone = [str(file.relative_to(PACKAGE)) for file, others in importers.items() if others == 1]
    print(f"{rooms.total():7} in all, {len(importers)} files, {len(alone)} with one importer")
    print(f"{sum(file.read_text().count('Callable[') for file in FILES)} times Callable[")
    print("functions by lines:", _most((_lines(node), name) for name, node in _functions()))
    print("constructors by parameters:", _most(_constructors()))
    assert rooms.keys() > {"core", "etcd", "agent", "train"}


def _room(file: Path) -> str:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "the package itself"


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
