"""The base of the followers that look again and again at what no event tells: at the workers."""

import asyncio
from contextlib import suppress
from typing import ClassVar

from elastic_etcd.agent.inbox import Tasks
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core.lifecycle import Event, Finding, Published, State
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Keys
from elastic_etcd.core.txn import Txn
from elastic_etcd.core.view import Everything


def leads(state: State) -> bool:
    """Whether this agent is the job's coordinator, and sees all of the job."""
    view = state.view
    if view is None or view.round is None or view.coverage != Everything():
        return False
    return view.round.coordinator == state.local.lease


class PeriodicFollower:
    """A follower with a task, `run`, which looks each time that a `pause` is over.

    `news` in between has it `hear`. Only that task publishes, so that one Txn is on its way at a
    time.
    """

    name: ClassVar[str]

    def __init__(self, keys: Keys, workers: Workers, tasks: Tasks) -> None:
        self.news = asyncio.Event()
        self.state = State(Local(run=""), 0)  # the agent's, as it was seen last
        self._keys = keys
        self._workers = workers
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._due: float | None = None  # when the pause is over
        self._answer: asyncio.Future[bool] | None = None

    def see(self, before: State, event: Event, state: State) -> None:
        """Take note of the agent's new state, and of etcd's answer."""
        del before
        self.state = state
        match event:
            case Published(self.name, ok) if self._answer:
                self._answer.set_result(ok)
                self._answer = None

    async def run(self) -> None:
        """Look and hear for as long as the agent lives."""
        self.rest()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._due):
                    await self.news.wait()
            if self.news.is_set():
                self.news.clear()
                await self.hear()
            if self._due is not None and self._loop.time() >= self._due:  # whatever news comes
                await self.look()
                self.rest()

    def rest(self) -> None:
        """Begin another pause."""
        pause = self.pause()
        self._due = None if pause is None else self._loop.time() + pause

    async def publish(self, txn: Txn) -> bool:
        """Have it written by the agent; gives whether that was done, as far as is known."""
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._answer = answer
        self._tasks.inbox.put(Finding(self.name, txn))
        return await answer

    def pause(self) -> float | None:
        """Seconds until the next look; None: not before there is news."""
        return None

    async def look(self) -> None:
        """Look at the workers, and publish what is found."""

    async def hear(self) -> None:
        """Take in the news."""
