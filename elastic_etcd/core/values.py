"""What a job's keys hold, as immutable values, each with its JSON form.

Names and meanings are those of docs/keys.md; times in them are for people to read only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from elastic_etcd.core.fields import (
    LARGEST,
    LONGEST,
    Fields,
    flag,
    inner,
    items,
    lease,
    number,
    objects,
    seconds,
    text,
)
from elastic_etcd.core.keys import encode, hexed

Master: TypeAlias = tuple[str, int]
MOST_WORKERS = 4096  # of one node

_HOST = re.compile(r"[A-Za-z0-9.:%_-]{1,255}")


def valid_host(address: str) -> bool:
    """Whether `address` may be a master's: a name, an IPv4 or an IPv6 address."""
    return _HOST.fullmatch(address) is not None


class Phase(StrEnum):
    """How far a round has come."""

    SETUP = "setup"
    JOINABLE = "joinable"
    FROZEN = "frozen"
    FINAL = "final"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Spec:
    """What a job was created with; `run` tells two runs of one job id apart."""

    run: str
    min_nodes: int
    max_nodes: int
    created_by: str = ""

    def encode(self) -> str:
        nodes = {"min_nodes": self.min_nodes, "max_nodes": self.max_nodes}
        return encode({"run": self.run, "created_by": self.created_by, **nodes})

    @staticmethod
    def decode(f: Fields) -> Spec:
        nodes = number(f, "min_nodes"), number(f, "max_nodes")
        return Spec(text(f, "run"), *nodes, text(f, "created_by"))


@dataclass(frozen=True, slots=True)
class Member:
    """An agent that holds a live lease in the job; the lease id is its identity."""

    lease: int
    node: str
    nproc: int
    address: str = ""
    topology: str = ""
    run: str = ""
    joined: int = 0
    version: str = ""
    leaving: bool = False

    def encode(self) -> str:
        return encode(
            {
                "node": self.node,
                "nproc": self.nproc,
                "address": self.address,
                "labels": {"topology": self.topology} if self.topology else {},
                "run": self.run,
                "joined": self.joined,
                "version": self.version,
                "leaving": self.leaving,
            }
        )

    @staticmethod
    def decode(lease: int, f: Fields) -> Member:
        f = {"labels": None, "joined": 0, "version": "", "leaving": False} | f
        return Member(
            lease=lease,
            node=text(f, "node"),
            nproc=_nproc(f),
            address=text(f, "address"),
            topology=text({"topology": ""} | (inner(f, "labels") or {}), "topology"),
            run=text(f, "run"),
            joined=number(f, "joined"),
            version=text(f, "version"),
            leaving=flag(f, "leaving"),
        )


@dataclass(frozen=True, slots=True)
class Participant:
    """A member in a round's world; its place in the tuple is its group rank."""

    lease: int
    node: str
    nproc: int

    @staticmethod
    def decode(f: Fields) -> Participant:
        return Participant(lease(f.get("lease")), text(f, "node"), _nproc(f))


@dataclass(frozen=True, slots=True)
class Round:
    """One agreement on a set of members."""

    generation: int
    phase: Phase
    coordinator: int
    reason: str
    run: str
    participants: tuple[Participant, ...] = ()
    master: Master | None = None
    restarts: int = 0
    quick: int = 0
    planned: bool = False  # begun by a join or a leave: workers get more time to stop

    def encode(self) -> str:
        world = [
            {"lease": hexed(p.lease), "node": p.node, "nproc": p.nproc} for p in self.participants
        ]
        return encode(
            {
                "generation": self.generation,
                "phase": self.phase,
                "coordinator": hexed(self.coordinator),
                "reason": self.reason[:LONGEST],
                "run": self.run,
                "participants": world,
                "master": _master(self.master),
                "restarts": self.restarts,
                "quick": self.quick,
                "planned": self.planned,
            }
        )

    @staticmethod
    def decode(f: Fields) -> Round:
        now = Round(
            generation=number(f, "generation"),
            phase=Phase(text(f, "phase")),
            coordinator=lease(f.get("coordinator")),
            reason=text(f, "reason"),
            run=text(f, "run"),
            participants=tuple(Participant.decode(p) for p in objects(f, "participants")),
            master=_master_of(f),
            restarts=number(f, "restarts"),
            quick=number(f, "quick"),
            planned=flag(f, "planned"),
        )
        if len({p.lease for p in now.participants}) < len(now.participants):
            raise ValueError("a participant is there twice")
        if now.phase in (Phase.FROZEN, Phase.FINAL) and not now.participants:
            raise ValueError(f"{now.phase}, and without participants")
        if now.phase is Phase.FINAL and now.master is None:
            raise ValueError("final, and without a master")
        return now

    def place(self, lease: int) -> int | None:
        """The group rank of the member with `lease`, None when it is no participant."""
        return next((i for i, p in enumerate(self.participants) if p.lease == lease), None)


