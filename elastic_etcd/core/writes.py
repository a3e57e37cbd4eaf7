"""The Txn for each thing that an agent writes.

Each is fenced: the writer's member key has the create revision it was made with (it still
holds its lease), and the round the mod revision on which the decision was made. `now` is
the wall-clock time for people to read; nothing compares it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from elastic_etcd.core import history
from elastic_etcd.core.events import Write
from elastic_etcd.core.keys import Keys, encode
from elastic_etcd.core.lifecycle import State
from elastic_etcd.core.rules import Act, Decision, Me
from elastic_etcd.core.txn import Compare, Delete, Put, Txn
from elastic_etcd.core.values import (
    Ack,
    Master,
    Member,
    Outcome,
    Report,
)
from elastic_etcd.core.view import View

HISTORY = 100  # generations that are remembered
FAILURES = 32  # and of each, this many failed workers: a value has its limit in etcd


def build(
    keys: Keys, state: State, write: Write, member: Member, master: Master | None, now: str
) -> Txn:
    """The Txn of `write`, on the view on which it was decided.

    `master` is where this agent would host the store, for an ack.
    """
    me, view, what = state.me, state.view, write.what
    if what is None:
        return _leaving(keys, me, member)
    if isinstance(what, Report):
        return _report(keys, view, me, write.generation, what)
    assert view is not None
    match what.act:
        case Act.CLAIM:
            return _claim(keys, view, me, what)
        case Act.OPEN:
            return _open(keys, view, me, what, now)
        case Act.FREEZE:
            return _freeze(keys, view, me, what)
        case Act.ACK:
            return _ack(keys, view, me, master)
        case Act.FINALISE:
            return _finalise(keys, view, me, what, now)
        case Act.CLOSE:
            return _close(keys, view, me, what, now)
    raise ValueError(f"{what.act} writes nothing")


def _claim(keys: Keys, view: View, me: Me, decision: Decision) -> Txn:
    """Take the next generation. The round is bound to the claimant's lease until it is final."""
    assert decision.round and decision.ledger
    return Txn(
        (
            *_fence(keys, view, me),
            Compare(keys.generation, "mod", view.ledger_mod),
            Compare(keys.spec, "create", me.spec),
        ),
        (
            Put(keys.round, decision.round.encode(), me.lease),
            Put(keys.generation, decision.ledger.encode()),
        ),
    )


def _open(keys: Keys, view: View, me: Me, decision: Decision, now: str) -> Txn:
    """Make the round joinable; settle the last world's history and remove what is old."""
    assert decision.round
    last = view.ledger.final
    stale: list[Put | Delete] = [
        Delete(keys.acks(g), prefix=True) for g in view.acked if g < decision.round.generation
    ]
    stale += [Delete(keys.reports(g), prefix=True) for g in view.reported if g < last]
    stale += [Delete(keys.history(g)) for g, _ in view.history[:-HISTORY]]
    ended = {"ended": decision.reason, "ended_at": now}
    return Txn(
        _fence(keys, view, me),
        (
            Put(keys.round, decision.round.encode(), me.lease),
            *_settled(keys, view, ended),
            *stale[:64],
        ),
    )


def _freeze(keys: Keys, view: View, me: Me, decision: Decision) -> Txn:
    """Fix the participants, their ranks, and what the last failure cost."""
    assert decision.round
    put = Put(keys.round, decision.round.encode(), me.lease)
    ended = {"ended": decision.round.reason}  # by now it is known whose failure it was
    return Txn(_fence(keys, view, me), (put, *_settled(keys, view, ended)))


def _finalise(keys: Keys, view: View, me: Me, decision: Decision, now: str) -> Txn:
    """The world and its master endpoint in one Txn, bound to no lease from here on."""
    assert decision.round and decision.ledger
    final = decision.round
    began = {
        "generation": final.generation,
        "run": final.run,
        "began": final.reason,
        "began_at": now,
        "coordinator": next(m.node for m in view.members if m.lease == me.lease),
        "nodes": [p.node for p in final.participants],
        "world_size": sum(p.nproc for p in final.participants),
        "restarts": final.restarts,
    }
    return Txn(
        _fence(keys, view, me),
        (
            Put(keys.round, final.encode()),
            Put(keys.generation, decision.ledger.encode()),
            Put(keys.history(final.generation), encode(began)),
        ),
    )


