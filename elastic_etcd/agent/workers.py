"""The workers of one generation: process groups that are started, watched and stopped as one.

An exit is an event (a pidfd becomes readable), never found by polling. I3 rests on `emptied`: it
comes when nothing of any worker's process group runs any more, not when the leaders are gone. A
worker that waits at the barrier without a process group of torch's (it is parked) counts as gone.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic_etcd.agent.channel import Peer
from elastic_etcd.agent.failures import failure_message
from elastic_etcd.agent.leftovers import Leftovers
from elastic_etcd.agent.logs import Logs, WorkerLog
from elastic_etcd.agent.worker import Started, Starter, Worker, WorkerSpec, execute
from elastic_etcd.core.peers import ends_with_lost_peer

_STUCK = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended.

    `code` is the exit status, or minus the signal; 127 and 126 also stand for a program that was
    not found or could not be run. `uptime` is in seconds. `message` is the cause in the worker's
    own words: see failures.failure_message. `by_peer`: they are of a peer that was gone.
    """

    generation: int
    rank: int
    local_rank: int
    pid: int
    code: int
    uptime: float
    message: str
    by_peer: bool = False


@dataclass(frozen=True)
class Notice:
    """What a worker that recovers in process is told instead of SIGTERM; see docs/channel.md."""

    type: str  # "change": stop at a step boundary, "interrupt": the world is broken
    reason: str
    leaving: bool = False

    def message(self, generation: int) -> dict[str, Any]:
        leaving = {"leaving": self.leaving} if self.type == "change" else {}
        return {"type": self.type, "generation": generation, "reason": self.reason, **leaving}


