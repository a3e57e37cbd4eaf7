"""Nodes of one job under any launcher, and the steps that their workers log."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.support.processes import MARK, Changes, marked, send

from .launchers import Launcher

PATIENCE = 60.0  # seconds for what is not measured

T = TypeVar("T")


class NotRecovered(Exception):
    """The job did not train again: "job lost", or not within the bound."""


@dataclass
class Stream:
    """What one process did in one world; times are CLOCK_MONOTONIC in seconds."""

    name: str
    pid: int
    mark: str = ""
    world: int = 0
    first: int = 0  # the number of its first step
    passed: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)

    def reached(self, at: float) -> int:
        """The number of its last step by then, 0 if there is none."""
        done = bisect_right(self.steps, at)
        return self.first + done - 1 if done else 0


@dataclass
class Node:
    """An agent and all that descends from it, found by a mark in the environment."""

    process: "subprocess.Popen[bytes]"
    mark: str
    started: float

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> float:
        """Send it to all of the node, and nobody gets to react before the last has it; when."""
        pids = marked(self.mark)
        at = time.monotonic()
        send(signal.SIGSTOP, pids)
        send(number, pids)
        send(number, marked(self.mark))  # what was forked while they were looked for
        return at


class Run:
    """One job, with one worker on each node, in a directory of its own."""

    def __init__(self, launcher: Launcher, alone: bool = False) -> None:
        self._launcher = launcher
        self._command = launcher.job(alone)
        self.directory = Path(tempfile.mkdtemp(prefix="bench-"))
        # What a killed agent leaves behind goes with the rest.
        (self.directory / "tmp").mkdir()
        self._environment = {**launcher.environment, "TMPDIR": str(self.directory / "tmp")}
        self._changes = Changes(self.directory)
        self._old: set[str] = set()
        self.nodes: list[Node] = []

    def start(self) -> Node:
        """Start one more node."""
        self.nodes.append(self._started(len(self.nodes)))
        return self.nodes[-1]

    def start_again(self, index: int) -> None:
        """Start a node of which nothing is left."""
        self.nodes[index].process.wait(PATIENCE)
        self.nodes[index] = self._started(index)

    def _started(self, index: int) -> Node:
        mark = uuid.uuid4().hex
        with (self.directory / f"agent{index}.log").open("ab") as log:
            started = time.monotonic()
            process = subprocess.Popen(
                [*self._command(index), *self._launcher.script, str(self.directory)],
                env=os.environ | self._environment | {MARK: mark},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._changes.follow(process.pid)
        return Node(process, mark, started)

    def streams(self) -> list[Stream]:
        """All of them."""
        return [_read(path) for path in self.directory.glob("*.steps")]

    def new(self) -> list[Stream]:
        """The streams that `settled` has not returned yet."""
        return [_read(p) for p in self.directory.glob("*.steps") if p.stem not in self._old]

    def lost(self) -> bool:
        """Whether all agents have ended."""
        return all(node.process.poll() is not None for node in self.nodes)

    def rest(self, seconds: float) -> None:
        """Let so much time pass, or less if all agents end."""
        self._changes.wait(self.lost, max(0.0, seconds))

    def last_old_step(self) -> float:
        """When the world that `settled` returned last made its last step."""
        streams = [_read(self.directory / f"{name}.steps") for name in self._old]
        return max(s.steps[-1] for s in streams if s.steps)

    def first_step(self, world: int, seconds: float = PATIENCE) -> float:
        """When the slowest of a new world of this size had done its first step.

        Raises NotRecovered when that does not happen.
        """

        def done() -> float | None:
            firsts = [s.steps[0] for s in self.new() if s.world == world]
            return max(firsts) if len(firsts) >= world else None

        return self._wait(done, seconds)

    def settled(self, world: int, steps: int = 25) -> list[Stream]:
        """Wait until a new world of this size has done some steps; it is an old one then."""

        def reached() -> list[Stream] | None:
            streams = [s for s in self.new() if s.world == world and len(s.steps) >= steps]
            return streams if len(streams) >= world else None

        streams = self._wait(reached, PATIENCE)
        self._old |= {s.name for s in self.new()}
        return streams

    def finish(self, nodes: list[Node]) -> list[int]:
        """Let the workers end by themselves; the agents' exit codes."""
        (self.directory / "stop").touch()
        try:
            return [node.process.wait(PATIENCE) for node in nodes]
        except subprocess.TimeoutExpired:
            raise NotRecovered(f"no end after {PATIENCE:g} s") from None

    def said(self) -> str:
        """The end of what each agent and its worker wrote."""
        logs = sorted(self.directory.glob("agent*.log"))
        return "\n".join(f"{p.stem}: {p.read_text(errors='replace')[-2000:]}" for p in logs)

    def close(self) -> None:
        for node in self.nodes:
            node.signal(signal.SIGKILL)
            node.process.kill()
            node.process.wait()
        self._changes.close()
        shutil.rmtree(self.directory)

    def _wait(self, until: Callable[[], T | None], seconds: float) -> T:
        def ready() -> T | None:
            lost = self.lost()  # before the last look at what they did
            value = until()
            if lost and not value:
                raise NotRecovered("job lost")
            return value

        value = self._changes.wait(ready, seconds)
        if value is None:
            raise NotRecovered(f"> {seconds:g} s")
        return value


def _read(path: Path) -> Stream:
    stream = Stream(path.stem, int(path.stem.partition("-")[0]))
    for line in path.read_text().rpartition("\n")[0].splitlines():
        name, _, rest = line.partition(" ")
        if name == "node":
            stream.mark = rest
        elif name.isdecimal():
            at, world = rest.split()
            stream.first = stream.first or int(name)
            stream.steps.append(float(at))
            stream.world = int(world)
        else:
            stream.passed[line.rpartition(" ")[0]] = float(line.rpartition(" ")[2])
    return stream
