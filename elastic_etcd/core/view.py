"""Everything of a job, read at one etcd revision, as immutable values.

Only the coordinator's view covers all of the job's keys. Everybody else's is narrow: the
round, the generation, the outcome, the coordinator's member key and the agent's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from elastic_etcd.core.keys import Keys, decode, encode, hexed
from elastic_etcd.core.txn import Get, KeyValue, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
Master: TypeAlias = tuple[str, int]
Fields: TypeAlias = dict[str, Any]

# What a view covers beside the round, the generation, the outcome and the own member key:
# nothing (None), the member key of one coordinator (its lease), or all of the job.
Coverage: TypeAlias = int | None
EVERYTHING = -1


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
        return Spec(str(f["run"]), int(f["min_nodes"]), int(f["max_nodes"]), str(f["created_by"]))


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
        return Member(
            lease=lease,
            node=str(f["node"]),
            nproc=int(f["nproc"]),
            address=str(f["address"]),
            topology=str(f.get("labels", {}).get("topology", "")),
            run=str(f["run"]),
            joined=int(f.get("joined", 0)),
            version=str(f.get("version", "")),
            leaving=bool(f.get("leaving", False)),
        )


@dataclass(frozen=True, slots=True)
class Participant:
    """A member in a round's world; its place in the tuple is its group rank."""

    lease: int
    node: str
    nproc: int


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
                "reason": self.reason,
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
        return Round(
            generation=int(f["generation"]),
            phase=Phase(f["phase"]),
            coordinator=int(f["coordinator"], 16),
            reason=str(f["reason"]),
            run=str(f["run"]),
            participants=tuple(
                Participant(int(p["lease"], 16), str(p["node"]), int(p["nproc"]))
                for p in f["participants"]
            ),
            master=_master_of(f),
            restarts=int(f["restarts"]),
            quick=int(f["quick"]),
            planned=bool(f["planned"]),
        )

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
        return Ledger(
            generation=int(f["generation"]),
            final=int(f["final"]),
            places=tuple(int(lease, 16) for lease in f["places"]),
            nodes=tuple(str(node) for node in f["nodes"]),
            restarts=int(f["restarts"]),
            quick=int(f["quick"]),
        )


