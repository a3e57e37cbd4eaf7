"""A worker process, which leads a process group, from its start to its end.

It may outlive a generation: a worker that recovers in process is asked to park at the barrier
instead of being killed, and is sent on with another rank in the next generation.
"""

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_etcd import children
from elastic_etcd.agent.output.logs import WorkerLog
from elastic_etcd.protocol.messages import FromAgent, NextWorld
from elastic_etcd.system.child_process import ExitWatch, Process, start
from elastic_etcd.system.processes import signal_group

if TYPE_CHECKING:
    from elastic_etcd.agent.channel import WorkerChannel

_RUN_SCRIPT = str(Path(children.__file__).with_name("run_script.py"))


@dataclass(frozen=True)
class WorkerSpec:
    """A worker's command, and its place in the world."""

    argv: tuple[str, ...]
    env: Mapping[str, str]  # all of it
    rank: int
    local_rank: int
    error_file: str  # or ""
    hands_signals_on: bool = True  # as a script may, and a shell does not


class Worker:
    """A running process.

    `ended(worker, code)` is called once, from the event loop, when all else of its process group
    has got SIGKILL.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        output: WorkerLog,
        process: Process,
        ended: "Callable[[Worker, int], None]",
    ) -> None:
        self.spec = spec
        self.output = output
        self.pid = process.pid
        self.channel: WorkerChannel | None = None  # once it has said that it can park
        self.finished = False  # it has left its worlds, and can't park any more
        self.killed = False
        self.grace = self.end = math.inf  # how long it has to stop, and until when
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        ExitWatch(process, self._on_exit, group=True)

    @property
    def uptime(self) -> float:
        """Seconds in its present generation."""
        return self._loop.time() - self._started

    def tell(self, message: FromAgent) -> bool:
        """Send it a message, if it can park; whether it could be sent."""
        return not self.finished and self.channel is not None and self.channel.send(message)

    def give(self, grace: float) -> None:
        """It has so many seconds from now; of two calls the sooner end counts."""
        end = self._loop.time() + grace
        if end < self.end:
            self.grace, self.end = grace, end

    def terminate(self, number: int = signal.SIGTERM) -> None:
        """A signal to the process itself, or to its whole group if it hands no signal on.

        A script's children end with it. A DataLoader's workers that got SIGTERM, too, would make
        the very step fail after which the script saves.
        """
        if not self.spec.hands_signals_on:
            signal_group(self.pid, number)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # as for a group
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the whole process group."""
        self.killed = True
        signal_group(self.pid, signal.SIGKILL)

    def resume(self, spec: WorkerSpec, generation: int, reason: str) -> bool:
        """Send it on from the barrier as `spec`; False when it can't be reached."""
        before = self.spec.env
        changed = {name: value for name, value in spec.env.items() if before.get(name) != value}
        self.spec = spec
        self._started = self._loop.time()
        self.grace = self.end = math.inf
        world = NextWorld(generation, reason, changed)
        return self.channel is not None and self.channel.send(world)

    def _on_exit(self, code: int) -> None:
        self.output.drain()
        self._ended(self, code)


async def execute(
    argv: Sequence[str], env: Mapping[str, str], output: WorkerLog, stdin: int
) -> Process:
    """Start a program, which leads a session and a process group. Raises OSError."""
    out, err = output.out.child_fd, output.err.child_fd
    return await start(argv, env, stdout=out, stderr=err, stdin=stdin, session=True)


def through_run_script(argv: Sequence[str]) -> Sequence[str]:
    """`python -u train.py ...` so that its agent sees its steps."""
    python, unbuffered, *rest = argv
    return (python, unbuffered, _RUN_SCRIPT, *rest)
