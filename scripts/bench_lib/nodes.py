"""Nodes of a job, under torchrun or under this program, and the steps that their workers log."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.e2e.processes import MARK, Changes, marked, send

WORKER = Path(__file__).with_name("worker.py")
PATIENCE = 60.0  # what takes longer has not recovered

T = TypeVar("T")


class NotRecovered(Exception):
    """The job did not train again in time; with what its agents said."""


@dataclass(frozen=True)
class Step:
    """One step of one worker process; `at` is CLOCK_MONOTONIC in seconds."""

    number: int
    at: float
    world: int
    agent: int
    pid: int


@dataclass
class Node:
    """An agent and all that descends from it, found by a mark in the environment."""

    process: "subprocess.Popen[bytes]"
    mark: str
    started: float

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> float:
        """SIGKILL all of the node at once; when."""
        send(signal.SIGSTOP, [self.pid])  # so that it can't react to its workers' death
        at = time.monotonic()
        send(signal.SIGKILL, marked(self.mark))
        self.process.wait()
        return at


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Run:
    """One job of two nodes with one worker each, in a directory of its own.

    `command` makes an agent's command line for node 0 or 1, without the worker's own.
    """

    def __init__(self, command: Callable[[int], list[str]]) -> None:
        self._command = command
        self._directory = Path(tempfile.mkdtemp(prefix="bench-"))
        self._changes = Changes(self._directory)
        self._old: set[int] = set()
        self.nodes: list[Node] = []

    def start(self) -> Node:
        mark = uuid.uuid4().hex
        index = len(self.nodes)
        with (self._directory / f"agent{index}.log").open("wb") as log:
            started = time.monotonic()
            process = subprocess.Popen(
                [*self._command(index), str(WORKER), str(self._directory)],
                env=os.environ | {MARK: mark},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.nodes.append(Node(process, mark, started))
        return self.nodes[-1]

    def new_steps(self) -> list[Step]:
        """All steps of processes that `settled` has not returned yet, by time."""
        found = []
        for path in self._directory.glob("*.steps"):
            lines = path.read_text().rpartition("\n")[0].splitlines()
            for number, at, world, agent in map(str.split, lines):
                step = Step(int(number), float(at), int(world), int(agent), int(path.stem))
                found.append(step)
        return sorted((s for s in found if s.pid not in self._old), key=lambda s: s.at)

    def first_step(self, world: int, seconds: float = PATIENCE) -> float:
        """When each new process of a world of this size had done its first step.

        Raises NotRecovered when that does not happen.
        """

        def done() -> float | None:
            firsts = {s.pid: s.at for s in reversed(self.new_steps()) if s.world == world}
            return max(firsts.values()) if len(firsts) >= world else None

        return self._wait(done, seconds)

    def settled(self, world: int, steps: int = 25) -> dict[int, int]:
        """Wait until `world` new processes have done some steps: their pids, with their agents'."""

        def reached() -> list[Step] | None:
            last = {s.pid: s for s in self.new_steps()}
            enough = sum(s.number >= steps for s in last.values()) >= world
            return list(last.values()) if enough else None

        last = self._wait(reached, PATIENCE)
        self._old |= {s.pid for s in last}
        return {s.pid: s.agent for s in last}

    def finish(self, node: Node) -> int:
        """Let the workers end by themselves; the agent's exit code."""
        (self._directory / "stop").touch()
        return node.process.wait(PATIENCE)

    def close(self) -> None:
        for node in self.nodes:
            send(signal.SIGKILL, marked(node.mark))
            node.process.kill()
            node.process.wait()
        self._changes.close()
        shutil.rmtree(self._directory)

    def _wait(self, until: Callable[[], T | None], seconds: float) -> T:
        value = self._changes.wait(until, seconds)
        if value is None:
            logs = [p.read_text()[-3000:] for p in sorted(self._directory.glob("agent*.log"))]
            raise NotRecovered("\n".join([f"nothing happened within {seconds:g} s", *logs]))
        return value


def torchrun(store_port: int = 0) -> Callable[[int], list[str]]:
    """The agents of torchrun with the c10d backend, default settings.

    Node 0 hosts the store, unless it is at `store_port` already.
    """
    port, job = store_port or free_port(), uuid.uuid4().hex[:8]

    def command(index: int) -> list[str]:
        host = index == 0 and not store_port
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
            *("--rdzv-id", job, "--rdzv-conf", f"is_host={str(host).lower()}"),
        ]

    return command


def elastic(endpoint: str, job: str = "", *more: str) -> Callable[[int], list[str]]:
    """This program, default settings."""
    job = job or f"bench-{uuid.uuid4().hex[:8]}"

    def command(index: int) -> list[str]:
        return [
            *(sys.executable, "-m", "elastic_etcd.launch"),
            *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
            *("--etcd", endpoint, "--job", job, "--node-name", f"node{index}", *more),
        ]

    return command