@dataclass(frozen=True, slots=True)
class Ack:
    """A member is ready for a generation: none of its older workers is alive."""

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
        return {name: getattr(self, name) for name in self.__slots__}

    @staticmethod
    def decode(f: Fields) -> Failure:
        return Failure(
            node=str(f["node"]),
            rank=int(f["rank"]),
            local_rank=int(f["local_rank"]),
            pid=int(f["pid"]),
            code=int(f["code"]),
            uptime=float(f["uptime"]),
            message=str(f["message"]),
            at=str(f["at"]),
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
        failure = Failure.decode(f["failure"]) if f["failure"] else None
        return Report(lease, revision, failure, bool(f["victim"]))


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
        names = ("state", "reason", "run", "generation", "exit_code", "at")
        return {**{name: getattr(self, name) for name in names}, "failure": failure}

    def encode(self) -> str:
        return encode(self.fields())

    @staticmethod
    def decode(f: Fields) -> Outcome:
        return Outcome(
            state=str(f["state"]),
            reason=str(f["reason"]),
            run=str(f["run"]),
            generation=int(f["generation"]),
            exit_code=int(f["exit_code"]),
            failure=Failure.decode(f["failure"]) if f["failure"] else None,
            at=str(f["at"]),
        )


@dataclass(frozen=True, slots=True)
class View:
    """The job as one agent sees it. The `_mod` fields fence writes: 0 means no such key."""

    revision: int
    coverage: Coverage
    round: Round | None = None
    round_mod: int = 0
    ledger: Ledger = Ledger()
    ledger_mod: int = 0
    coordinator: Member | None = None
    members: tuple[Member, ...] = ()
    acks: tuple[Ack, ...] = ()
    reports: tuple[Report, ...] = ()
    spec: Spec | None = None
    outcome: Outcome | None = None
    history: tuple[tuple[int, str], ...] = ()
    acked: tuple[int, ...] = ()
    reported: tuple[int, ...] = ()
    malformed: tuple[str, ...] = ()


def covered(keys: Keys, coverage: Coverage, lease: int = 0) -> tuple[Get, ...]:
    """The keys that the member with `lease` mirrors: a constant number, unless everything."""
    if coverage == EVERYTHING:
        return (Get(keys.root + "/", prefix=True),)
    own = Get(keys.member(lease))
    watched = (Get(keys.round), Get(keys.generation), Get(keys.outcome), own)
    return watched if coverage in (None, lease) else (*watched, Get(keys.member(coverage)))


def view_of(snapshot: Snapshot, keys: Keys, coverage: Coverage) -> View:
    """The view that `snapshot` of those keys shows; members of other runs are left out."""
    bad: list[str] = []
    kvs = snapshot.kvs
    round_kv, ledger_kv = kvs.get(keys.round), kvs.get(keys.generation)
    now = _read(round_kv, _round, bad)
    spec = _read(kvs.get(keys.spec), _spec, bad)
    members = [_read(kv, _member, bad) for key, kv in kvs.items() if key.startswith(keys.members)]
    view = View(
        revision=snapshot.revision,
        coverage=coverage,
        round=now,
        round_mod=0 if round_kv is None else round_kv.mod,
        ledger=_read(ledger_kv, _ledger, bad) or Ledger(),
        ledger_mod=0 if ledger_kv is None else ledger_kv.mod,
        coordinator=_read(kvs.get(keys.member(now.coordinator)), _member, bad) if now else None,
        members=tuple(
            sorted(
                (m for m in members if m and (spec is None or m.run == spec.run)),
                key=lambda m: m.lease,
            )
        ),
        spec=spec,
        outcome=_read(kvs.get(keys.outcome), _outcome, bad),
    )
    if coverage == EVERYTHING:
        view = _with_parts(view, kvs, keys, bad)
    return replace(view, malformed=tuple(bad))


def _with_parts(view: View, kvs: Any, keys: Keys, bad: list[str]) -> View:
    acks, reports, history = [], [], []
    final = view.round.generation if view.round and view.round.phase is Phase.FINAL else None
    final = view.ledger.final if final is None else final
    acked, reported = set(), set()
    for key, kv in kvs.items():
        kind, *rest = key[len(keys.root) + 1 :].split("/")
        if kind == "acks" and len(rest) == 2 and rest[0].isdecimal():
            acked.add(int(rest[0]))
            if view.round and int(rest[0]) == view.round.generation and (a := _read(kv, _ack, bad)):
                acks.append(a)
        elif kind == "reports" and len(rest) == 2 and rest[0].isdecimal():
            reported.add(int(rest[0]))
            if int(rest[0]) == final and (r := _read(kv, _report, bad)):
                reports.append(r)
        elif kind == "history" and len(rest) == 1 and rest[0].isdecimal():
            history.append((int(rest[0]), kv.value))
    return replace(
        view,
        acks=tuple(sorted(acks, key=lambda a: a.lease)),
        reports=tuple(sorted(reports, key=lambda r: (r.revision, r.lease))),
        history=tuple(sorted(history)),
        acked=tuple(sorted(acked)),
        reported=tuple(sorted(reported)),
    )


# Whatever a value of another's making can raise: an infinite number, a thousand brackets.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def _read(kv: KeyValue | None, decoder: Callable[[KeyValue], T], bad: list[str]) -> T | None:
    if kv is None:
        return None
    try:
        return decoder(kv)
    except _MALFORMED as error:
        bad.append(f"{kv.key}: {error}")
        return None


def _lease(kv: KeyValue) -> int:
    return int(kv.key.rpartition("/")[2], 16)


# Values change far less often than views are made: each is decoded once.
@lru_cache(maxsize=8192)
def _member(kv: KeyValue) -> Member:
    return Member.decode(_lease(kv), decode(kv.value))


@lru_cache(maxsize=8192)
def _ack(kv: KeyValue) -> Ack:
    return Ack.decode(_lease(kv), decode(kv.value))


@lru_cache(maxsize=1024)
def _report(kv: KeyValue) -> Report:
    return Report.decode(_lease(kv), kv.mod, decode(kv.value))


@lru_cache(maxsize=1024)
def _round(kv: KeyValue) -> Round:
    return Round.decode(decode(kv.value))


@lru_cache(maxsize=1024)
def _ledger(kv: KeyValue) -> Ledger:
    return Ledger.decode(decode(kv.value))


@lru_cache(maxsize=64)
def _spec(kv: KeyValue) -> Spec:
    return Spec.decode(decode(kv.value))


@lru_cache(maxsize=64)
def _outcome(kv: KeyValue) -> Outcome:
    return Outcome.decode(decode(kv.value))


def _master(master: Master | None) -> Fields | None:
    return None if master is None else {"addr": master[0], "port": master[1]}


def _master_of(f: Fields) -> Master | None:
    master = f["master"]
    return (str(master["addr"]), int(master["port"])) if master else None
