"""An agent's tasks and its inbox: a crash is nobody's secret, and no task outlives the scope."""

import asyncio
import gc
import time
from typing import Any

import pytest

from elastic_etcd.agent.agent import live
from elastic_etcd.agent.inbox import Inbox, MirrorChanged, Tasks, Unkillable
from elastic_etcd.core.lifecycle import WorkersGone
from elastic_etcd.errors import UsageError

DEADLINE = 60.0


class Endless:
    """A task that only a cancellation ends."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = False

    async def run(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def fail(after: asyncio.Event) -> None:
    await after.wait()
    raise ZeroDivisionError("of a task")


async def test_a_crash_is_raised_and_ends_everything_else() -> None:
    other = Endless()

    async def scope() -> None:
        async with asyncio.timeout(DEADLINE), Tasks() as tasks:
            tasks.create(other.run())
            tasks.create(fail(other.begun))
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as raised:
        await scope()
    assert [str(error) for error in raised.value.exceptions] == ["of a task"]
    assert other.cancelled


async def test_after_an_error_no_task_can_begin() -> None:
    """Not even while the others are being cancelled."""
    begun, seen = asyncio.Event(), list[bool]()

    async def look(tasks: Tasks) -> None:
        seen.append(tasks.ended)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(tasks.ended)

    async def scope() -> None:
        async with asyncio.timeout(DEADLINE), Tasks() as tasks:
            tasks.create(look(tasks))
            await begun.wait()
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        await scope()
    assert seen == [False, True]


async def test_after_a_crash_no_task_can_begin() -> None:
    """Not even before the scope is left: the agent closes its lease and its mirror first."""
    seen = list[bool]()

    async def scope() -> None:
        begun = asyncio.Event()
        begun.set()
        async with asyncio.timeout(DEADLINE), Tasks() as tasks:
            tasks.create(fail(begun))
            try:
                await asyncio.Event().wait()
            finally:
                seen.append(tasks.ended)

    with pytest.raises(ExceptionGroup):
        await scope()
    assert seen == [True]


async def test_the_scope_s_own_error_comes_first() -> None:
    other = Endless()

    async def scope() -> None:
        async with asyncio.timeout(DEADLINE), Tasks() as tasks:
            tasks.create(other.run())
            await other.begun.wait()
            raise KeyError("of the body")

    with pytest.raises(ExceptionGroup) as raised:
        await scope()
    assert isinstance(raised.value.exceptions[0], KeyError)
    assert other.cancelled


async def test_tasks_end_with_the_scope() -> None:
    endless, fresh = Endless(), Endless()
    async with asyncio.timeout(DEADLINE):
        async with Tasks() as tasks:
            task = tasks.create(endless.run())
            await endless.begun.wait()
            late = tasks.create(fresh.run())  # it has not even begun
    assert task.cancelled()
    assert late.cancelled()
    assert endless.cancelled
    assert not fresh.begun.is_set()


async def test_a_task_may_end_or_be_ended_before_the_scope(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = asyncio.Event()

    async def quick() -> None:
        done.set()

    other = Endless()
    async with asyncio.timeout(DEADLINE), Tasks() as tasks:
        tasks.create(quick())
        task = tasks.create(other.run())
        await done.wait()
        await other.begun.wait()
        task.cancel()
        await asyncio.wait({task})
        assert not tasks._running, "none is kept"
    gc.collect()
    assert not caplog.records


async def test_the_inbox_keeps_the_order_and_many_changes_are_one() -> None:
    inbox = Inbox()
    inbox.put(MirrorChanged())
    inbox.put(WorkersGone(1))
    inbox.put(MirrorChanged())
    inbox.put(Unkillable())
    async with asyncio.timeout(DEADLINE):
        assert [await inbox.get() for _ in range(3)] == [
            MirrorChanged(),
            WorkersGone(1),
            Unkillable(),
        ]
        inbox.put(MirrorChanged())  # since the last one was looked at
        assert await inbox.get() == MirrorChanged()
    assert inbox._queue.empty()


async def test_changes_gather_for_longer_than_the_last_one_took() -> None:
    """Of many nodes that join one by one, the coordinator does not look at all for each."""
    inbox, loop = Inbox(), asyncio.get_running_loop()
    async with asyncio.timeout(DEADLINE):
        inbox.rest(0.05)
        rested = loop.time() + 0.2
        for _ in range(100):
            inbox.put(MirrorChanged())
        inbox.put(WorkersGone(1))
        assert await inbox.get() == WorkersGone(1), "all else comes at once"
        assert await inbox.get() == MirrorChanged()
        assert loop.time() >= rested - time.get_clock_info("monotonic").resolution
        assert inbox._queue.empty()
        inbox.put(MirrorChanged())
        assert inbox._queue.get_nowait() == MirrorChanged(), "the first one after it, too"


async def test_of_a_small_job_each_change_comes_at_once() -> None:
    inbox = Inbox()
    inbox.rest(0.0005)
    inbox.put(MirrorChanged())
    assert not inbox._queue.empty()


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (ZeroDivisionError("of a task"), ["internal error: ZeroDivisionError: of a task"]),
        (UsageError("the user's"), []),
    ],
)
async def test_an_agent_ends_with_what_ended_a_task_of_its(
    error: Exception, recorded: list[str]
) -> None:
    """And leaves a record of what had happened, if the defect is the program's own."""
    records: list[str] = []

    class Crashing:
        def __init__(self, tasks: Tasks) -> None:
            self._tasks = tasks

        async def live(self) -> int:
            async def crash() -> None:
                raise error

            self._tasks.create(crash())
            await asyncio.Event().wait()
            return 0

        async def write_record(self, why: str) -> None:
            records.append(why)

    build: Any = Crashing
    with pytest.raises(type(error), match=str(error)):
        async with asyncio.timeout(DEADLINE):
            await live(build)
    assert records == recorded
