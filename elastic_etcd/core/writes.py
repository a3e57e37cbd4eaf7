"""The Txn for each thing that an agent writes, from joining to leaving.

Each is fenced: the writer's member key has the create revision it was made with (it still
holds its lease), and the round the mod revision on which the decision was made. `now` is
the wall-clock time for people to read; nothing compares it.
"""

from typing import Any

from msgspec.structs import replace

from elastic_etcd.core import schema
from elastic_etcd.core.lifecycle import MarkLeaving, Outdated, ReportEnd, State, Write
from elastic_etcd.core.rules import Ack, Claim, Close, Finalise, Freeze, Local, Open, Verdict
from elastic_etcd.core.schema import (
    History,
    Keys,
    Ledger,
    Master,
    Member,
    Outcome,
    Report,
    Spec,
    decode,
    encode,
)
from elastic_etcd.core.txn import Compare, Delete, Get, Put, Snapshot, Txn
from elastic_etcd.core.view import Everything, Narrow, View, view_of

HISTORY = 100  # generations that are remembered
FAILURES = 32  # and of each, this many failed workers: a value has its limit in etcd


# --- joining ------------------------------------------------------------------------------


def look(keys: Keys) -> tuple[Get, ...]:
    """What an agent reads before it joins."""
    members = Get(keys.members, prefix=True)
    return (Get(keys.spec), Get(keys.outcome), Get(keys.ledger), members)


def join(
    keys: Keys, seen: Snapshot, member: Member, spec: Spec, *, again: bool, last: int = 0
) -> Txn | str | Outdated:
    """The Txn by which `member` joins its job, or why it can't.

    A run goes on until it has an outcome: a node that comes back joins the run it was in, and
    `again` says that it was in run `spec.run`, up to generation `last`. After an outcome, or
    when nobody lives of a run with other limits, `spec` begins a new run (pytorch/elastic#151).
    Where nothing is left at all (etcd was wiped) the run it was in begins anew. Generations keep
    growing over runs, so that no key of an old run is ever mistaken for one of the new.
    """
    view = view_of(seen, keys, Everything())
    if view.newer:  # whoever writes a round writes the ledger, too, so that this one sees it
        return Outdated(view.newer)
    known = view.spec
    spoilt = known is None and keys.spec in seen.kvs and not view.outcome
    if spoilt and view.members:  # the members know which run it is, and go on with it
        known = replace(spec, run=view.members[0].run)
    if again and (view.outcome or (known and known.run != spec.run)):
        return "the job ended while this node was cut off"
    fresh = known is None or view.outcome is not None
    if known and not fresh and _nnodes(known) != _nnodes(spec):
        if view.members:
            return f"--nnodes {_nnodes(spec)} differs from {_nnodes(known)} of the nodes there"
        fresh = True
    run = spec.run if known is None or fresh else known.run
    fence = (
        Compare(keys.member(member.lease), "create", 0),
        Compare(keys.spec, "mod", _mod_of(seen, keys.spec)),
        Compare(keys.outcome, "mod", _mod_of(seen, keys.outcome)),
    )
    joined = replace(member, run=run, joined=view.ledger.generation)
    then = Put(keys.member(member.lease), encode(joined), member.lease)
    if known and spoilt:
        return Txn(fence, (then, Put(keys.spec, encode(known))))
    return Txn(fence, (then, *(_begin_run(keys, view, spec, last) if fresh else ())))


def _orphans(keys: Keys, view: View) -> tuple[Delete, ...]:
    """The keys of members whose spec was removed by hand: without them they join again.

    Their fence is on the spec that is gone, so they could claim nothing (128 operations a Txn).
    """
    orphaned = view.spec is None and view.outcome is None
    return tuple(Delete(keys.member(m.lease)) for m in view.members[:100] if orphaned)


def _begin_run(keys: Keys, view: View, spec: Spec, last: int) -> tuple[Put | Delete, ...]:
    last = max(last, view.ledger.generation, view.outcome.generation if view.outcome else 0)
    return (
        Put(keys.spec, encode(spec)),
        Put(keys.ledger, encode(Ledger(generation=last))),
        Delete(keys.round),
        Delete(keys.outcome),
        Delete(keys.reports(), prefix=True),
        *_orphans(keys, view),
    )


