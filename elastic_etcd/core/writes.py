"""The Txn for each thing that an agent writes, from joining to leaving.

Each is fenced: the writer's member key has the create revision it was made with (it still
holds its lease), and the round the mod revision on which the decision was made. `now` is
the wall-clock time for people to read; nothing compares it.
"""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from elastic_etcd.core import requests, schema
from elastic_etcd.core.lifecycle import MarkLeaving, Outdated, Over, ReportEnd, State, Write, pages
from elastic_etcd.core.peers import is_left
from elastic_etcd.core.rules import (
    Ack,
    Claim,
    Close,
    Finalise,
    Freeze,
    Local,
    Open,
    TakeOver,
    Verdict,
    left_here,
)
from elastic_etcd.core.schema import (
    VERSION,
    Divergence,
    Drain,
    Hang,
    History,
    Keys,
    Ledger,
    Master,
    Member,
    NodeSteps,
    Outcome,
    Pace,
    Page,
    Participant,
    Report,
    Requests,
    Spec,
    Spent,
    StepTime,
    Stragglers,
    decode,
    encode,
    format_of,
)
from elastic_etcd.core.txn import Compare, Delete, Get, Put, Snapshot, Txn
from elastic_etcd.core.view import Everything, Narrow, View, view_of

HISTORY = 100  # generations that are remembered
FAILURES = 32  # and of each, this many failed workers: a value has its limit in etcd
NODES = 128  # and so many names
HANGS = 8  # and so many lines of hangs
STRAGGLERS = 8  # and of stragglers
SOME = 16  # members that an agent looks at before it joins
MANY = 100  # where the spec is gone, and they all go; a Txn has at most 128 operations


# --- joining ------------------------------------------------------------------------------


def look(keys: Keys, most: int = SOME) -> tuple[Get, ...]:
    """The keys that an agent reads before it joins; all members read by all would be N x N."""
    members = Get(keys.members, prefix=True, limit=most)
    return (Get(keys.spec), Get(keys.outcome), Get(keys.ledger), Get(keys.wanted), members)


def look_again(keys: Keys, seen: Snapshot) -> bool:
    """Whether joining removes members, and there may be more than were seen: see `_orphans`."""
    members = sum(key.startswith(keys.members) for key in seen.kvs)
    return members == SOME and keys.spec not in seen.kvs


def succeeded(keys: Keys, seen: Snapshot, command: str) -> Over | str | None:
    """Says that there is nothing left to do, in a job that nobody wants to run once more.

    Whoever supervises agents starts them again also after the job's success, and a new run would
    begin to write over what this one has made. Another `command` is told why it does not run.
    """
    outcome = view_of(seen, keys, Everything()).outcome
    if outcome is None or outcome.state != Verdict.SUCCEEDED.state:
        return None
    when = f" at {outcome.at}" if outcome.at else ""
    if differ(outcome.command, command):
        return f"it has already succeeded{when} with another command; give this one its own --job"
    again = "--rerun (torchrun: --rdzv-conf rerun=true) runs it again"
    return Over(f"this job has already succeeded{when}; {again}")


def differ(command: str, own: str) -> bool:
    """Whether two digests are known to be of different commands."""
    return bool(command and own) and command != own


