"""A second signal ends an agent at once, also amid its farewell."""

import asyncio
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_etcd.agent.agent import Agent, live
from elastic_etcd.agent.inbox import Tasks
from elastic_etcd.core.lifecycle import Exit, Left, State
from elastic_etcd.core.rules import Local
from elastic_etcd.system.signals import taken

DEADLINE = 60.0


class Farewell:
    """An agent's membership and its workers, of which one never comes to the end of `stuck`."""

    def __init__(self, stuck: str) -> None:
        self.calls = list[str]()
        self.reached = asyncio.Event()
        self._stuck = stuck

    def __getattr__(self, name: str) -> Any:
        async def call(*_: object) -> None:
            self.calls.append(name)
            if name == self._stuck:
                self.reached.set()
                await asyncio.Event().wait()

        return call

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...

    def join(self, run: str, last: int) -> None: ...

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("stuck", ["end", "leave", "end_leftovers"])
async def test_a_second_signal_cuts_a_farewell_short(
    stuck: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And what an agent has decided before stays its exit code."""
    caplog.set_level("INFO", "elastic_etcd")
    farewell = Farewell(stuck)
    before = signal.getsignal(signal.SIGINT)

    def build(tasks: Tasks) -> Agent:
        sigint = (signal.SIGINT,)
        given: Any = SimpleNamespace(
            signals=sigint, nproc=1, job="j", node="n1", etcd=None, leave_exit_code=7
        )
        parts: Any = farewell
        agent = Agent(given, tasks, parts, parts)
        agent._exit = Exit(Left())
        agent._state = State(Local(run="r", lease=1), 1)
        return agent

    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
        living = group.create_task(live(build))
        await farewell.reached.wait()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
    assert living.result() == (7 if stuck == "end_leftovers" else 130)
    assert "SIGINT: leaving" not in caplog.text
    assert caplog.messages[-1] == "leaving at once"
    assert farewell.calls[-2:] == ["close", "kill_leftovers"]
    assert signal.getsignal(signal.SIGINT) is before, "a program that goes on has its own back"


async def test_a_signal_that_another_thread_gets_is_taken() -> None:
    """The loop's own thread sleeps in the kernel then, and must be woken."""
    came = asyncio.Event()

    def ask_for_it() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)

    with taken({signal.SIGUSR2: came.set}):
        await asyncio.sleep(0)
        threading.Timer(0.1, ask_for_it).start()
        async with asyncio.timeout(10):
            await came.wait()
