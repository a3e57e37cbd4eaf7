"""An agent's stand-in: a process with a guardian, and workers that only the guardian ends.

Run with a JSON object on standard input: the EtcdConfig, the lease, how many workers. Prints one
JSON object a line: first all the pids, then what the guardian's side writes into the log.
"""

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_etcd.agent.guardian import Guardian
from elastic_etcd.etcd.access import EtcdConfig

DEADLINE = 60.0
# A child and a grandchild in its group; none of the three listens to SIGTERM.
WORKER = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
read, write = os.pipe()
for _ in range(2):
    if os.fork():
        break
os.write(write, b"%d " % os.getpid())
if os.getpid() == os.getpgrp():
    pids = b""
    while pids.count(b" ") < 3:
        pids += os.read(read, 100)
    print(pids.decode(), flush=True)
signal.pause()
"""


@contextlib.contextmanager
def worker() -> Iterator[list[int]]:
    """One that is tied to nobody: its pid, which is its group, and its descendants'."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", WORKER], stdout=subprocess.PIPE, process_group=0
    ) as process:
        assert process.stdout is not None
        others = {int(pid) for pid in process.stdout.readline().split()} - {process.pid}
        try:
            yield [process.pid, *sorted(others)]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class Agent:
    """The stand-in as seen by a test."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.pid = process.pid
        first = self.line()
        self.guardian: int = first["guardian"]
        self.workers: list[list[int]] = first["workers"]

    def line(self) -> dict[str, Any]:
        """The next thing that it prints."""
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(self.process.stdout.readline())
        return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def words(self) -> str:
        """What it and its guardian wrote to standard error, once both have ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextlib.contextmanager
def agent(
    config: EtcdConfig, lease: int = 0, workers: int = 2, env: Mapping[str, str] | None = None
) -> Iterator[Agent]:
    """A stand-in that guards `lease` and `workers` workers; nothing of it is left afterwards."""
    told = {"config": {s: getattr(config, s) for s in EtcdConfig.__slots__}}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.stand_in"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(env or {})},
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps({**told, "lease": lease, "workers": workers}) + "\n")
        process.stdin.flush()
        it = Agent(process)
        try:
            yield it
        finally:
            process.kill()
            for group in (it.guardian, *(pids[0] for pids in it.workers)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)


def ended(*pids: int) -> bool:
    """Whether they end within the deadline."""
    poll, left = select.poll(), set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            left.add(os.pidfd_open(pid))
    for pidfd in left:
        poll.register(pidfd, select.POLLIN)
    while left and (ready := poll.poll(DEADLINE * 1000)):
        for pidfd, _ in ready:
            poll.unregister(pidfd)
            os.close(pidfd)
            left.discard(pidfd)
    return not left


def running(pid: int) -> bool:
    """Whether it is there, and not as a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


async def main() -> None:
    told = json.loads(sys.stdin.readline())
    config = told["config"]
    config["endpoints"] = tuple(config["endpoints"])
    with contextlib.ExitStack() as scope:
        workers = [scope.enter_context(worker()) for _ in range(told["workers"])]
        logging.getLogger("elastic_etcd").addHandler(_Log())
        guardian = Guardian(EtcdConfig(**config))
        guardian.start()
        while guardian.pid is None:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        guardian.guard(lease=told["lease"], groups=tuple(pids[0] for pids in workers))
        _print(guardian=guardian.pid, workers=workers)
        await asyncio.get_running_loop().create_future()


class _Log(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _print(said=record.getMessage())


def _print(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    asyncio.run(main())