@dataclass(frozen=True, slots=True)
class Ledger:
    """What outlives a round: it is bound to no lease and changes with the generation.

    `final` is the last generation that had a world, `places` its leases in rank order and
    `nodes` their names,
    `restarts` how much of the budget is used, `quick` how many times in a row a worker failed
    right after its start.
    """

    generation: int = 0
    final: int = 0
    places: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    quick: int = 0

    def encode(self) -> str:
        return encode(
            {
                "generation": self.generation,
                "final": self.final,
                "places": [hexed(lease) for lease in self.places],
                "nodes": list(self.nodes),
                "restarts": self.restarts,
                "quick": self.quick,
            }
        )

    @staticmethod
    def decode(f: Fields) -> Ledger:
        places = tuple(lease(place) for place in items(f, "places"))
        nodes = tuple(text({"node": node}, "node") for node in items(f, "nodes"))
        if len(places) != len(nodes):
            raise ValueError(f"{len(places)} places and {len(nodes)} nodes")
        return Ledger(
            generation=number(f, "generation"),
            final=number(f, "final"),
            places=places,
            nodes=nodes,
            restarts=number(f, "restarts"),
            quick=number(f, "quick"),
        )


@dataclass(frozen=True, slots=True)
class Ack:
    """A member is ready for a generation: none of its older workers is alive.

    `master` is where it will host the store, should it become group rank 0.
    """

    lease: int
    master: Master | None = None

    def encode(self) -> str:
        return encode({"master": _master(self.master)})

    @staticmethod
    def decode(lease: int, f: Fields) -> Ack:
        return Ack(lease, _master_of(f))


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that ended badly. `code` is negative for a signal; `uptime` is in seconds."""

    node: str
    rank: int
    local_rank: int
    pid: int
    code: int
    uptime: float
    message: str = ""
    at: str = ""

    def encode(self) -> Fields:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "message": self.message[:LONGEST]}

    @staticmethod
    def decode(f: Fields) -> Failure:
        return Failure(
            node=text(f, "node"),
            rank=number(f, "rank"),
            local_rank=number(f, "local_rank"),
            pid=number(f, "pid"),
            code=number(f, "code", least=-LARGEST),
            uptime=seconds(f, "uptime"),
            message=text(f, "message"),
            at=text(f, "at"),
        )

    def __str__(self) -> str:
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"exited {self.code}"
        return f"worker {self.rank} on {self.node} {how}"


@dataclass(frozen=True, slots=True)
class Report:
    """How a node's workers ended: `failure` is None when all of them exited 0.

    A `victim` failed after the next generation had begun: workers die of their peers' end.
    """

    lease: int
    revision: int
    failure: Failure | None
    victim: bool = False

    def encode(self) -> str:
        failure = None if self.failure is None else self.failure.encode()
        return encode({"done": self.failure is None, "failure": failure, "victim": self.victim})

    @staticmethod
    def decode(lease: int, revision: int, f: Fields) -> Report:
        return Report(lease, revision, _failure_of(f), flag(f, "victim"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of the job ended: `state` is succeeded, failed or stopped."""

    state: str
    reason: str
    run: str
    generation: int
    exit_code: int
    failure: Failure | None = None
    at: str = ""

    def fields(self) -> Fields:
        failure = None if self.failure is None else self.failure.encode()
        names = ("state", "run", "generation", "exit_code", "at")
        fields = {name: getattr(self, name) for name in names}
        return {**fields, "reason": self.reason[:LONGEST], "failure": failure}

    def encode(self) -> str:
        return encode(self.fields())

    @staticmethod
    def decode(f: Fields) -> Outcome:
        return Outcome(
            state=text(f, "state"),
            reason=text(f, "reason"),
            run=text(f, "run"),
            generation=number(f, "generation"),
            exit_code=number(f, "exit_code"),
            failure=_failure_of(f),
            at=text(f, "at"),
        )


def _master(master: Master | None) -> Fields | None:
    return None if master is None else {"addr": master[0], "port": master[1]}


def _master_of(f: Fields) -> Master | None:
    master = inner(f, "master")
    if not master:
        return None
    address, port = text(master, "addr"), number(master, "port", 1, (1 << 16) - 1)
    # It becomes a variable of the workers' environment, and anybody with the prefix may write it.
    if not valid_host(address):
        raise ValueError(f"no address: {address[:80]!r}")
    return address, port


def _failure_of(f: Fields) -> Failure | None:
    failure = inner(f, "failure")
    return Failure.decode(failure) if failure else None


def _nproc(f: Fields) -> int:
    """How many workers a node has."""
    return number(f, "nproc", 1, MOST_WORKERS)
