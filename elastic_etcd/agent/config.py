"""What one agent is told to do, as plain data. `launch` makes it, the agent only reads it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import IntFlag
from string import Template
from typing import TYPE_CHECKING

from elastic_etcd.core.schema import PREFIX
from elastic_etcd.times import GRACE_PARK, LEASE_TTL, UNKILLABLE

if TYPE_CHECKING:
    from elastic_etcd.core.schema import Limits
    from elastic_etcd.etcd.access import EtcdConfig


class Streams(IntFlag):
    """Which of a worker's output streams; the numbers are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


@dataclass(frozen=True)
class StreamChoice:
    """A choice of streams for every local rank, or for some of them."""

    everywhere: Streams = Streams.NONE
    by_local_rank: tuple[tuple[int, Streams], ...] = ()

    def __getitem__(self, local_rank: int) -> Streams:
        return dict(self.by_local_rank).get(local_rank, self.everywhere)


@dataclass(frozen=True)
class LogConfig:
    """Where the workers' output goes.

    A redirected stream goes to a file only, a teed one to a file and the console, and the
    filter (None: no filter) names the local ranks whose output the console shows.
    """

    log_dir: str | None = None
    redirects: StreamChoice = StreamChoice()
    tee: StreamChoice = StreamChoice()
    local_ranks_filter: frozenset[int] | None = None


@dataclass(frozen=True)
class AgentConfig:
    """Everything an agent is told. Times are seconds.

    `etcd`: None means an embedded etcd for this run.
    `argv`: a worker's whole command, still with torchrun's `${local_rank}` in it, see `substitute`.
    `limits`: what the user asked for here; in a job that is there already its own count.
    `advertise`: an address, an interface or a network; None is found out, see agent/address.py.
    `rerun`: a job that has succeeded is run once more.
    `etcd_timeout`: None waits for ever for an etcd that went away.
    `leave_exit_code`: of a node that left on a signal; None means 128 + the signal.
    `stop_exit_code`: of a node that left since people stopped the job; None means as any that left.
    `shutdown_timeout`: None leaves the grace to the reason of the stop. When this node leaves it is
    `limits.leave_deadline`.
    `park_timeout`: so long has a worker in ee.run to park after a failure.
    `kill_timeout`: so long after SIGKILL the node gives up on what is still there.
    `hang_timeout`: seconds in one step; None is found out, infinity is for ever.
    `proof_of_death`: a node that dies is looked for as soon as its connection ends.
    `no_python`: the workers are programs, which need not hand signals on to what they start.
    `memory_dir`: below it is this node's directory for checkpoints, see agent/directories.py.
    `timer_file`: where torch's file timers are served, "" at a path of the agent's; None: nowhere.
    `metrics_addr`: host and port at which metrics and probes are answered; None: nowhere.
    `preemption_watch`: aws, gcp, azure or file:PATH, see agent/followers/notices.py.
    `prefork`: workers are forked from a process that has torch and the `preload` modules loaded.
    """

    etcd: EtcdConfig | None
    job: str
    argv: tuple[str, ...]
    node: str
    nproc: int
    limits: Limits
    prefix: str = PREFIX
    advertise: str | None = None
    role: str = "default"
    topology_label: str = ""
    lease_ttl: int = LEASE_TTL
    rerun: bool = False
    proof_of_death: bool = True
    hang_timeout: float | None = None
    etcd_timeout: float | None = None
    shutdown_timeout: float | None = None
    park_timeout: float = GRACE_PARK
    kill_timeout: float = UNKILLABLE
    leave_exit_code: int | None = None
    stop_exit_code: int | None = None
    virtual_local_rank: bool = False
    memory_dir: str = "/dev/shm"  # noqa: S108 - the folder in it is this user's only
    no_python: bool = False
    prefork: bool = True
    preload: tuple[str, ...] = ()
    signals: tuple[signal.Signals, ...] = (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
    )
    log: LogConfig = field(default_factory=LogConfig)
    log_level: str = "INFO"
    timer_file: str | None = None
    metrics_addr: tuple[str, int] | None = None
    preemption_watch: str | None = None


def substitute(argv: tuple[str, ...], local_rank: int) -> list[str]:
    """A worker's command with `${local_rank}` filled in: in its arguments, as torchrun does."""
    program, *arguments = argv
    return [program, *(Template(a).safe_substitute(local_rank=local_rank) for a in arguments)]
