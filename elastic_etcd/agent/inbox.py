"""The inbox of an agent, the group of its tasks, its timers, and the door of its followers.

An event is put into the inbox and stepped through core/lifecycle.py, one after the other. Work that
takes time runs as a task of the group, so that a task that crashes ends the agent with its error.
Timers are the one way in which an agent's parts wait for a moment of the event loop's clock.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from elastic_etcd.core.lifecycle import Event, State


class Follower(Protocol):
    """Learns of the agent's life, and changes nothing in it.

    A follower that wants something written to etcd puts Finding into the inbox, so that the flight
    recorder has it, and is answered by Published.
    """

    def see(self, before: State, event: Event, state: State) -> None:
        """Take note of each event, and of the state before and after it.

        The actions that follow from it have not been done yet.
        """


@dataclass(frozen=True, slots=True)
class MirrorChanged:
    """The mirror of etcd has changed: look at it."""


@dataclass(frozen=True, slots=True)
class FatalError:
    """Nothing can go on: the agent ends with this error once its workers are gone."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Unkillable:
    """Workers are still there long after SIGKILL."""


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine goes, in so many `seconds` if that is known, or is not fit to train.

    exit_code: of the agent that leaves for it, if it has one of its own.
    """

    what: str
    seconds: float | None = None
    exit_code: int | None = None


Incoming: TypeAlias = Event | MirrorChanged | FatalError | Unkillable | Notice

_RESTS = 4
_CHEAP = 0.001  # seconds: a view of some hundred nodes


class Inbox:
    """A queue of all that comes in. Many changes of the mirror before it is looked at are one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Incoming] = asyncio.Queue()
        self._changed = False
        self._rests_until = 0.0

    def put(self, event: Incoming) -> None:
        """Add an event; never waits."""
        if isinstance(event, MirrorChanged):
            if self._changed:
                return
            self._changed = True
            if self._rests_until > self._loop.time():
                self._loop.call_at(self._rests_until, self._queue.put_nowait, event)
                return
        self._queue.put_nowait(event)

    def put_from_thread(self, event: Incoming) -> None:
        """Add an event, from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.put, event)

    def put_error(self, ended: asyncio.Future[Any]) -> None:
        """Add FatalError if the future has ended with an error."""
        if not ended.cancelled() and isinstance(error := ended.exception(), Exception):
            self.put(FatalError(error))

    def rest(self, seconds: float) -> None:
        """Let changes of the mirror gather for longer than the last one took, if that was long.

        Each costs a look at all nodes: of 10,000 that join one by one, that would be their square.
        """
        if seconds > _CHEAP:
            self._rests_until = self._loop.time() + _RESTS * seconds

    async def get(self) -> Incoming:
        """The oldest event, once there is one."""
        event = await self._queue.get()
        if isinstance(event, MirrorChanged):
            self._changed = False
        return event


class Tasks:
    """`async with Tasks() as tasks`: its tasks end with the scope, and the scope with a crash.

    A task that raises cancels the scope's body and all other tasks, and leaving the scope raises
    its error, as the first of an ExceptionGroup. The tasks have an `inbox` for what they find out.
    """

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.ended = False  # the scope is left, or a crash ends it: no task is to begin
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        self.ended = True
        for task in self._running:
            task.cancel()
        await self._group.__aexit__(kind, error, stack)

    def create(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin `work`."""
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self.ended = self.ended or not (task.cancelled() or task.exception() is None)


class Timer:
    """Calls once after some seconds, unless it is cancelled or set anew before that."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        """Set it anew."""
        self.cancel()
        self._handle = asyncio.get_running_loop().call_later(seconds, call, *args)

    def start_once(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        """Set it, unless it is set and was not cancelled, even if it has called since."""
        if self._handle is None:
            self.start(seconds, call, *args)

    def cancel(self) -> None:
        """Take it back."""
        if self._handle:
            self._handle.cancel()
            self._handle = None


class Respawn:
    """Starts a process again when it has died: more and more slowly, if it dies soon each time."""

    def __init__(self, start: Callable[[], object], quiet: float, slowest: float) -> None:
        self._start = start
        self._quiet = quiet  # seconds: one that has lived so long is replaced at once
        self._slowest = slowest
        self._delay = self._since = 0.0
        self._timer = Timer()

    def started(self) -> None:
        """Count its life from here on."""
        self._since = asyncio.get_running_loop().time()

    def again(self) -> str:
        """Start it again, soon; gives the words for when."""
        if asyncio.get_running_loop().time() - self._since > self._quiet:
            self._delay = 0.0
        when = f"in {self._delay:.0f} s" if self._delay else "now"
        self._timer.start(self._delay, self._start)
        self._delay = min(self._slowest, max(1.0, 2 * self._delay))
        return when

    def cancel(self) -> None:
        """Start it no more."""
        self._timer.cancel()
