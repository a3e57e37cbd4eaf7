"""The workers of one generation: process groups that are started, watched and stopped as one.

An exit is an event (a pidfd becomes readable), never found by polling. I3 rests on `emptied`: it
comes when nothing of any worker's process group runs any more, not when the leaders are gone.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastic_etcd import trampoline
from elastic_etcd.agent.failures import failure_message
from elastic_etcd.agent.logs import Logs, WorkerLog
from elastic_etcd.agent.processes import kill_members, signal_group

# Over a debugger's shoulder a dead worker can't be reaped until the debugger has seen it.
_REAP_AGAIN = 0.05
_STUCK = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSpec:
    """What one worker runs; `env` is its whole environment, `error_file` may be ""."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    rank: int
    local_rank: int
    error_file: str


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended.

    `code` is the exit status, or minus the signal; 127 and 126 also stand for a program that was
    not found or could not be run. `uptime` is in seconds. `message` is the cause in the worker's
    own words: see failures.failure_message.
    """

    generation: int
    rank: int
    local_rank: int
    pid: int
    code: int
    uptime: float
    message: str


class _Worker:
    """One started process: its pid is also its process group."""

    def __init__(
        self, spec: WorkerSpec, output: WorkerLog, process: subprocess.Popen[bytes]
    ) -> None:
        self.spec = spec
        self.output = output
        self.process = process
        self.pid = process.pid
        self.started = asyncio.get_running_loop().time()


class WorkerGroup:
    """`start()` once, then `exited` for each worker and at the end `emptied`, exactly once.

    The callbacks come from the event loop, never from within a call of ours, and may call `stop`
    and `kill`. A worker's leftover children are killed as soon as it is dead.
    """

    def __init__(
        self,
        generation: int,
        specs: Sequence[WorkerSpec],
        logs: Logs,
        exited: Callable[[WorkerExit], None],
        emptied: Callable[[int], None],
    ) -> None:
        self.generation = generation
        self._specs = specs
        self._logs = logs
        self._exited = exited
        self._emptied = emptied
        self._started = self._stopping = False
        self._running: dict[int, _Worker] = {}
        self._leftover: dict[int, _Worker] = {}  # the leader is reaped, its group perhaps not empty
        self._unreported = 0
        self._looking = self._told = False
        self._timer: asyncio.TimerHandle | None = None
        self._dying: dict[int, set[int]] = {}  # group -> pidfds

    @property
    def pids(self) -> dict[int, int]:
        """{rank: pid} of the workers that run."""
        return {worker.spec.rank: worker.pid for worker in self._running.values()}

    def start(self) -> None:
        """Start every worker; one that can't be started is told as an exit, like any other."""
        if self._started or self._stopping:
            return
        self._started = True
        for spec in self._specs:
            self._start(spec)
        self._look_soon()

    def stop(self, grace: float) -> None:
        """SIGTERM now, SIGKILL after `grace` seconds. Again: a shorter grace wins."""
        if not self._stopping:
            self._stopping = True
            for pid in self._running:
                signal_group(pid, signal.SIGTERM)
            self._look_soon()
        loop = asyncio.get_running_loop()
        end = loop.time() + grace
        if self._timer is None or end < self._timer.when():
            self._cancel_timer()
            if self._running:
                self._timer = loop.call_at(end, self.kill)
        if grace <= 0:
            self.kill()

    def kill(self) -> None:
        """SIGKILL every worker's process group now."""
        self._cancel_timer()
        self._stopping = True
        for pid in self._running:
            signal_group(pid, signal.SIGKILL)
        if self._running:
            self._timer = asyncio.get_running_loop().call_later(_STUCK, self._tell_stuck)
        self._look_soon()

    def _start(self, spec: WorkerSpec) -> None:
        loop = asyncio.get_running_loop()
        try:
            output = self._logs.worker(self.generation, spec.rank, spec.local_rank)
        except OSError as error:
            self._not_started(spec, error)
            return
        try:
            process = _spawn(spec, output)
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            self._not_started(spec, error)
            output.begin()
            output.close()
            return
        output.begin()
        worker = _Worker(spec, output, process)
        self._running[worker.pid] = worker
        loop.add_reader(pidfd, self._on_exit, worker, pidfd)

    def _not_started(self, spec: WorkerSpec, error: OSError) -> None:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        message = f"can't start {spec.argv[0]}: {error.strerror}"
        exit_ = WorkerExit(self.generation, spec.rank, spec.local_rank, 0, code, 0.0, message)
        self._unreported += 1
        asyncio.get_running_loop().call_soon(self._report_not_started, exit_)

    def _report_not_started(self, exit_: WorkerExit) -> None:
        self._unreported -= 1
        self._exited(exit_)
        self._look_soon()

    def _on_exit(self, worker: _Worker, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(pidfd)
        # While the leader is not reaped its group's number can't be another group's.
        signal_group(worker.pid, signal.SIGKILL)
        code = worker.process.poll()
        if code is None:
            loop.call_later(_REAP_AGAIN, self._on_exit, worker, pidfd)
            return
        os.close(pidfd)
        uptime = loop.time() - worker.started
        worker.output.drain()
        del self._running[worker.pid]
        self._leftover[worker.pid] = worker
        spec = worker.spec
        message = failure_message(code, spec.error_file, worker.output.err.tail())
        self._look_soon()
        self._exited(
            WorkerExit(
                self.generation, spec.rank, spec.local_rank, worker.pid, code, uptime, message
            )
        )

    def _look_soon(self) -> None:
        """Look at the leftover groups once for all the workers that die in this turn."""
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        left = [pid for pid in self._leftover if pid not in self._dying and signal_group(pid, 0)]
        self._dying.update(self._watch(left))
        for pid in self._leftover.keys() - self._dying.keys():
            self._leftover.pop(pid).output.close()
        if self._dying and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_STUCK, self._tell_stuck)
        if not (self._running or self._leftover or self._unreported or self._told):
            self._told = True
            self._cancel_timer()
            self._emptied(self.generation)

    def _watch(self, groups: list[int]) -> dict[int, set[int]]:
        """{group: pidfds} of those in which something still runs."""
        members = kill_members(groups) if groups else {}
        for group, pidfds in members.items():
            for pidfd in pidfds:
                asyncio.get_running_loop().add_reader(pidfd, self._on_gone, group, pidfd)
        return {group: set(pidfds) for group, pidfds in members.items() if pidfds}

    def _on_gone(self, group: int, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._dying[group].remove(pidfd)
        if not self._dying[group]:
            del self._dying[group]
            self._look_soon()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell_stuck(self) -> None:
        still = [*self._running.values(), *self._leftover.values()]
        ranks = ", ".join(str(worker.spec.rank) for worker in still)
        log.warning(
            "generation %d: processes of rank %s are still there %d s after SIGKILL, stuck in the "
            "kernel (a hung device or network file system?); this node waits for them",
            self.generation, ranks, _STUCK,
        )  # fmt: skip


def _spawn(spec: WorkerSpec, output: WorkerLog) -> subprocess.Popen[bytes]:
    """Start one worker in a process group of its own.

    Its stdin is /dev/null: it is not in the terminal's foreground group, so reading the terminal
    would stop it with SIGTTIN, and several workers can't share one input anyway.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--", *spec.argv],
        env=dict(spec.env),
        stdin=subprocess.DEVNULL,
        stdout=output.out.child_fd,
        stderr=output.err.child_fd,
        process_group=0,
    )