class WorkerGroup:
    """`start()` once, then `exited` for each worker that ends and last `emptied`, exactly once.

    The callbacks come from the event loop, never from within a call of ours, and may call `stop`
    and `kill`. A worker's leftover children are killed as soon as it is dead. `patience` is how
    many seconds a worker may wait at the barrier for a reason of its own before that is a failure.
    """

    def __init__(
        self,
        generation: int,
        specs: Sequence[WorkerSpec],
        logs: Logs,
        exited: Callable[[WorkerExit], None],
        emptied: Callable[[int], None],
        starter: Starter = execute,
        patience: float = 0.0,
    ) -> None:
        self.generation = generation
        self._specs = specs
        self._logs = logs
        self._exited = exited
        self._emptied = emptied
        self._starter = starter
        self._patience = patience
        self._started = self._stopping = False
        self._running: dict[int, Worker] = {}
        self._parked: dict[int, Worker] = {}
        self._leftovers = Leftovers(self._settle)
        self._unreported = self._starting = 0
        self._told = False
        self._left = asyncio.Event()  # set when a parked worker ends
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pids(self) -> dict[int, int]:
        """{rank: pid} of the workers that run."""
        return {worker.spec.rank: worker.pid for worker in self._running.values()}

    @property
    def groups(self) -> tuple[int, ...]:
        """The process groups of all that live, parked ones too."""
        return (*self._running, *self._parked)

    @property
    def elastic(self) -> bool:
        """Whether every worker that runs can park."""
        return all(worker.peer for worker in self._running.values())

    def start(self, parked: Mapping[int, Worker] | None = None, reason: str = "") -> None:
        """Start every worker; one that can't be started is told as an exit, like any other.

        `parked` are those of an older generation, by local rank: they are sent on.
        """
        if self._started or self._stopping:
            return
        self._started = True
        waiting = dict(parked or {})
        for spec in self._specs:
            worker = waiting.pop(spec.local_rank, None)
            if worker is None or not self._resume(worker, spec, reason):
                self._start(spec)
        self._settle_soon()

    def stop(self, grace: float, notice: Notice | None = None) -> None:
        """SIGTERM now, SIGKILL after `grace` seconds. Again: a shorter grace wins.

        A worker that can park is given `notice`, if there is one, instead of SIGTERM.
        """
        again, self._stopping = self._stopping, True
        for worker in self._running.values():
            told = notice and worker.peer and worker.peer.send(notice.message(self.generation))
            if not told and not again:
                worker.signal(signal.SIGTERM)
        self._settle_soon()
        loop = asyncio.get_running_loop()
        end = loop.time() + grace
        if self._timer is None or end < self._timer.when():
            self._cancel_timer()
            if self._running:
                self._timer = loop.call_at(end, self.kill)
        if grace <= 0:
            self.kill()

    def kill(self) -> None:
        """SIGKILL the process group of every worker that still runs now."""
        self._cancel_timer()
        self._stopping = True
        for worker in self._running.values():
            worker.signal(signal.SIGKILL)
        if self._running:
            self._timer = asyncio.get_running_loop().call_later(_STUCK, self._tell_stuck)
        self._settle_soon()

    async def say_bye(self, reason: str, seconds: float) -> None:
        """The job is over for the parked workers: they have so many seconds to end."""
        for worker in self._parked.values():
            if worker.peer is None or not worker.peer.send({"type": "bye", "reason": reason}):
                worker.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._parked:
                    self._left.clear()
                    await self._left.wait()

    def end(self) -> None:
        """SIGKILL all that is left, parked or not."""
        self.kill()
        for worker in self._parked.values():
            worker.signal(signal.SIGKILL)

    def release(self) -> dict[int, Worker]:
        """The parked workers by local rank; they are the caller's from here on."""
        workers, self._parked = self._parked, {}
        return {worker.spec.local_rank: worker for worker in workers.values()}

    def find(self, peer: Peer) -> Worker | None:
        """The worker at the other end of `peer`: the process itself, or one that it has started."""
        known = [*self._running.values(), *self._parked.values()]
        by_pid = (w for w in known if w.pid == peer.pid)
        of_now = known if peer.generation == self.generation else []
        by_rank = (w for w in of_now if w.spec.local_rank == peer.local_rank)
        return next(by_pid, None) or next(by_rank, None)

    def park(self, worker: Worker, error: str) -> None:
        """`worker` waits at the barrier; `error` is why, if nobody has asked it to."""
        if self._running.pop(worker.pid, None) is None:
            return
        self._parked[worker.pid] = worker
        if not self._stopping:
            why = error or "it left its generation without being asked to"
            loop = asyncio.get_running_loop()
            loop.call_later(self._patience, self._waited, worker, why)
        self._settle_soon()

    def _waited(self, worker: Worker, why: str) -> None:
        """Nobody else had a reason for a new generation: what the worker met is the failure."""
        if not self._stopping and worker.pid in self._parked:
            self._report(worker, 1, f"it lost its peers: {why}")

    def _resume(self, worker: Worker, spec: WorkerSpec, reason: str) -> bool:
        worker.ended = self._on_exit
        if worker.resume(spec, self.generation, reason):
            self._logs.move(worker.output, self.generation, spec.rank, spec.local_rank)
            self._running[worker.pid] = worker
            return True
        worker.signal(signal.SIGKILL)
        self._parked[worker.pid] = worker  # until it is reaped
        return False

    def _start(self, spec: WorkerSpec) -> None:
        try:
            output = self._logs.worker(self.generation, spec.rank, spec.local_rank)
        except OSError as error:
            self._not_started(spec, error)
            return
        self._starting += 1
        self._starter(spec, output, partial(self._begun, spec, output))

    def _begun(self, spec: WorkerSpec, output: WorkerLog, process: Started) -> None:
        self._starting -= 1
        output.begin()
        if isinstance(process, OSError):
            self._not_started(spec, process)
            output.close()
            return
        worker = Worker(spec, output, process, self._on_exit)
        self._running[worker.pid] = worker
        if self._stopping:  # asked for before it was there
            worker.signal(signal.SIGKILL)

    def _not_started(self, spec: WorkerSpec, error: OSError) -> None:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        message = f"can't start {spec.argv[0]}: {error.strerror}"
        exit_ = WorkerExit(self.generation, spec.rank, spec.local_rank, 0, code, 0.0, message)
        self._unreported += 1
        asyncio.get_running_loop().call_soon(self._report_not_started, exit_)

    def _report_not_started(self, exit_: WorkerExit) -> None:
        self._unreported -= 1
        self._exited(exit_)
        self._settle_soon()

    def _on_exit(self, worker: Worker, code: int) -> None:
        self._leftovers.add(worker)
        if self._parked.pop(worker.pid, None):
            self._left.set()
            log.debug("worker %d ended at the barrier: %d", worker.spec.rank, code)
            return
        del self._running[worker.pid]
        tail = worker.output.err.tail()
        message = failure_message(code, worker.spec.error_file, tail)
        self._report(worker, code, message, by_peer=ends_with_lost_peer(message))

    def _report(self, worker: Worker, code: int, message: str, *, by_peer: bool = False) -> None:
        spec = worker.spec
        place = (self.generation, spec.rank, spec.local_rank)
        self._exited(WorkerExit(*place, worker.pid, code, worker.uptime, message, by_peer))

    def _settle_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Tell it when nothing is left."""
        if self._leftovers and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_STUCK, self._tell_stuck)
        busy = self._running or self._leftovers or self._unreported or self._starting
        held = self._parked and not self._stopping  # its generation may still go on without it
        if not (busy or held or self._told):
            self._told = True
            self._cancel_timer()
            self._emptied(self.generation)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell_stuck(self) -> None:
        ranks = [worker.spec.rank for worker in self._running.values()] + self._leftovers.ranks
        log.warning(
            "generation %d: processes of rank %s are still there %d s after SIGKILL, stuck in the "
            "kernel (a hung device or network file system?); this node waits for them",
            self.generation, ", ".join(map(str, ranks)), _STUCK,
        )  # fmt: skip
