"""An agent's workers without an agent: what goes into its inbox, to be waited for."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, cast

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.directories import own_directory
from elastic_etcd.agent.inbox import Tasks, Unkillable
from elastic_etcd.agent.output.logs import Logs
from elastic_etcd.agent.worker import WorkerSpec
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core.lifecycle import (
    WorkerEnded,
    WorkersElastic,
    WorkersFinished,
    WorkersGone,
    WorkersHang,
)
from elastic_etcd.core.schema import Failure, Limits
from elastic_etcd.system.leftovers import MARK

if TYPE_CHECKING:
    from elastic_etcd.agent.guardian import Guardian
    from elastic_etcd.agent.membership import Membership

DEADLINE = 30.0


class Guarded:
    """Stands in for the guardian: the process groups that it was told last."""

    def __init__(self) -> None:
        self.groups: tuple[int, ...] = ()

    def guard(self, groups: tuple[int, ...], parked: tuple[int, ...]) -> None:
        self.groups = (*groups, *parked)


class Asked:
    """Stands in for the membership: no generation is the job's."""

    async def current(self, generation: int) -> tuple[bool | None, str]:
        return False, f"generation {generation} is over"


class Watched:
    """Workers that are exec'd, and what was heard of them."""

    def __init__(self, logs: Logs, tasks: Tasks, **more: Any) -> None:
        self.logs = logs
        self.ends: list[WorkerEnded] = []
        self.empties: list[int] = []
        self.hangs: list[Failure] = []
        self.elastic: list[bool] = []
        self.finished: list[bool] = []
        self.unkillable = 0  # how often it was told
        self.guarded = Guarded()
        self._inbox = tasks.inbox
        self._news = asyncio.Event()
        one = Limits(1, 1)
        config = AgentConfig(None, "j", ("train",), "n", 1, one, prefork=False, lease_ttl=0, **more)
        membership, guardian = cast("Membership", Asked()), cast("Guardian", self.guarded)
        self.directory = own_directory()
        self.workers = Workers(config, logs, tasks, membership, guardian, self.directory.path)
        tasks.create(self._hear())

    @classmethod
    @asynccontextmanager
    async def open(cls, logs: Logs, **more: Any) -> AsyncIterator[Self]:
        """With `more` of an AgentConfig. Nothing of it runs afterwards."""
        async with Tasks() as tasks:
            watched = cls(logs, tasks, **more)
            try:
                yield watched
            finally:
                workers = watched.workers
                workers.close()
                await watched.turns(lambda: not (watched.groups or workers._termination._groups))
                watched.directory.remove()

    @property
    def pids(self) -> dict[int, int]:
        """{rank: pid} of the workers that run."""
        return {worker.spec.rank: worker.pid for worker in self.workers._running.values()}

    @property
    def groups(self) -> tuple[int, ...]:
        """The process groups of all workers that live, parked ones too."""
        return (*self.workers._running, *self.workers._parked)

    @property
    def failures(self) -> list[Failure]:
        return [end.failure for end in self.ends if end.failure]

    def launch(self, *commands: Sequence[str], generation: int = 1, first: int = 0) -> None:
        """One worker for each command, which ranks begin with `first`."""
        specs = []
        for local_rank, command in enumerate(commands):
            rank = first + local_rank
            file = self.logs.error_file(generation, rank)
            env = {**os.environ, "TORCHELASTIC_ERROR_FILE": file}
            env["ELASTIC_ETCD_SOCKET"] = self.workers._channels.name
            env["ELASTIC_ETCD_ACTIVITY"] = self.workers._pages.begin(local_rank)
            env["ELASTIC_ETCD_GENERATION"] = str(generation)
            env["LOCAL_RANK"] = str(local_rank)
            env[MARK] = str(self.workers._mark)
            specs.append(WorkerSpec(tuple(command), env, rank, local_rank, file))
        self.ends.clear()
        self.empties.clear()
        self.workers.launch(generation, specs)

    def kill(self) -> None:
        """SIGKILL to all that run."""
        self.workers._termination.kill()

    async def started(self) -> list[int]:
        """Wait until every worker has its process; their pids by rank."""
        await self.turns(lambda: not self.workers._starting)
        return [pid for _, pid in sorted(self.pids.items())]

    async def turns(self, condition: Callable[[], object]) -> None:
        """Let the loop turn until it holds: of what goes into no inbox there is no news."""
        async with asyncio.timeout(DEADLINE):
            while not condition():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def failure(self) -> Failure:
        """The first one."""
        await self.until(lambda: self.failures)
        return self.failures[0]

    async def emptied(self) -> None:
        """Wait until nothing of the generation is left; it is told once."""
        await self.until(lambda: self.empties)
        for _ in range(3):  # turns of the loop in which nothing more may come
            await asyncio.sleep(0)
        assert self.empties == [self.workers.generation]

    async def _hear(self) -> None:
        while True:
            match await self._inbox.get():
                case WorkerEnded() as end:
                    assert not self.empties, "an end after all is empty"
                    self.ends.append(end)
                case WorkersGone(generation):
                    self.empties.append(generation)
                case WorkersElastic(_, elastic):
                    self.elastic.append(elastic)
                case WorkersFinished(_, finished):
                    self.finished.append(finished)
                case WorkersHang(_, failure):
                    self.hangs.append(failure)
                case Unkillable():
                    self.unkillable += 1
                case other:
                    raise AssertionError(other)
            self._news.set()
