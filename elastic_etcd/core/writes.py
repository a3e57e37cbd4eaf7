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

from elastic_etcd.core import requests, rules, schema
from elastic_etcd.core.lifecycle import MarkLeaving, Outdated, Over, ReportEnd, State, Write, pages
from elastic_etcd.core.peers import is_left
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


def look(keys: schema.Keys, most: int = SOME) -> tuple[Get, ...]:
    """The keys that an agent reads before it joins; all members read by all would be N x N."""
    members = Get(keys.members, prefix=True, limit=most)
    return (Get(keys.spec), Get(keys.outcome), Get(keys.ledger), Get(keys.wanted), members)


def look_again(keys: schema.Keys, seen: Snapshot) -> bool:
    """Whether joining removes members, and there may be more than were seen: see `_orphans`."""
    members = sum(key.startswith(keys.members) for key in seen.kvs)
    return members == SOME and keys.spec not in seen.kvs


def succeeded(keys: schema.Keys, seen: Snapshot, command: str) -> Over | str | None:
    """Says that there is nothing left to do, in a job that nobody wants to run once more.

    Whoever supervises agents starts them again also after the job's success, and a new run would
    begin to write over what this one has made. Another `command` is told why it does not run.
    """
    outcome = view_of(seen, keys, Everything()).outcome
    if outcome is None or outcome.state != rules.Verdict.SUCCEEDED.state:
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
    keys: schema.Keys,
    seen: Snapshot,
    member: schema.Member,
    spec: schema.Spec,
    *,
    again: bool,
    rerun: bool = False,
    last: int = 0,
) -> Txn | str | schema.Drain | Outdated | Over:
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
    if older := older_format(keys, seen):
        runs = f"an older elastic_etcd (format {older}) runs it"
        return f"{runs}; this one writes format {schema.VERSION}"
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
    renewed = (Put(keys.spec, schema.encode(known)),) if known != view.spec else ()
    return Txn(fence, (_put_member(keys, member, known.run, view), *renewed))


def older_format(keys: schema.Keys, seen: Snapshot) -> int:
    """Return the format version of the job's run if that is older than this program's, else 0.

    A spec that names no run is spoilt, whatever it says of its version.
    """
    text = seen.kvs[keys.spec].value if keys.spec in seen.kvs else ""
    told = schema.format_of(text) if schema.names_a_run(text) else 0
    return told if told < schema.VERSION else 0


def relist(keys: schema.Keys, view: View, local: rules.Local, member: schema.Member) -> Txn:
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
    return Txn(fence, (Put(own, schema.encode(member), local.lease), Get(own)), (Get(own),))


def _asked(view: View, known: schema.Spec) -> tuple[str, ...]:
    """The --nnodes with which a node may join this run: its own, and those it is scaled to."""
    return known.limits.nnodes, requests.wanted_limits(view, known).nnodes


def _put_member(keys: schema.Keys, member: schema.Member, run: str, view: View) -> Put:
    joined = replace(member, run=run, joined=view.ledger.generation)
    return Put(keys.member(member.lease), schema.encode(joined), member.lease)


def _orphans(keys: schema.Keys, view: View) -> tuple[Delete, ...]:
    """The keys of members whose spec was removed by hand: without them they join again.

    Their fence is on the spec that is gone, so they could claim nothing.
    """
    orphaned = view.spec is None and view.outcome is None
    return tuple(Delete(keys.member(m.lease)) for m in view.members if orphaned)


def _begin_run(
    keys: schema.Keys, view: View, spec: schema.Spec, last: int
) -> tuple[Put | Delete, ...]:
    last = max(last, view.ledger.generation, view.outcome.generation if view.outcome else 0)
    return (
        Put(keys.spec, schema.encode(spec)),
        Put(keys.ledger, schema.encode(schema.Ledger(generation=last))),
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
    keys: schema.Keys,
    state: State,
    write: Write,
    member: schema.Member,
    master: schema.Master | None,
    now: str,
    spent: schema.Spent | None = None,
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
        case rules.Claim() as claim:
            return _write_claim(keys, view, local, claim)
        case rules.TakeOver() as lead:
            return _write_take_over(keys, view, local, lead)
        case rules.Open() as open_:
            return _write_open(keys, view, local, open_, now, spent)
        case rules.Freeze() as freeze:
            return _write_freeze(keys, view, local, freeze, spent)
        case rules.Ack() as ack:
            return _write_ack(keys, view, local, ack, master)
        case rules.Finalise() as finalise:
            return _write_finalise(keys, view, local, finalise, now, pages(state))
        case rules.Close() as close:
            return _write_close(keys, view, local, close, now, spent)


def _write_claim(keys: schema.Keys, view: View, local: rules.Local, claim: rules.Claim) -> Txn:
    """Take the next generation. The round is bound to the claimant's lease until it is final."""
    return Txn(
        (
            *_round_fence(keys, view, local),
            Compare(keys.ledger, "mod", view.ledger_mod),
            Compare(keys.spec, "create", local.spec),
        ),
        (
            Put(keys.round, schema.encode(claim.round), local.lease),
            Put(keys.ledger, schema.encode(claim.ledger)),
        ),
    )


def _write_take_over(
    keys: schema.Keys, view: View, local: rules.Local, lead: rules.TakeOver
) -> Txn:
    """Lead the same final round, which stays bound to no lease.

    The fence does not ask for the coordinator before. A leaving one stays so; one that has
    put its key back meanwhile, see `relist`, takes part without leading.
    """
    return Txn(_round_fence(keys, view, local), (Put(keys.round, schema.encode(lead.round)),))


def _write_open(
    keys: schema.Keys,
    view: View,
    local: rules.Local,
    opened: rules.Open,
    now: str,
    spent: schema.Spent | None,
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
            Put(keys.round, schema.encode(opened.round), local.lease),
            *_settle_history(keys, view, spent, ended=opened.reason, ended_at=now),
            *stale[:64],
        ),
    )