def _nnodes(spec: Spec) -> str:
    return f"{spec.min_nodes}:{spec.max_nodes}"


def _mod_of(seen: Snapshot, key: str) -> int:
    kv = seen.kvs.get(key)
    return kv.mod if kv else 0


# --- taking part --------------------------------------------------------------------------


def build(
    keys: Keys, state: State, write: Write, member: Member, master: Master | None, now: str
) -> Txn:
    """The Txn of `write`, on the view on which it was decided.

    `master` is where this agent would serve the store, for an ack.
    """
    local = state.local
    view = state.view or View(0, Narrow())  # if etcd has more than that, the fence does not hold
    match write.what:
        case MarkLeaving():
            return _write_leaving(keys, local, member)
        case ReportEnd() as end:
            return _write_report(keys, state.view, local, write.generation, end)
        case Claim() as claim:
            return _write_claim(keys, view, local, claim)
        case Open() as open_:
            return _write_open(keys, view, local, open_, now)
        case Freeze() as freeze:
            return _write_freeze(keys, view, local, freeze)
        case Ack() as ack:
            return _write_ack(keys, view, local, ack, master)
        case Finalise() as finalise:
            return _write_finalise(keys, view, local, finalise, now)
        case Close() as close:
            return _write_close(keys, view, local, close, now)


def _write_claim(keys: Keys, view: View, local: Local, claim: Claim) -> Txn:
    """Take the next generation. The round is bound to the claimant's lease until it is final."""
    return Txn(
        (
            *_round_fence(keys, view, local),
            Compare(keys.ledger, "mod", view.ledger_mod),
            Compare(keys.spec, "create", local.spec),
        ),
        (
            Put(keys.round, encode(claim.round), local.lease),
            Put(keys.ledger, encode(claim.ledger)),
        ),
    )


def _write_open(keys: Keys, view: View, local: Local, opened: Open, now: str) -> Txn:
    """Make the round joinable; settle the last world's history and remove what is old."""
    last = view.ledger.final
    stale: list[Put | Delete] = [
        Delete(keys.acks(g), prefix=True) for g in view.acked if g < opened.round.generation
    ]
    stale += [Delete(keys.reports(g), prefix=True) for g in view.reported if g < last]
    stale += [Delete(keys.history(g)) for g, _ in view.history[:-HISTORY]]
    return Txn(
        _round_fence(keys, view, local),
        (
            Put(keys.round, encode(opened.round), local.lease),
            *_settle_history(keys, view, ended=opened.reason, ended_at=now),
            *stale[:64],
        ),
    )


def _write_freeze(keys: Keys, view: View, local: Local, freeze: Freeze) -> Txn:
    """Fix the participants, their ranks, and what the last failure cost."""
    put = Put(keys.round, encode(freeze.round), local.lease)
    why = freeze.round.reason  # by now it is known whose failure it was
    return Txn(_round_fence(keys, view, local), (put, *_settle_history(keys, view, ended=why)))


def _write_finalise(keys: Keys, view: View, local: Local, finalise: Finalise, now: str) -> Txn:
    """The world and its master endpoint in one Txn, bound to no lease from here on."""
    final = finalise.round
    began = History(
        generation=final.generation,
        run=final.run,
        began=final.reason,
        began_at=now,
        coordinator=next(m.node for m in view.members if m.lease == local.lease),
        nodes=tuple(p.node for p in final.participants),
        world_size=sum(p.nproc for p in final.participants),
        restarts=final.restarts,
    )
    return Txn(
        _round_fence(keys, view, local),
        (
            Put(keys.round, encode(final)),
            Put(keys.ledger, encode(finalise.ledger)),
            Put(keys.history(final.generation), encode(began)),
        ),
    )


