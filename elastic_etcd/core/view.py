"""Everything of a job, read at one etcd revision, as immutable values.

Only the coordinator's view covers all of the job's keys. Everybody else's is narrow: the
round, the generation, the outcome, the coordinator's member key and the agent's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from elastic_etcd.core.fields import decimal, lease
from elastic_etcd.core.keys import Keys, decode
from elastic_etcd.core.txn import Get, KeyValue, Snapshot
from elastic_etcd.core.values import Ack, Ledger, Member, Outcome, Phase, Report, Round, Spec

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_BY_LEASE = attrgetter("lease")

# What a view covers beside the round, the generation, the outcome and the own member key:
# nothing (None), the member key of one coordinator (its lease), or all of the job.
Coverage: TypeAlias = int | None
EVERYTHING = -1


@dataclass(frozen=True, slots=True)
class View:
    """The job as one agent sees it. The `_mod` fields fence writes: 0 means no such key."""

    revision: int
    coverage: Coverage
    round: Round | None = None
    round_mod: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    ledger_mod: int = 0
    coordinator: Member | None = None
    members: tuple[Member, ...] = ()
    acks: tuple[Ack, ...] = ()
    reports: tuple[Report, ...] = ()
    spec: Spec | None = None
    outcome: Outcome | None = None
    outcome_mod: int = 0  # of one that can't be read
    history: tuple[tuple[int, str], ...] = ()
    acked: tuple[int, ...] = ()
    reported: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()  # leases whose ack or report of now can't be read
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
    outcome_kv = kvs.get(keys.outcome)
    outcome = _read(outcome_kv, _outcome, bad)
    now = _read(round_kv, _round, bad)
    spec = _read(kvs.get(keys.spec), _spec, bad)
    start = keys.members
    members = [_read(kv, _member, bad) for key, kv in kvs.items() if key.startswith(start)]
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
                key=_BY_LEASE,
            )
        ),
        spec=spec,
        outcome=outcome,
        outcome_mod=outcome_kv.mod if outcome_kv and not outcome else 0,
    )
    if coverage == EVERYTHING:
        view = _with_parts(view, kvs, keys, bad)
    return replace(view, malformed=tuple(bad))


def _with_parts(view: View, kvs: Any, keys: Keys, bad: list[str]) -> View:
    acks, reports, history = [], [], []
    final = view.round.generation if view.round and view.round.phase is Phase.FINAL else None
    final = view.ledger.final if final is None else final
    phase = view.round.phase if view.round else None
    acked, reported, unread = set(), set(), set()
    members, ready = keys.members, keys.acks(view.round.generation) if view.round else "-"
    for key, kv in kvs.items():
        if key.startswith(members):
            continue
        if key.startswith(ready):
            if a := _read(kv, _ack, bad):
                acks.append(a)
                continue
            if phase is Phase.JOINABLE:  # later nobody waits for it
                unread.add(key.rpartition("/")[2])
        kind, *rest = key[len(keys.root) + 1 :].split("/", 3)
        generation = decimal(rest[0]) if rest else None
        if generation is None:
            continue
        if kind == "acks" and len(rest) == 2:
            acked.add(generation)
        elif kind == "reports" and len(rest) == 2:
            reported.add(generation)
            if generation == final and (r := _read(kv, _report, bad)):
                reports.append(r)
            elif generation == final and phase is Phase.FINAL:
                unread.add(rest[1])
        elif kind == "history" and len(rest) == 1:
            history.append((generation, kv.value))
    return replace(
        view,
        acks=tuple(sorted(acks, key=_BY_LEASE)),
        reports=tuple(sorted(reports, key=lambda r: (r.revision, r.lease))),
        history=tuple(sorted(history)),
        acked=tuple(sorted(acked | {view.round.generation for a in acks[:1] if view.round})),
        reported=tuple(sorted(reported)),
        unread=tuple(sorted(unread)),
    )


# Whatever a value of another's making can raise: a missing field, an infinite number.
_SHOWN = 256  # characters of a key, and of what is wrong with it
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


def _read(kv: KeyValue | None, decoder: Callable[[KeyValue], T], bad: list[str]) -> T | None:
    if kv is None:
        return None
    try:
        return decoder(kv)
    except _MALFORMED as error:
        bad.append(f"{kv.key[:_SHOWN]}: {str(error)[:_SHOWN]}")
        return None


def _lease(kv: KeyValue) -> int:
    return lease(kv.key.rpartition("/")[2])


# Values change far less often than views are made: each is decoded once. A round of a thousand
# nodes takes 300 KB, so that few are kept.
@lru_cache(maxsize=8192)
def _member(kv: KeyValue) -> Member:
    return Member.decode(_lease(kv), decode(kv.value))


@lru_cache(maxsize=8192)
def _ack(kv: KeyValue) -> Ack:
    return Ack.decode(_lease(kv), decode(kv.value))


@lru_cache(maxsize=1024)
def _report(kv: KeyValue) -> Report:
    return Report.decode(_lease(kv), kv.mod, decode(kv.value))


@lru_cache(maxsize=16)
def _round(kv: KeyValue) -> Round:
    return Round.decode(decode(kv.value))


@lru_cache(maxsize=16)
def _ledger(kv: KeyValue) -> Ledger:
    return Ledger.decode(decode(kv.value))


@lru_cache(maxsize=16)
def _spec(kv: KeyValue) -> Spec:
    return Spec.decode(decode(kv.value))


@lru_cache(maxsize=16)
def _outcome(kv: KeyValue) -> Outcome:
    return Outcome.decode(decode(kv.value))
