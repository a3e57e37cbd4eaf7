"""The launchers that are compared: how each starts an agent of a job, default settings.

What the peers need and this program does not is a venv each, and an etcd with the v2 API. A venv
lies within the one that runs the benchmark and sees its packages, so that all launchers run the
same torch; only what a peer adds (python-etcd, nvidia-resiliency-ext) is its own.
"""

import os
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from elastic_etcd.etcd.embedded import free_ports

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