def join(
    keys: Keys,
    seen: Snapshot,
    member: Member,
    spec: Spec,
    *,
    again: bool,
    rerun: bool = False,
    last: int = 0,
) -> Txn | str | Drain | Outdated | Over:
    """The Txn by which `member` joins its job, or why it can't, or the Drain that keeps it out.

    A run goes on until it has an outcome: a node that comes back joins the run it was in, and
    `again` says that it was in run `spec.run`, up to generation `last`. After an outcome, or
    when nobody lives of a run with another --nnodes, `spec` begins a new run
    (pytorch/elastic#151); after success only for a `rerun`. The run's other limits count for all
    its agents, whatever theirs are; but when nobody is there who goes by them, they and the command
    become those of `spec`. If nothing is left (etcd was wiped) the run it was in begins anew.
    A node that is drained meanwhile comes back into its run `again`, and leaves it as others do.
    Generations keep growing over runs, so that no key of an old run is ever mistaken for one of
    the new.
    """
    view = view_of(seen, keys, Everything())
    if view.newer:  # whoever writes a round writes the ledger, too, so that this one sees it
        return Outdated(view.newer)
    if keys.spec in seen.kvs and 0 < (older := format_of(seen.kvs[keys.spec].value)) < VERSION:
        return f"an older elastic_etcd (format {older}) runs it; this one writes format {VERSION}"
    if not (again or rerun) and (over := succeeded(keys, seen, spec.command)):
        return over
    if not again and (drain := requests.drained(view, member.node)):
        return drain
    known = view.spec
    if known is None and keys.spec in seen.kvs and view.members and not view.outcome:
        known = replace(spec, run=view.members[0].run)  # it is spoilt; the members know the run
    ended = view.outcome and view.outcome.generation >= last  # an older one is of a backup
    if again and (ended or (known and known.run != spec.run)):
        return "the job ended while this node was cut off"
    if known and not (again or view.members) and requests.halted(view, known.run):
        known = None  # all have left, and the last one died before it wrote the outcome
    own, asked = spec.limits.nnodes, _asked(view, known) if known else ()
    if known and view.members and not view.outcome and own not in asked:
        differs = f"--nnodes {own} differs from {asked[-1][:256]} of the nodes there"
        return f"{differs}: give the same, or change the job's by `elastic-etcd scale`"
    fence: tuple[Compare, ...] = (
        Compare(keys.member(member.lease), "create", 0),
        Compare(keys.spec, "mod", _mod_of(seen, keys.spec)),
        Compare(keys.outcome, "mod", _mod_of(seen, keys.outcome)),
    )
    if known is None or view.outcome or own not in asked:
        begun = _begin_run(keys, view, spec, last)
        return Txn(fence, (_put_member(keys, member, spec.run, view), *begun))
    limits = spec.limits.with_sizes(known.limits)  # this node's own may be what it is scaled to
    deserted = not any(key.startswith(keys.members) for key in seen.kvs)  # of any run's members
    if deserted and (known.limits, known.command) != (limits, spec.command):
        known = replace(known, limits=limits, command=spec.command)
        fence = (*fence, *nobody(keys))
    renewed = (Put(keys.spec, encode(known)),) if known != view.spec else ()
    return Txn(fence, (_put_member(keys, member, known.run, view), *renewed))


def relist(keys: Keys, view: View, local: Local, member: Member) -> Txn:
    """Put back a member's key, which went with its lease, if its world has not been ended.

    A claim writes the ledger, which is never written twice alike; a change of coordinator doesn't.
    If somebody else has written there, the member joins anew.
    """
    own = keys.member(local.lease)
    fence = (
        Compare(own, "create", 0),
        Compare(keys.ledger, "mod", view.ledger_mod),
        Compare(keys.spec, "create", local.spec),
        Compare(keys.outcome, "mod", view.outcome_mod),
    )
    return Txn(fence, (Put(own, encode(member), local.lease), Get(own)), (Get(own),))


def _asked(view: View, known: Spec) -> tuple[str, ...]:
    """The --nnodes with which a node may join this run: its own, and those it is scaled to."""
    return known.limits.nnodes, requests.scaled(view, known.run, known.limits).nnodes


def _put_member(keys: Keys, member: Member, run: str, view: View) -> Put:
    joined = replace(member, run=run, joined=view.ledger.generation)
    return Put(keys.member(member.lease), encode(joined), member.lease)


def _orphans(keys: Keys, view: View) -> tuple[Delete, ...]:
    """The keys of members whose spec was removed by hand: without them they join again.

    Their fence is on the spec that is gone, so they could claim nothing.
    """
    orphaned = view.spec is None and view.outcome is None
    return tuple(Delete(keys.member(m.lease)) for m in view.members if orphaned)


def _begin_run(keys: Keys, view: View, spec: Spec, last: int) -> tuple[Put | Delete, ...]:
    last = max(last, view.ledger.generation, view.outcome.generation if view.outcome else 0)
    return (
        Put(keys.spec, encode(spec)),
        Put(keys.ledger, encode(Ledger(generation=last))),
        Delete(keys.round),
        Delete(keys.outcome),
        Delete(keys.reports(), prefix=True),
        Delete(keys.world, prefix=True),
        *_orphans(keys, view),
    )


