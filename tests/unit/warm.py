"""Runs a command both ways: as a process of its own and as a fork of the warm pool."""

import asyncio
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Self, TypeVar, cast

from elastic_etcd.agent.logs import WorkerLog
from elastic_etcd.agent.warm import WarmPool
from elastic_etcd.agent.worker import Started, WorkerSpec, execute

DEADLINE = 120.0
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def python(*arguments: object) -> list[str]:
    return [sys.executable, "-u", *map(str, arguments)]


async def within_deadline(event: asyncio.Future[T]) -> T:
    async with asyncio.timeout(DEADLINE):
        return await event


async def exit_of(pid: int) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, ended.set_result, None)
    try:
        await within_deadline(ended)
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


class BothWays:
    """A warm pool in an event loop of its own, for tests that aren't coroutines."""

    def __init__(self, folder: Path, preload: Sequence[str] = ()) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
        self.env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, sys.path)])
        self._runner = asyncio.Runner()
        self.pool = WarmPool(python("script.py"), self.env, preload, size=2)

    def __enter__(self) -> Self:
        self._runner.run(self._start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _start(self) -> None:
        self.pool.start()
        await self.pool.warm()

    async def _close(self) -> None:
        self.pool.close()

    def fork(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Outcome:
        return self._run(self.pool.start_worker, argv, env)

    def exec(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Outcome:
        return self._run(execute, argv, env)

    def same(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Outcome:
        """What both ways give alike."""
        assert self.pool.ready
        forked = self.fork(argv, env)
        assert forked == self.exec(argv, env)
        return forked

    def script(self, text: str, name: str = "script.py") -> list[str]:
        (self.folder / name).write_text(text)
        return python(self.folder / name)

    def _run(
        self,
        start: Callable[[WorkerSpec, WorkerLog, Callable[[Started], None]], None],
        argv: Sequence[str],
        env: Mapping[str, str] | None,
    ) -> Outcome:
        async def run() -> int:
            started: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
            streams = SimpleNamespace(
                out=SimpleNamespace(child_fd=out.fileno()),
                err=SimpleNamespace(child_fd=err.fileno()),
            )
            spec = WorkerSpec(tuple(argv), self.env if env is None else env, 0, 0, "")
            start(spec, cast("WorkerLog", streams), started.set_result)
            process = await within_deadline(started)
            assert not isinstance(process, OSError), process
            await exit_of(process.pid)
            code = process.poll()
            assert code is not None
            return code

        with (self.folder / "out").open("w+") as out, (self.folder / "err").open("w+") as err:
            code = self._runner.run(run())
            out.seek(0)
            err.seek(0)
            return Outcome(code, *(re.sub("0x[0-9a-f]+", "0x", file.read()) for file in (out, err)))
