"""One worker process: the leader of a process group, from its start to its end.

It may outlive a generation: a worker that recovers in process is asked to park at the barrier
instead of being killed, and is sent on with another rank in the next generation.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_etcd.agent.logs import WorkerLog
from elastic_etcd.process import ExitWatch, Process, signal_group, spawn
from elastic_etcd.protocol import World

if TYPE_CHECKING:
    from elastic_etcd.agent.channel import WorkerChannel


@dataclass(frozen=True)
class WorkerSpec:
    """What one worker runs; `env` is its whole environment, `error_file` may be ""."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    rank: int
    local_rank: int
    error_file: str


class Worker:
    """A running process. `ended(worker, code)` comes once, from the event loop.

    What is left of its process group is killed before that.
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
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        ExitWatch(process, self._on_exit, group=True)

    @property
    def uptime(self) -> float:
        """Seconds in its present generation."""
        return self._loop.time() - self._started

    def terminate(self, *, group: bool) -> None:
        """SIGTERM to the process itself, or to its whole process group.

        What a script has started ends with it. A DataLoader's workers that got SIGTERM, too, would
        make the very step fail after which the script saves.
        """
        if group:
            signal_group(self.pid, signal.SIGTERM)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # as for a group
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole process group."""
        signal_group(self.pid, signal.SIGKILL)

    def resume(self, spec: WorkerSpec, generation: int, reason: str) -> bool:
        """Send it on from the barrier as `spec`; False when it can't be reached."""
        before = self.spec.env
        changed = {name: value for name, value in spec.env.items() if before.get(name) != value}
        self.spec = spec
        self._started = self._loop.time()
        world = World(generation, reason, changed)
        return self.channel is not None and self.channel.send(world)

    def _on_exit(self, code: int) -> None:
        self.output.drain()
        self._ended(self, code)


def execute(spec: WorkerSpec, output: WorkerLog) -> Process:
    """Start `spec` as a program of its own, which leads a session and a process group.

    Its stdin is /dev/null: the terminal is not its session's, and several workers can't share one
    input anyway. Raises OSError.
    """
    out, err = output.out.child_fd, output.err.child_fd
    return spawn(spec.argv, spec.env, stdout=out, stderr=err, session=True)
