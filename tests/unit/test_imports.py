"""Who may import whom: the order that keeps the rules pure and the agent small."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic_etcd

ROOT = Path(elastic_etcd.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
PARTS = {"core", "etcd", "agent", "train", "cli", "launch"}
# Each part with the parts it may import; errors.py and the version are everybody's.
MAY_IMPORT = {
    "core": {"core"},
    "etcd": {"etcd", "core"},
    "agent": {"agent", "etcd", "core"},
    "train": {"train", "core"},
    "cli": PARTS - {"train"},
    "launch": PARTS - {"train"},
    "__init__": {"train"},  # what a script uses, and loaded only when it does
}
# The rules get time, randomness and the outside world as arguments.
NOT_IN_CORE = {"asyncio", "time", "os", "random", "logging", "threading", "socket", "subprocess"}


def part(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[str]:
    """Every module that the file names in an import, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", FILES, ids=named)
def test_parts_import_only_what_lies_below_them(file: Path) -> None:
    ours = [name.split(".")[1] for name in imports(file) if name.startswith("elastic_etcd.")]
    allowed = MAY_IMPORT.get(part(file), set())
    assert set(ours) & PARTS <= allowed


@pytest.mark.parametrize("file", [f for f in FILES if part(f) == "core"], ids=named)
def test_core_has_no_clock_chance_or_outside(file: Path) -> None:
    assert {name.split(".")[0] for name in imports(file)} & NOT_IN_CORE == set()


@pytest.mark.parametrize(("library", "only"), [("grpc", "etcd"), ("torch", "train")])
def test_a_library_is_imported_by_one_part_only(library: str, only: str) -> None:
    users = {part(f) for f in FILES for name in imports(f) if name.split(".")[0] == library}
    assert users <= {only}


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("elastic_etcd", {"torch", "grpc", "asyncio", "elastic_etcd.train"}),
        ("elastic_etcd.launch", {"torch", "grpc", "rich", "asyncio"}),
        ("elastic_etcd.agent.agent", {"torch", "numpy", "rich"}),
        ("elastic_etcd.core.rules", {"grpc", "asyncio", "logging"}),
    ],
)
def test_importing_does_not_load(module: str, without: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) & without == set()
