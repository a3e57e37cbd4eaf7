"""What the tests of each folder cost, in wall and CPU time: pytest's last lines.

A row of scripts/test adds the same to the file $TEST_LEVELS; this module, run with that file,
prints the sum. The CPU time is that of pytest, of what it has started and of what that has waited
for. A process that outlives the one that started it is not in it.
"""

import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
LOADS_TORCH = re.compile(r"^ *(import|from) torch|support\.forked|unit\.prefork", re.MULTILINE)


@dataclass
class Level:
    """The tests of one folder; times are in seconds."""

    tests: int = 0
    wall: float = 0.0
    cpu: float = 0.0

    def add(self, tests: int, wall: float, cpu: float) -> None:
        self.tests += tests
        self.wall += wall
        self.cpu += cpu


_levels: defaultdict[str, Level] = defaultdict(Level)


def cpu() -> float:
    """CPU seconds of this process, of children that have ended and of children that live."""
    spent = os.times()
    children = (spent.children_user, spent.children_system)
    return spent.user + spent.system + sum(children) + sum(map(_of_child, _children()))


def _children() -> list[int]:
    threads = Path("/proc/self/task").glob("*/children")
    return [int(pid) for thread in threads for pid in _read(thread).split()]


def _of_child(pid: int) -> float:
    stat = _read(Path(f"/proc/{pid}/stat"))
    return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / TICKS


def _read(file: Path) -> str:
    """A file of /proc; "" where its process or thread has ended meanwhile."""
    try:
        return file.read_text()
    except OSError:
        return ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Count a test with its fixtures to its level."""
    wall, spent = time.monotonic(), cpu()
    try:
        return (yield)
    finally:
        level = _levels[level_of(item.path, item.config.rootpath)]
        level.add(1, time.monotonic() - wall, cpu() - spent)


@cache
def level_of(file: Path, root: Path) -> str:
    """The folder below tests/; files of tests/unit that load torch are a level of their own."""
    folder = file.relative_to(root).parts[1]
    loads = folder == "unit" and LOADS_TORCH.search(file.read_text())
    return "unit, torch" if loads else folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show them; also for scripts/test, which adds up its rows."""
    if not _levels:
        return
    terminalreporter.section("levels")
    terminalreporter.write_line(table(_levels))
    if file := os.environ.get("TEST_LEVELS"):
        with Path(file).open("a") as stream:
            for name, level in _levels.items():
                print(json.dumps([name, level.tests, level.wall, level.cpu]), file=stream)


def table(levels: dict[str, Level]) -> str:
    """A line for each level, the most expensive first, and one for all."""
    ordered = sorted(levels.items(), key=lambda pair: -pair[1].cpu)
    whole = Level()
    for level in levels.values():
        whole.add(level.tests, level.wall, level.cpu)
    lines = [f"{'level':12} {'tests':>6} {'wall min':>9} {'CPU min':>8}"]
    lines += [
        f"{name:12} {level.tests:6} {level.wall / 60:9.1f} {level.cpu / 60:8.1f}"
        for name, level in [*ordered, ("all", whole)]
    ]
    return "\n".join(lines)


def main() -> None:
    levels: defaultdict[str, Level] = defaultdict(Level)
    for line in Path(sys.argv[1]).read_text().splitlines():
        name, *figures = json.loads(line)
        levels[name].add(*figures)
    print(table(levels))


if __name__ == "__main__":
    main()