def _mod_of(seen: Snapshot, key: str) -> int:
    kv = seen.kvs.get(key)
    return kv.mod if kv else 0


# --- taking part --------------------------------------------------------------------------


def build(
    keys: Keys,
    state: State,
    write: Write,
    member: Member,
    master: Master | None,
    now: str,
    spent: Spent | None = None,
) -> Txn:
    """The Txn of `write`, on the view on which it was decided.

    `master` is where this agent would serve the store, for an ack. `spent` is what this node has
    measured of the last world, for the history.
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
        case TakeOver() as lead:
            return _write_take_over(keys, view, local, lead)
        case Open() as open_:
            return _write_open(keys, view, local, open_, now, spent)
        case Freeze() as freeze:
            return _write_freeze(keys, view, local, freeze, spent)
        case Ack() as ack:
            return _write_ack(keys, view, local, ack, master)
        case Finalise() as finalise:
            return _write_finalise(keys, view, local, finalise, now, pages(state))
        case Close() as close:
            return _write_close(keys, view, local, close, now, spent)


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


def _write_take_over(keys: Keys, view: View, local: Local, lead: TakeOver) -> Txn:
    """Lead the same final round, which stays bound to no lease.

    The fence does not ask for the coordinator before. A leaving one stays so; one that has
    put its key back meanwhile, see `relist`, takes part without leading.
    """
    return Txn(_round_fence(keys, view, local), (Put(keys.round, encode(lead.round)),))


def _write_open(
    keys: Keys, view: View, local: Local, opened: Open, now: str, spent: Spent | None
) -> Txn:
    """Make the round joinable; settle the last world's history and remove what is old."""
    last = view.ledger.final
    trains = last if opened.round.joins else 0  # until its step is over it may hang
    stale: list[Put | Delete] = [
        Delete(keys.acks(g), prefix=True) for g in view.acked if g < opened.round.generation
    ]
    stale += [Delete(keys.reports(g), prefix=True) for g in view.reported if g < last]
    stale += [Delete(keys.history(g)) for g, _ in view.history[:-HISTORY]]
    stale += [Delete(keys.steps(g), prefix=True) for g in view.stepped if g != trains]
    stale += [Delete(keys.hang)] if view.hang_mod and not trains else []
    return Txn(
        _round_fence(keys, view, local),
        (
            Put(keys.round, encode(opened.round), local.lease),
            *_settle_history(keys, view, spent, ended=opened.reason, ended_at=now),
            *stale[:64],
        ),
    )


def _write_freeze(keys: Keys, view: View, local: Local, freeze: Freeze, spent: Spent | None) -> Txn:
    """Freeze the round: no ack is written any more, whose fence is its older revision."""
    put = Put(keys.round, encode(freeze.round), local.lease)
    why = freeze.round.reason  # by now it is known whose failure it was
    settled = _settle_history(keys, view, spent, ended=why)
    return Txn(_round_fence(keys, view, local), (put, *settled))


def _write_finalise(
    keys: Keys, view: View, local: Local, finalise: Finalise, now: str, pages: int
) -> Txn:
    """Put the world, ranks and master endpoint in one Txn, bound to no lease from here on."""
    final = finalise.round
    began = History(
        generation=final.generation,
        run=final.run,
        began=final.reason,
        began_at=now,
        coordinator=final.node,
        nodes=tuple(p.node for p in finalise.world[:NODES]),
        world_size=final.world_size,
        restarts=final.restarts,
        spent_before=_spent_before(view, final.run),
    )
    return Txn(
        _round_fence(keys, view, local),
        (
            Put(keys.round, encode(final)),
            Put(keys.ledger, encode(finalise.ledger)),
            Put(keys.history(final.generation), encode(began)),
            *_write_pages(keys, finalise, pages),
        ),
    )


def _spent_before(view: View, run: str) -> Spent | UnsetType:
    """The time spent by all older worlds of the run; an unknown world counts as one."""
    entry = dict(view.history).get(view.ledger.final)
    if entry is None:
        return UNSET
    last = _known_history(view.ledger.final, entry)
    if last.run != run:
        return UNSET
    known = last if last.spent else replace(last, spent=Spent())
    return known.spent_until_now or UNSET


