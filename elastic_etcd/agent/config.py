"""An agent's orders, as plain data. `launch` makes them, the agent only reads them."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import IntFlag
from string import Template
from typing import TYPE_CHECKING

from elastic_etcd.core.schema import PREFIX
from elastic_etcd.times import GRACE_PARK, HEALTH_INTERVAL, LEASE_TTL, UNKILLABLE

if TYPE_CHECKING:
    from elastic_etcd.core.schema import Limits
    from elastic_etcd.etcd.access import EtcdConfig

# A variable of the command of --health-check: an agent runs it.
BESIDE_AGENT = "ELASTIC_ETCD_HEALTH_CHECK"


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
    """The destinations of the workers' output."""

    log_dir: str | None = None
    redirects: StreamChoice = StreamChoice()  # to a file only
    tee: StreamChoice = StreamChoice()  # to a file and the console
    local_ranks_filter: frozenset[int] | None = None  # the console shows only theirs


@dataclass(frozen=True)
class AgentConfig:
    """Everything that an agent is told. Times are seconds."""

    etcd: EtcdConfig | None  # None: an embedded one for this run
    job: str
    argv: tuple[str, ...]  # a worker's whole command, see `substitute`
    node: str
    nproc: int
    limits: Limits  # as asked for here; a job that is there already has its own
    command: str = ""  # a digest of what workers run: two trainings with one job id differ in it
    prefix: str = PREFIX
    advertise: str | None = None  # an address, an interface or a network; see agent/address.py
    role: str = "default"
    topology_label: str = ""
    lease_ttl: int = LEASE_TTL
    has_peers: bool = True  # or is one node, whose job nobody has named: no other agent knows it
    rerun: bool = False  # a job that has succeeded is run once more
    proof_of_death: bool = True  # a node that dies is looked for as soon as its connection ends
    hang_timeout: float | None = None  # in one step; None is found out, infinity is for ever
    start_timeout: int | None = None  # from a world's start to its first step
    etcd_timeout: float | None = None  # for an etcd that went away; None is for ever
    # None leaves the grace to the reason of the stop; it is limits.leave_deadline when this node
    # leaves.
    shutdown_timeout: float | None = None
    park_timeout: float = GRACE_PARK  # for a worker in ee.run to park after a failure
    kill_timeout: float = UNKILLABLE  # from SIGKILL until the node gives up on what is still there
    leave_exit_code: int | None = None  # after a signal; None means 128 + the signal
    stop_exit_code: int | None = None  # of a job that people stopped; None: as any that leaves
    virtual_local_rank: bool = False
    numa_binding: str = ""  # a mode of torch's: workers run on the CPUs near their GPUs only
    memory_dir: str = "/dev/shm"  # noqa: S108 - the folder in it is this user's only
    no_python: bool = False  # workers are programs, which need not hand signals on
    prefork: bool = True  # workers are forked from a process that has loaded torch and `preload`
    preload: tuple[str, ...] = ()
    signals: tuple[signal.Signals, ...] = (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
    )
    log: LogConfig = field(default_factory=LogConfig)
    log_level: str = "INFO"
    log_format: str = "text"  # or json
    timer_file: str | None = None  # for torch's file timers; "": at a path of the agent's
    metrics_addr: tuple[str, int] | None = None  # at which metrics and probes are answered
    preemption_watch: str | None = None  # the file that appears, see followers/notices.py
    health_check: str | None = None  # a shell command, see followers/health_check.py
    health_interval: float = HEALTH_INTERVAL


def substitute(argv: tuple[str, ...], local_rank: int) -> list[str]:
    """A worker's command with `${local_rank}` filled in: in its arguments, as torchrun does."""
    program, *arguments = argv
    return [program, *(Template(a).safe_substitute(local_rank=local_rank) for a in arguments)]
