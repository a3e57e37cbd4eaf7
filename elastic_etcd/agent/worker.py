"""One worker process: the leader of a process group, from its start to its end.

It may outlive a generation: a worker that recovers in process is asked to park at the barrier
instead of being killed, and is sent on with another rank in the next generation.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from elastic_etcd import trampoline
from elastic_etcd.agent.logs import WorkerLog
from elastic_etcd.agent.processes import signal_group

if TYPE_CHECKING:
    from elastic_etcd.agent.channel import Peer

# Over a debugger's shoulder a dead worker can't be reaped until the debugger has seen it.
_REAP_AGAIN = 0.05


@dataclass(frozen=True)
class WorkerSpec:
    """What one worker runs; `env` is its whole environment, `error_file` may be ""."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    rank: int
    local_rank: int
    error_file: str


class Process(Protocol):
    """A child of this process."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, minus the signal; None while it runs."""


Started: TypeAlias = Process | OSError
Starter: TypeAlias = Callable[[WorkerSpec, WorkerLog, Callable[[Started], None]], None]


class Worker:
    """A running process. `ended(worker, code)` comes once, from the event loop.

    `ended` belongs to whoever the worker belongs to, and may be exchanged.
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
        self.ended = ended
        self.pid = process.pid
        self.peer: Peer | None = None  # its channel, once it has said that it can park
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    @property
    def uptime(self) -> float:
        """Seconds in its present generation."""
        return self._loop.time() - self._started

    def signal(self, number: int) -> None:
        """To the whole process group."""
        signal_group(self.pid, number)

    def resume(self, spec: WorkerSpec, generation: int, reason: str) -> bool:
        """Send it on from the barrier as `spec`; False when it can't be reached."""
        before = self.spec.env
        changed = {name: value for name, value in spec.env.items() if before.get(name) != value}
        self.spec = spec
        self._started = self._loop.time()
        world = {"type": "world", "generation": generation, "reason": reason, "env": changed}
        return self.peer is not None and self.peer.send(world)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # While the leader is not reaped its group's number can't be another group's.
        self.signal(signal.SIGKILL)
        code = self._process.poll()
        if code is None:
            self._loop.call_later(_REAP_AGAIN, self._on_exit)
            return
        os.close(self._pidfd)
        self.output.drain()
        self.ended(self, code)


def execute(spec: WorkerSpec, output: WorkerLog, then: Callable[[Started], None]) -> None:
    """Start `spec` as a program of its own, which leads a session and a process group.

    Its stdin is /dev/null: the terminal is not its session's, and several workers can't share one
    input anyway.
    """
    try:
        process: Started = subprocess.Popen(
            [sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--", *spec.argv],
            env=dict(spec.env),
            stdin=subprocess.DEVNULL,
            stdout=output.out.child_fd,
            stderr=output.err.child_fd,
            start_new_session=True,
        )
    except OSError as error:
        process = error
    then(process)