def _write_pages(keys: Keys, finalise: Finalise, pages: int) -> Iterator[Put]:
    found: list[list[Participant]] = [[] for _ in range(pages)]
    for participant in finalise.world:
        found[participant.lease % pages].append(participant)
    for number, on in enumerate(found):
        yield Put(keys.page(number), encode(Page(finalise.round.generation, tuple(on))))


def _write_close(
    keys: Keys, view: View, local: Local, close: Close, now: str, spent: Spent | None
) -> Txn:
    """Write the outcome and remove all else but history; the closed round goes with its lease."""
    command = view.spec.command if view.spec else ""
    outcome = replace(close.outcome, at=now, command=command)
    settled = _settle_history(keys, view, spent, ended=close.reason, ended_at=now, outcome=outcome)
    return Txn(
        (*_round_fence(keys, view, local), Compare(keys.spec, "create", local.spec)),
        (
            Put(keys.round, encode(close.round), local.lease),
            *_end_run(keys, outcome),
            *settled,
        ),
    )


def _write_ack(keys: Keys, view: View, local: Local, ack: Ack, master: Master | None) -> Txn:
    """Put that this node is ready, with the endpoint that counts if it becomes group rank 0."""
    key = keys.ack(ack.generation, local.lease)
    value = schema.Ready(local.lease, master, left_here(view, local) or UNSET)
    return Txn(_round_fence(keys, view, local), (Put(key, encode(value), local.lease),))


def _write_report(
    keys: Keys, view: View | None, local: Local, generation: int, end: ReportEnd
) -> Txn:
    """Put how this node's workers of `generation` ended, bound to no lease: it outlives the node.

    A failure is a cause only as long as its world stands, so it is fenced by the ledger: the next
    claim writes that, and a change of coordinator does not.
    """
    fence: tuple[Compare, ...] = (
        Compare(keys.member(local.lease), "create", local.created),
        Compare(keys.outcome, "mod", view.outcome_mod if view else 0),
    )
    key = keys.report(generation, local.lease)
    if end.victim:  # it may be the cause all the same: written, and only its answer lost
        fence = (*fence, Compare(key, "version", 0))
    elif view and end.failure:
        fence = (*fence, Compare(keys.ledger, "mod", view.ledger_mod))
    report = Report(local.lease, 0, end.failure, end.victim)
    return Txn(fence, (Put(key, encode(report)),))


# --- hangs and stragglers -----------------------------------------------------------------


def put_steps(keys: Keys, view: View, local: Local, steps: NodeSteps) -> Txn:
    """Put where this node's workers are, as long as their generation is the job's."""
    fence = (
        Compare(keys.member(local.lease), "create", local.created),
        Compare(keys.ledger, "mod", view.ledger_mod),
    )
    key = keys.step(local.running, local.lease)
    return Txn(fence, (Put(key, encode(steps), local.lease),))


def put_pace(keys: Keys, local: Local, pace: Pace | None) -> Txn:
    """Put how fast this node's workers are; None: nobody wants to know it any more."""
    key = keys.pace(local.lease)
    fence = (Compare(keys.member(local.lease), "create", local.created),)
    return Txn(fence, (Put(key, encode(pace), local.lease) if pace else Delete(key),))


def put_hang(keys: Keys, view: View, local: Local, hang: Hang) -> Txn:
    """Put the coordinator's question or its answer; a hang is told in the world's history, too.

    The key is bound to no lease: whoever takes over the lead goes on with it.
    """
    told = _history_with(keys, view, hang) if hang.alarm else ()
    fence = (*_round_fence(keys, view, local), Compare(keys.hang, "mod", view.hang_mod))
    return Txn(fence, (Put(keys.hang, encode(hang)), *told))


def put_step_time(keys: Keys, local: Local, time: StepTime) -> Txn:
    """Put how long a step of this node's workers takes."""
    fence = (Compare(keys.member(local.lease), "create", local.created),)
    return Txn(fence, (Put(keys.step_time(local.lease), encode(time), local.lease),))


def put_stragglers(keys: Keys, view: View, local: Local, found: Stragglers) -> Txn:
    """Put the coordinator's line about a node that is slow, or is so no more; also in the history.

    The key is bound to no lease, as that of a hang.
    """
    fence = (
        *_round_fence(keys, view, local),
        Compare(keys.stragglers, "mod", view.stragglers_mod),
    )
    told = _history_with(keys, view, found)
    return Txn(fence, (Put(keys.stragglers, encode(found)), *told))