def _write_close(keys: Keys, view: View, local: Local, close: Close, now: str) -> Txn:
    """Write the outcome and remove all else but history; the closed round goes with its lease."""
    outcome = replace(close.outcome, at=now)
    settled = _settle_history(keys, view, ended=close.reason, ended_at=now, outcome=outcome)
    return Txn(
        (*_round_fence(keys, view, local), Compare(keys.spec, "create", local.spec)),
        (
            Put(keys.round, encode(close.round), local.lease),
            *_end_run(keys, outcome),
            *settled,
        ),
    )


def _write_ack(keys: Keys, view: View, local: Local, ack: Ack, master: Master | None) -> Txn:
    """Ready for the round's generation, with the endpoint that counts from group rank 0."""
    key, value = keys.ack(ack.generation, local.lease), schema.Ack(local.lease, master)
    return Txn(_round_fence(keys, view, local), (Put(key, encode(value), local.lease),))


def _write_report(
    keys: Keys, view: View | None, local: Local, generation: int, end: ReportEnd
) -> Txn:
    """How this node's workers of `generation` ended. Bound to no lease: it outlives the node.

    A failure is a cause only as long as its world stands, so it is fenced by the round.
    """
    fence: tuple[Compare, ...] = (
        Compare(keys.member(local.lease), "create", local.created),
        Compare(keys.outcome, "mod", view.outcome_mod if view else 0),
    )
    key = keys.report(generation, local.lease)
    if end.victim:  # it may be the cause all the same: written, and only its answer lost
        fence = (*fence, Compare(key, "version", 0))
    elif view and end.failure:
        fence = (*fence, Compare(keys.round, "mod", view.round_mod))
    report = Report(local.lease, 0, end.failure, end.victim)
    return Txn(fence, (Put(key, encode(report)),))


# --- leaving ------------------------------------------------------------------------------


def _write_leaving(keys: Keys, local: Local, member: Member) -> Txn:
    """Say that this node goes, so that the others need not wait for its lease."""
    mark = replace(member, leaving=True)
    return Txn(
        (Compare(keys.member(local.lease), "create", local.created),),
        (Put(keys.member(local.lease), encode(mark), local.lease),),
    )


def leave(keys: Keys, local: Local) -> Txn:
    """Remove the own member key. Of all who leave together, one finds nobody left after it."""
    own = keys.member(local.lease)
    return Txn((Compare(own, "create", local.created),), (Delete(own),))


def nobody(keys: Keys) -> tuple[Compare, ...]:
    """A compare that holds while the job has no member: a range without keys has version 0."""
    return (Compare(keys.members, "version", 0, prefix=True),)


def stop(keys: Keys, view: View, local: Local, now: str) -> Txn:
    """Stop the job, which its last member has left."""
    why = "the last node left"
    stopped = Verdict.STOPPED.outcome(local.run, view.ledger.generation, why, None)
    outcome = replace(stopped, at=now)
    settled = _settle_history(keys, view, ended=why, ended_at=now, outcome=outcome)
    then = (Delete(keys.round), *_end_run(keys, outcome), *settled)
    return Txn((*nobody(keys), Compare(keys.spec, "create", local.spec)), then)


# --- what several have in common -----------------------------------------------------------


def _round_fence(keys: Keys, view: View, local: Local) -> tuple[Compare, ...]:
    return (
        Compare(keys.round, "mod", view.round_mod),
        Compare(keys.member(local.lease), "create", local.created),
    )


def _end_run(keys: Keys, outcome: Outcome) -> tuple[Put | Delete, ...]:
    return (
        Put(keys.outcome, encode(outcome)),
        Delete(keys.spec),
        Delete(keys.ledger),
        Delete(keys.acks(), prefix=True),
        Delete(keys.reports(), prefix=True),
    )


def _settle_history(keys: Keys, view: View, **ended: Any) -> tuple[Put, ...]:
    """The last world's history with how it ended: the culprit in full, victims in short."""
    last = view.ledger.final
    entry = dict(view.history).get(last)
    if entry is None:
        return ()
    failures = [r.failure for r in view.reports if r.failure][:FAILURES]
    short = [replace(f, message="") for f in failures[1:]]
    try:
        known = decode(History, entry)
    except ValueError:
        known = History(last)
    known = replace(known, failures=(*failures[:1], *short), **ended)
    return (Put(keys.history(last), encode(known)),)
