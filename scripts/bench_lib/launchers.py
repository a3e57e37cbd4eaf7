"""The launchers that are compared: how each starts an agent of a job, default settings.

What the peers need and this program does not is a venv each, and an etcd with the v2 API. A venv
lies within the one that runs the benchmark and sees its packages, so that all launchers run the
same torch; only what a peer adds (python-etcd, nvidia-resiliency-ext) is its own.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from elastic_etcd.etcd.embedded import free_ports
from tests.support.etcd import EtcdServer

WORKER = Path(__file__).with_name("worker.py")
LIMITS = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3")

Command = Callable[[int], list[str]]  # node 0, 1, ...: its agent's command line, less the script


@dataclass(frozen=True)
class Launcher:
    """`job()` is a new job. `alone`: it begins with one node, and is not to wait for another."""

    name: str
    job: Callable[[bool], Command]
    script: tuple[str, ...] = (str(WORKER),)
    environment: Mapping[str, str] = field(default_factory=dict)
    ours: bool = False


def c10d(*more: str, share_store: bool = True) -> Launcher:
    """The default backend of torchrun, with `more` flags; node 0 hosts the store."""
    environment = {} if share_store else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    name = "torchrun c10d"
    job = partial(_tcp_store, torchrun, more=more)
    return Launcher(name, job, environment=environment)


def ft_launcher(python: Path) -> Launcher:
    """NVIDIA's fault tolerant launcher; it has no module to run, only a script."""
    program = (str(python), str(python.with_name("ft_launcher")), "--ignore-missing-fault-tol-cfg")
    return Launcher("ft_launcher", lambda alone: _tcp_store(program, alone))


def _tcp_store(
    program: tuple[str, ...], alone: bool, port: int = 0, more: tuple[str, ...] = ()
) -> Command:
    """Node 0 hosts the store, unless it is at `port` already."""
    host = port == 0
    [port], job = [port] if port else free_ports(1), uuid.uuid4().hex[:8]

    def command(index: int) -> list[str]:
        conf = f"is_host={str(host and index == 0).lower()}{_last_call(alone)}"
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
        return [*program, *LIMITS, *rendezvous, "--rdzv-id", job, "--rdzv-conf", conf, *more]

    return command


def first_request(port: int) -> Launcher:
    """An agent of torchrun whose store is at a port where nobody answers."""
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    return Launcher("torchrun c10d", lambda alone: _tcp_store(torchrun, alone, port))


def etcd_v2(python: Path, endpoint: str) -> Launcher:
    """The backend etcd-v2 of torchrun: `endpoint` serves etcd's v2 API."""

    def job(alone: bool) -> Command:
        name = uuid.uuid4().hex[:8]
        conf = f"read_timeout=60{_last_call(alone)}"
        rendezvous = ("--rdzv-backend", "etcd-v2", "--rdzv-endpoint", endpoint)
        torchrun = (str(python), "-m", "torch.distributed.run", *LIMITS, *rendezvous)
        return lambda _: [*torchrun, "--rdzv-id", name, "--rdzv-conf", conf]

    return Launcher("torchrun etcd-v2", job)


def etcd_v3(endpoint: str) -> Launcher:
    """Torchrun with this program's rendezvous, docs/plugin.md."""

    def job(_: bool) -> Command:
        rendezvous = ("--rdzv-backend", "etcd-v3", "--rdzv-endpoint", endpoint)
        torchrun = (sys.executable, "-m", "torch.distributed.run", *LIMITS, *rendezvous)
        name = f"bench-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        return lambda _: [*torchrun, "--rdzv-id", name]

    return Launcher("torchrun etcd-v3", job)


def _last_call(alone: bool) -> str:
    # Else each job of one node would begin with 30 s in which nothing is measured.
    return ",last_call_timeout=1" if alone else ""


def elastic(name: str, endpoint: str, *more: str, root: str = "") -> Launcher:
    """This program; `root` is a job id that is known beforehand, else each job has a new one."""
    method = "exec" if name == "exec" else "prefork"
    script = (str(WORKER), *["--in-process"][: name == "in process"])

    def job(_: bool) -> Command:
        known = root or f"bench-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        agent = (sys.executable, "-m", "elastic_etcd.launch", *LIMITS, "--start-method", method)
        rest = ("--etcd", endpoint, "--job", known, *more)
        return lambda index: [*agent, *rest, "--node-name", f"node{index}"]

    return Launcher(name, job, script, ours=True)


# --- what the peers need


class Unavailable(Exception):
    """A peer can't be measured here; why."""


def venv(name: str, requirement: str) -> Path:
    """The Python of a venv that has `requirement`. Raises Unavailable."""
    folder = Path(sys.prefix) / "peers" / name
    python, done = folder / "bin" / "python", folder / f"has-{requirement}"
    if not done.exists():
        _do(sys.executable, "-m", "venv", "--clear", str(folder))
        shared = sysconfig.get_path("purelib")
        site = sysconfig.get_path("purelib", vars={"base": str(folder)})
        (Path(site) / "shared.pth").write_text(shared + "\n")
        _do(str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", requirement)
        done.touch()
    return python


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise Unavailable(f"`{' '.join(command[1:])}`: {' '.join(last)}")


@contextmanager
def etcd_with_v2() -> Iterator[str]:
    """The endpoint of an etcd with --enable-v2, which 3.5 is the last to have.

    Raises Unavailable.
    """
    with tempfile.TemporaryDirectory() as folder:
        server = EtcdServer(Path(folder), "v2", ("--enable-v2",))
        try:
            server.start()
        except AssertionError as error:
            server.kill()
            raise Unavailable(f"etcd --enable-v2: {str(error).splitlines()[-1]}") from None
        try:
            yield server.endpoint
        finally:
            server.kill()