def _history_with(keys: Keys, view: View, said: Hang | Stragglers) -> tuple[Put, ...]:
    entry = dict(view.history).get(said.generation)
    if entry is None:
        return ()
    known = _known_history(said.generation, entry)
    if isinstance(said, Hang):
        told = known.hangs or ()
        # A coordinator of another version may have told some without their times.
        times = (*(known.hung_at or ()), *repeat("", len(told)))[: len(told)]
        hangs, hung_at = (*told, said.line), (*times, said.at)
        known = replace(known, hangs=hangs[-HANGS:], hung_at=hung_at[-HANGS:])
    else:
        known = replace(known, stragglers=(*(known.stragglers or ()), said.line)[-STRAGGLERS:])
    return (Put(keys.history(said.generation), encode(known)),)


# --- replicas that differ -----------------------------------------------------------------


def put_divergence(keys: Keys, local: Local, found: Divergence) -> Txn:
    """Put who differs in this world; the history has it when the world has ended."""
    fence = (Compare(keys.member(local.lease), "create", local.created),)
    return Txn(fence, (Put(keys.divergence, encode(found)),))


def put_drain(keys: Keys, view: View, local: Local, drain: Drain) -> Txn:
    """Ask that this node go and stay away, as people may do, beside what they have asked for."""
    fence = (
        Compare(keys.wanted, "mod", view.wanted_mod),
        Compare(keys.member(local.lease), "create", local.created),
    )
    there = view.wanted or Requests()
    asked = replace(there, drains=(*there.drains, drain))
    return Txn(fence, (Put(keys.wanted, encode(asked)),))


# --- leaving ------------------------------------------------------------------------------


def _write_leaving(keys: Keys, local: Local, member: Member) -> Txn:
    """Say that this node goes, so that the others need not wait for its lease."""
    mark = replace(member, leaving=True)
    return Txn(
        (Compare(keys.member(local.lease), "create", local.created),),
        (Put(keys.member(local.lease), encode(mark), local.lease),),
    )


def leave(keys: Keys, local: Local) -> Txn:
    """Remove the own member key. If all leave together, one of them finds nobody left after it."""
    own = keys.member(local.lease)
    return Txn((Compare(own, "create", local.created),), (Delete(own),))


def nobody(keys: Keys) -> tuple[Compare, ...]:
    """A compare that holds while the job has no member: a range without keys has version 0."""
    return (Compare(keys.members, "version", 0, prefix=True),)


def stop(keys: Keys, view: View, local: Local, now: str, spent: Spent | None = None) -> Txn:
    """Stop the job, which its last member has left; `spent` is as for `build`."""
    why = requests.why_stopped(view, local.run)
    stopped = Verdict.STOPPED.outcome(local.run, view.ledger.generation, why, None)
    outcome = replace(stopped, at=now)
    settled = _settle_history(keys, view, spent, ended=why, ended_at=now, outcome=outcome)
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
        Delete(keys.world, prefix=True),
        Delete(keys.hang),
        Delete(keys.stragglers),
        Delete(keys.divergence),
        Delete(keys.step_times, prefix=True),
        Delete(keys.steps(), prefix=True),
    )


def _settle_history(keys: Keys, view: View, spent: Spent | None, **ended: Any) -> tuple[Put, ...]:
    """Put into the last world's history how it ended: the culprit in full, victims in short."""
    last = view.ledger.final
    entry = dict(view.history).get(last)
    if entry is None:
        return ()
    failures = [r.failure for r in view.reports if r.failure][:FAILURES]
    short = [replace(f, message="") for f in failures[1:]]
    known = _known_history(last, entry)
    known = replace(known, failures=(*failures[:1], *short), **ended)
    if view.divergence and view.divergence.generation == last:
        known = replace(known, divergences=view.divergence.lines)
    if spent:
        hung = any(f.hang and not is_left(f) for f in failures[:1]) or known.hangs
        known = replace(
            known, spent=replace(spent, detect=0.0, hang=spent.detect) if hung else spent
        )
    return (Put(keys.history(last), encode(known)),)


def _known_history(generation: int, entry: str) -> History:
    try:
        return decode(History, entry)
    except ValueError:
        return History(generation)