def _write_freeze(
    keys: schema.Keys,
    view: View,
    local: rules.Local,
    freeze: rules.Freeze,
    spent: schema.Spent | None,
) -> Txn:
    """Freeze the round: no ack is written any more, whose fence is its older revision."""
    put = Put(keys.round, schema.encode(freeze.round), local.lease)
    why = freeze.round.reason  # by now it is known whose failure it was
    settled = _settle_history(keys, view, spent, ended=why)
    return Txn(_round_fence(keys, view, local), (put, *settled))


def _write_finalise(
    keys: schema.Keys,
    view: View,
    local: rules.Local,
    finalise: rules.Finalise,
    now: str,
    pages: int,
) -> Txn:
    """Put the world, ranks and master endpoint in one Txn, bound to no lease from here on."""
    final = finalise.round
    began = schema.History(
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
            Put(keys.round, schema.encode(final)),
            Put(keys.ledger, schema.encode(finalise.ledger)),
            Put(keys.history(final.generation), schema.encode(began)),
            *_write_pages(keys, finalise, pages),
        ),
    )


def _spent_before(view: View, run: str) -> schema.Spent | UnsetType:
    """The time spent by all older worlds of the run; an unknown world counts as one."""
    entry = dict(view.history).get(view.ledger.final)
    if entry is None:
        return UNSET
    last = _known_history(view.ledger.final, entry)
    if last.run != run:
        return UNSET
    known = last if last.spent else replace(last, spent=schema.Spent())
    return known.spent_until_now or UNSET


def _write_pages(keys: schema.Keys, finalise: rules.Finalise, pages: int) -> Iterator[Put]:
    found: list[list[schema.Participant]] = [[] for _ in range(pages)]
    for participant in finalise.world:
        found[participant.lease % pages].append(participant)
    for number, on in enumerate(found):
        yield Put(
            keys.page(number), schema.encode(schema.Page(finalise.round.generation, tuple(on)))
        )


def _write_close(
    keys: schema.Keys,
    view: View,
    local: rules.Local,
    close: rules.Close,
    now: str,
    spent: schema.Spent | None,
) -> Txn:
    """Write the outcome and remove all else but history; the closed round goes with its lease."""
    command = view.spec.command if view.spec else ""
    outcome = replace(close.outcome, at=now, command=command)
    settled = _settle_history(keys, view, spent, ended=close.reason, ended_at=now, outcome=outcome)
    return Txn(
        (*_round_fence(keys, view, local), Compare(keys.spec, "create", local.spec)),
        (
            Put(keys.round, schema.encode(close.round), local.lease),
            *_end_run(keys, outcome),
            *settled,
        ),
    )


def _write_ack(
    keys: schema.Keys, view: View, local: rules.Local, ack: rules.Ack, master: schema.Master | None
) -> Txn:
    """Put that this node is ready, with the endpoint that counts if it becomes group rank 0."""
    key = keys.ack(ack.generation, local.lease)
    value = schema.Ready(local.lease, master, rules.left_here(view, local) or UNSET)
    return Txn(_round_fence(keys, view, local), (Put(key, schema.encode(value), local.lease),))