def _close(keys: Keys, view: View, me: Me, decision: Decision, now: str) -> Txn:
    """Write the outcome and remove all else but history; the closed round goes with its lease."""
    assert decision.round and decision.outcome
    outcome = replace(decision.outcome, at=now)
    ended = {"ended": decision.reason, "ended_at": now, "outcome": outcome.fields()}
    return Txn(
        (*_fence(keys, view, me), Compare(keys.spec, "create", me.spec)),
        (
            Put(keys.round, decision.round.encode(), me.lease),
            *_end(keys, outcome),
            *_settled(keys, view, ended),
        ),
    )


def leave(keys: Keys, me: Me) -> Txn:
    """Remove the own member key: of all who leave together, one then finds nobody left."""
    own = keys.member(me.lease)
    return Txn((Compare(own, "create", me.created),), (Delete(own),))


def nobody(keys: Keys) -> tuple[Compare, ...]:
    """Holds while the job has no member: a range without keys has version 0."""
    return (Compare(keys.members, "version", 0, prefix=True),)


def stop(keys: Keys, view: View, me: Me, now: str) -> Txn:
    """The last member has left: the job is stopped."""
    why = "the last node left"
    outcome = Outcome("stopped", why, me.run, view.ledger.generation, 0, at=now)
    ended = {"ended": why, "ended_at": now, "outcome": outcome.fields()}
    then = (Delete(keys.round), *_end(keys, outcome), *_settled(keys, view, ended))
    return Txn((*nobody(keys), Compare(keys.spec, "create", me.spec)), then)


def _ack(keys: Keys, view: View, me: Me, master: Master | None) -> Txn:
    """Ready for the round's generation, with the endpoint that counts from group rank 0."""
    assert view.round
    key = keys.ack(view.round.generation, me.lease)
    return Txn(_fence(keys, view, me), (Put(key, Ack(me.lease, master).encode(), me.lease),))


def _report(keys: Keys, view: View | None, me: Me, generation: int, report: Report) -> Txn:
    """How this node's workers of `generation` ended. Bound to no lease: it outlives the node.

    A failure is a cause only as long as its world stands, so it is fenced by the round.
    """
    fence: tuple[Compare, ...] = (
        Compare(keys.member(me.lease), "create", me.created),
        Compare(keys.outcome, "mod", view.outcome_mod if view else 0),
    )
    key = keys.report(generation, me.lease)
    if report.victim:  # it may be the cause all the same: written, and only its answer lost
        fence = (*fence, Compare(key, "version", 0))
    elif view and report.failure:
        fence = (*fence, Compare(keys.round, "mod", view.round_mod))
    return Txn(fence, (Put(key, report.encode()),))


def _leaving(keys: Keys, me: Me, member: Member) -> Txn:
    """Say that this node goes, so that the others need not wait for its lease."""
    mark = replace(member, leaving=True)
    return Txn(
        (Compare(keys.member(me.lease), "create", me.created),),
        (Put(keys.member(me.lease), mark.encode(), me.lease),),
    )


def _fence(keys: Keys, view: View, me: Me) -> tuple[Compare, ...]:
    return (
        Compare(keys.round, "mod", view.round_mod),
        Compare(keys.member(me.lease), "create", me.created),
    )


def _end(keys: Keys, outcome: Outcome) -> tuple[Put | Delete, ...]:
    return (
        Put(keys.outcome, outcome.encode()),
        Delete(keys.spec),
        Delete(keys.generation),
        Delete(keys.acks(), prefix=True),
        Delete(keys.reports(), prefix=True),
    )


def _settled(keys: Keys, view: View, ended: dict[str, Any]) -> Sequence[Put]:
    """The last world's history with how it ended: the culprit in full, victims in short."""
    entry = dict(view.history).get(view.ledger.final)
    if entry is None:
        return ()
    failures = [r.failure for r in view.reports if r.failure][:FAILURES]
    told = [replace(f, message=f.message if i == 0 else "") for i, f in enumerate(failures)]
    try:
        known = history.read(entry)
    except ValueError:
        known = {"generation": view.ledger.final}
    known = {**known, **ended, "failures": [f.encode() for f in told]}
    return (Put(keys.history(view.ledger.final), encode(known)),)
