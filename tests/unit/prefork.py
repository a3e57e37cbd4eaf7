"""Runs a command in all ways: as a program, as an agent runs one, as a fork of the fork server."""

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from elastic_etcd.agent.prefork import Prefork
from elastic_etcd.agent.worker import through_run_script
from elastic_etcd.system.child_process import Process, exited, spawn

DEADLINE = 120.0
Start = Callable[[Sequence[str], Mapping[str, str], int, int], Awaitable[Process]]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def python(*arguments: object) -> list[str]:
    return [sys.executable, "-u", *map(str, arguments)]


async def exit_of(process: Process) -> int:
    async with asyncio.timeout(DEADLINE):
        return await exited(process)


class BothWays:
    """A fork server in an event loop of its own, for tests that aren't coroutines."""

    def __init__(self, folder: Path, preload: Sequence[str] = ()) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
        paths = [str(folder), *filter(None, sys.path)]
        self.env["PYTHONPATH"] = os.pathsep.join(paths)
        self._runner = asyncio.Runner()
        self.prefork = Prefork(
            python(folder / "script.py"), self.env, preload, 2, asyncio.create_task
        )

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
        self.prefork.start()
        await self.prefork.imported()

    async def _close(self) -> None:
        self.prefork.close()

    def fork(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Outcome:
        return self.run(self.prefork.fork, argv, env)

    def exec(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Outcome:
        return self.run(execute, argv, env)

    def scripted(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Outcome:
        return self.run(run_script, argv, env)

    def same(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Outcome:
        """What all ways give alike."""
        assert self.prefork.ready
        plain = self.exec(argv, env)
        assert self.fork(argv, env) == plain
        assert self.scripted(argv, env) == plain
        return plain

    def script(self, text: str, name: str = "script.py") -> list[str]:
        (self.folder / name).write_text(text)
        return python(self.folder / name)

    def run(self, start: Start, argv: Sequence[str], env: Mapping[str, str] | None) -> Outcome:
        async def run() -> int:
            async with asyncio.timeout(DEADLINE):
                started = start(argv, self.env if env is None else env, out.fileno(), err.fileno())
                return await exited(await started)

        with (self.folder / "out").open("w+") as out, (self.folder / "err").open("w+") as err:
            code = self._runner.run(run())
            out.seek(0)
            err.seek(0)
            return Outcome(code, *(re.sub("0x[0-9a-f]+", "0x", file.read()) for file in (out, err)))


async def execute(argv: Sequence[str], env: Mapping[str, str], out: int, err: int) -> Process:
    """As torchrun does it."""
    return spawn(argv, env, stdout=out, stderr=err, session=True)


async def run_script(argv: Sequence[str], env: Mapping[str, str], out: int, err: int) -> Process:
    """As an agent does it with --start-method exec."""
    return spawn(through_run_script(argv), env, stdout=out, stderr=err, session=True)
