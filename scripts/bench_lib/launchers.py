"""The launchers that are compared: how each starts an agent of a job, default settings."""

import os
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic_etcd.etcd.embedded import free_ports

WORKER = Path(__file__).with_name("worker.py")
LIMITS = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", *LIMITS)

Command = Callable[[int], list[str]]  # node 0, 1, ...: its agent's command line, less the script


@dataclass(frozen=True)
class Launcher:
    """`job()` is a new job. `alone`: it begins with one node, and is not to wait for another."""

    name: str
    job: Callable[[bool], Command]
    script: tuple[str, ...] = (str(WORKER),)
    environment: Mapping[str, str] = field(default_factory=dict)
    ours: bool = False


def c10d(*more: str) -> Launcher:
    """The default backend of torchrun, with `more` flags; node 0 hosts the store."""

    def job(alone: bool) -> Command:
        [port], name = free_ports(1), uuid.uuid4().hex[:8]
        # Else each job of one node would begin with 30 s in which nothing is measured.
        wait = ",last_call_timeout=1" if alone else ""

        def command(index: int) -> list[str]:
            conf = f"is_host={str(index == 0).lower()}{wait}"
            rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
            return [*TORCHRUN, *rendezvous, "--rdzv-id", name, "--rdzv-conf", conf, *more]

        return command

    return Launcher("torchrun c10d", job)


def etcd_v3(endpoint: str) -> Launcher:
    """Torchrun with this program's rendezvous, docs/plugin.md."""

    def job(_: bool) -> Command:
        rendezvous = ("--rdzv-backend", "etcd-v3", "--rdzv-endpoint", endpoint)
        name = f"bench-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        return lambda _: [*TORCHRUN, *rendezvous, "--rdzv-id", name]

    return Launcher("torchrun etcd-v3", job)


def elastic(name: str, endpoint: str, *more: str) -> Launcher:
    """This program."""
    method = "exec" if name == "exec" else "prefork"
    script = (str(WORKER), *["--in-process"][: name == "in process"])

    def job(_: bool) -> Command:
        job_id = f"bench-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        agent = (sys.executable, "-m", "elastic_etcd.launch", *LIMITS, "--start-method", method)
        rest = ("--etcd", endpoint, "--job", job_id, *more)
        return lambda index: [*agent, *rest, "--node-name", f"node{index}"]

    return Launcher(name, job, script, ours=True)