def _write_report(
    keys: schema.Keys, view: View | None, local: rules.Local, generation: int, end: ReportEnd
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
    report = schema.Report(local.lease, 0, end.failure, end.victim)
    return Txn(fence, (Put(key, schema.encode(report)),))


# --- hangs and stragglers -----------------------------------------------------------------


def put_steps(keys: schema.Keys, view: View, local: rules.Local, steps: schema.NodeSteps) -> Txn:
    """Put where this node's workers are, as long as their generation is the job's."""
    fence = (
        Compare(keys.member(local.lease), "create", local.created),
        Compare(keys.ledger, "mod", view.ledger_mod),
    )
    key = keys.step(local.running, local.lease)
    return Txn(fence, (Put(key, schema.encode(steps), local.lease),))


def put_own(keys: schema.Keys, local: rules.Local, key: str, value: schema.Value | None) -> Txn:
    """Put what this node says of itself into a key of its own; None: nobody wants to know it."""
    fence = (Compare(keys.member(local.lease), "create", local.created),)
    return Txn(fence, (Put(key, schema.encode(value), local.lease) if value else Delete(key),))


def put_hang(keys: schema.Keys, view: View, local: rules.Local, hang: schema.Hang) -> Txn:
    """Put the coordinator's question or its answer; a hang is told in the world's history, too.

    The key is bound to no lease: whoever takes over the lead goes on with it.
    """
    told = _history_with(keys, view, hang) if hang.alarm else ()
    fence = (*_round_fence(keys, view, local), Compare(keys.hang, "mod", view.hang_mod))
    return Txn(fence, (Put(keys.hang, schema.encode(hang)), *told))


def put_stragglers(
    keys: schema.Keys, view: View, local: rules.Local, found: schema.Stragglers
) -> Txn:
    """Put the coordinator's line about a node that is slow, or is so no more; also in the history.

    The key is bound to no lease, as that of a hang.
    """
    fence = (
        *_round_fence(keys, view, local),
        Compare(keys.stragglers, "mod", view.stragglers_mod),
    )
    told = _history_with(keys, view, found)
    return Txn(fence, (Put(keys.stragglers, schema.encode(found)), *told))


def _history_with(
    keys: schema.Keys, view: View, said: schema.Hang | schema.Stragglers
) -> tuple[Put, ...]:
    entry = dict(view.history).get(said.generation)
    if entry is None:
        return ()
    known = _known_history(said.generation, entry)
    if isinstance(said, schema.Hang):
        told = known.hangs or ()
        # A coordinator of another version may have told some without their times.
        times = (*(known.hung_at or ()), *repeat("", len(told)))[: len(told)]
        hangs, hung_at = (*told, said.line), (*times, said.at)
        known = replace(known, hangs=hangs[-HANGS:], hung_at=hung_at[-HANGS:])
    else:
        known = replace(known, stragglers=(*(known.stragglers or ()), said.line)[-STRAGGLERS:])
    return (Put(keys.history(said.generation), schema.encode(known)),)


# --- replicas that differ -----------------------------------------------------------------


def put_divergence(keys: schema.Keys, local: rules.Local, found: schema.Divergence) -> Txn:
    """Put who differs in this world; the history has it when the world has ended."""
    fence = (Compare(keys.member(local.lease), "create", local.created),)
    return Txn(fence, (Put(keys.divergence, schema.encode(found)),))


def put_drain(keys: schema.Keys, view: View, local: rules.Local, drain: schema.Drain) -> Txn | None:
    """Ask that this node go and stay away, as people may do, beside what they have asked for.

    None where no more nodes can be drained.
    """
    fence = (
        Compare(keys.wanted, "mod", view.wanted_mod),
        Compare(keys.member(local.lease), "create", local.created),
    )
    asked = requests.with_drains(view.wanted or schema.Requests(), [drain])
    if asked is None:
        return None
    return Txn(fence, (Put(keys.wanted, schema.encode(asked)),))


# --- leaving ------------------------------------------------------------------------------


def _write_leaving(keys: schema.Keys, local: rules.Local, member: schema.Member) -> Txn:
    """Say that this node goes, so that the others need not wait for its lease."""
    mark = replace(member, leaving=True)
    return Txn(
        (Compare(keys.member(local.lease), "create", local.created),),
        (Put(keys.member(local.lease), schema.encode(mark), local.lease),),
    )


def leave(keys: schema.Keys, local: rules.Local) -> Txn:
    """Remove the own member key. If all leave together, one of them finds nobody left after it."""
    own = keys.member(local.lease)
    return Txn((Compare(own, "create", local.created),), (Delete(own),))


def nobody(keys: schema.Keys) -> tuple[Compare, ...]:
    """A compare that holds while the job has no member: a range without keys has version 0."""
    return (Compare(keys.members, "version", 0, prefix=True),)


def stop(
    keys: schema.Keys, view: View, local: rules.Local, now: str, spent: schema.Spent | None = None
) -> Txn:
    """Stop the job, which its last member has left; `spent` is as for `build`."""
    why = requests.why_stopped(view, local.run)
    stopped = rules.Verdict.STOPPED.outcome(local.run, view.ledger.generation, why, None)
    outcome = replace(stopped, at=now)
    settled = _settle_history(keys, view, spent, ended=why, ended_at=now, outcome=outcome)
    then = (Delete(keys.round), *_end_run(keys, outcome), *settled)
    return Txn((*nobody(keys), Compare(keys.spec, "create", local.spec)), then)


# --- what several have in common -----------------------------------------------------------


def _round_fence(keys: schema.Keys, view: View, local: rules.Local) -> tuple[Compare, ...]:
    return (
        Compare(keys.round, "mod", view.round_mod),
        Compare(keys.member(local.lease), "create", local.created),
    )


def _end_run(keys: schema.Keys, outcome: schema.Outcome) -> tuple[Put | Delete, ...]:
    return (
        Put(keys.outcome, schema.encode(outcome)),
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


def _settle_history(
    keys: schema.Keys, view: View, spent: schema.Spent | None, **ended: Any
) -> tuple[Put, ...]:
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
    return (Put(keys.history(last), schema.encode(known)),)


def _known_history(generation: int, entry: str) -> schema.History:
    try:
        return schema.decode(schema.History, entry)
    except ValueError:
        return schema.History(generation)
