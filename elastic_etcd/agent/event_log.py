"""What happens on this node, as torch's events, a line each: --event-log. Loaded with it only.

A file is written by a thread, since its disk may stand still; stdout is the agent's console, which
never blocks.
"""

import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.history import OUTCOMES, Event, event
from elastic_etcd.agent.output.console import Console
from elastic_etcd.agent.output.writer import DiskFile, Writer
from elastic_etcd.core import lifecycle
from elastic_etcd.core.lifecycle import (
    Error,
    Finished,
    Joined,
    LeaseLost,
    Left,
    Outdated,
    Over,
    State,
    WorkerEnded,
    WorkersHang,
)
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Round
from elastic_etcd.core.view import View

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_log(config: AgentConfig, stdout: Console) -> AsyncIterator["EventLog"]:
    """The log at `config.event_log`; leaving it writes out what waits, if that moves."""
    path = config.event_log
    assert path
    async with AsyncExitStack() as scope:
        if path == "-":
            told = EventLog(config, stdout.say)
        else:
            writer = Writer()
            scope.push_async_callback(writer.close, patience=1)
            file = _file(path, writer)
            scope.callback(file.close)
            told = EventLog(config, file.keep)
        scope.callback(told.end)
        yield told


def _file(path: str, writer: Writer) -> DiskFile:
    known: set[int | None] = set()

    def open_file() -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def failed(error: OSError) -> None:
        if error.errno not in known:
            known.add(error.errno)
            log.warning("--event-log %s: can't be written: %s", path, error.strerror)

    return DiskFile(writer, path, open_file, failed)


class EventLog:
    """Turns what an agent and its Measure tell into lines for `write`."""

    def __init__(self, config: AgentConfig, write: Callable[[bytes], None]) -> None:
        self._job, self._node, self._role = config.job, config.node, config.role
        self._write = write
        self._state = State(Local(run=""), config.nproc)
        self._generation = 0  # of the world whose phases are told
        self._began = self._since = time.monotonic()

    def see(self, before: State, happened: lifecycle.Event, state: State) -> None:
        """Take note of the agent's new state, and tell what has happened."""
        self._state = state
        match happened:
            case Joined():
                self._tell_event("node.joined", f"{self._node} is a member")
            case LeaseLost(reason):
                self._tell_event("node.lost", f"{self._node} has lost its lease: {reason}")
            case WorkerEnded(generation, failure) if failure:
                told = f"generation {generation}: {failure} after {failure.uptime:.1f} s"
                self._tell_event("FAILED", told, failure=failure, generation=generation)
            case WorkersHang(generation, failure):
                told = f"generation {generation}: {failure}"
                self._tell_event("hang", told, generation=generation, reason=str(failure))
        if state.local.leaving and not before.local.leaving:
            self._tell_event("node.leaving", f"{self._node} is leaving")
        if isinstance(state.result, Finished) and not isinstance(before.result, Finished):
            told = f"generation {state.local.ran}: all workers of {self._node} exited 0"
            self._tell_event("SUCCEEDED", told, generation=state.local.ran)
        self._tell_round(before.view, state.view)

    def _tell_round(self, before: View | None, after: View | None) -> None:
        was, now = before.round if before else None, after.round if after else None
        if now is None or (was and (was.generation, was.phase) == (now.generation, now.phase)):
            return
        told = f"generation {now.generation} is {now.phase.value}: {now.reason}"
        self._tell_event("round", told, generation=now.generation, phase=now.phase.value)

    def end(self) -> None:
        """The agent ends."""
        told, lasted = f"the agent of {self._node} ends", time.monotonic() - self._began
        match self._state.ending:
            case None | Left():
                self._tell_event("TERMINATED", told, total=lasted)
            case Over(reason):
                state = OUTCOMES.get(reason.partition(":")[0], "TERMINATED")
                self._tell_event(state, f"{told}: {reason}", total=lasted, reason=reason)
            case Error() | Outdated() as ending:
                why = ending.reason
                self._tell_event("FAILED", f"{told}: {why}", total=lasted, reason=why)

    # --- the phases of this node's worlds, see measure.Phases -----------------------------

    def begin_world(self, cause: str, now: float) -> None:
        """Its workers are started."""
        begun = self._round
        assert begun
        self._generation, ran = begun.generation, self._state.local.ran
        told = (
            f"generation {ran}: world of {begun.world_size} on {begun.nodes} nodes: {begun.reason}"
        )
        more = {"reason": begun.reason, "cause": cause, "world_size": begun.world_size}
        self._tell_phase("RENDEZVOUS", told, now, group_world_size=begun.nodes, **more)

    def pass_phase(self, phase: str, now: float) -> None:
        """The workers train, or are gone."""
        if phase == "start":
            self._tell_phase("START", f"generation {self._generation}: the workers are there", now)
        elif phase == "stop":
            told = f"generation {self._generation}: no worker trains here any more"
            self._tell_phase("STOPPED", told, now)

    def train(self, now: float) -> None:
        """The first step is done."""
        told = f"generation {self._generation}: the first step is done"
        self._tell_phase("training", told, now)

    def end_world(self, now: float, idle: float) -> None:
        """The workers are to stop; the last step was done `idle` seconds ago."""
        told = f"generation {self._generation}: the workers stop"
        self._tell_phase("stopping", told, now, idle=round(idle, 3))

    def forget(self) -> None:
        """A spare, or done."""

    # --- a line ---------------------------------------------------------------------------

    @property
    def _round(self) -> Round | None:
        return self._state.view.round if self._state.view else None

    @property
    def _restarts(self) -> int:
        return self._round.restarts if self._round else 0

    def _tell_phase(self, state: str, told: str, now: float, **more: Any) -> None:
        """`now` is the loop's clock, which is the monotonic one."""
        took, self._since = now - self._since, now
        self._tell_event(state, told, seconds=took, generation=self._generation, **more)

    def _tell_event(self, state: str, told: str, **more: Any) -> None:
        view, local = self._state.view, self._state.local
        part = view.part(local.lease) if view else None
        rank = part.group_rank if part else None
        names: dict[str, Any] = {"job": self._job, "node": self._node, "role": self._role}
        at = time.time_ns() // 10**6
        self._put(
            event(state, told, at=at, group_rank=rank, restarts=self._restarts, **names, **more)
        )

    def _put(self, told: Event) -> None:
        self._write(told.json().encode() + b"\n")
