"""I1 to I13 of core/rules.py as checks on single steps; each raises Violation."""

from collections.abc import Sequence
from functools import cache

from msgspec.structs import replace

from elastic_etcd.core import failure_policies
from elastic_etcd.core.lifecycle import (
    CUT_OFF,
    Action,
    Event,
    Life,
    StartWorkers,
    State,
    ViewChanged,
    Write,
)
from elastic_etcd.core.rules import Claim, Close, Freeze, Local, TakeOver, Verdict
from elastic_etcd.core.schema import (
    Drain,
    Failure,
    FailureKind,
    Ledger,
    Limits,
    Member,
    Outcome,
    Participant,
    Past,
    Phase,
    Report,
    Requests,
    Round,
    decode,
    encode,
)
from elastic_etcd.core.txn import Put, Txn
from elastic_etcd.core.view import Everything, View, covered, view_of
from tests.model.store import EARLY, KEYS, Store

TOO_FEW = Verdict.TOO_FEW_NODES.exit_code
IN_VAIN = Verdict.NO_PROGRESS.exit_code


class Violation(AssertionError):
    """An invariant does not hold."""


@cache
def round_of(store: Store) -> Round | None:
    value = store.value(KEYS.round)
    return decode(Round, value) if value else None


@cache
def wanted_of(store: Store) -> Requests:
    """What people want."""
    value = store.value(KEYS.wanted)
    return decode(Requests, value) if value else Requests()


@cache
def is_drained(store: Store, name: str) -> bool:
    """Whether somebody keeps that node out."""
    return Drain(name) in wanted_of(store).drains


def asked(wanted: Requests | None, limits: Limits) -> Limits:
    """`limits` with the numbers of nodes that people want."""
    scale = wanted.scale if wanted else None
    if scale is None:
        return limits
    return replace(limits, min_nodes=scale.min_nodes, max_nodes=scale.max_nodes)


@cache
def world_of(store: Store) -> tuple[Participant, ...]:
    """The last world, in rank order."""
    everything = store.read(covered(KEYS, Everything()))
    return view_of(everything, KEYS, Everything()).world


def _unled(final: Round) -> str:
    """All of a final round but who coordinates it."""
    return encode(replace(final, coordinator=1, node=""))


def is_done(store: Store, generation: int, lease: int) -> bool:
    """Whether that member has reported that its workers of the generation exited 0."""
    report = store.value(KEYS.report(generation, lease))
    return report is not None and decode(Report, report, lease=lease, revision=0).done


def has_failed(store: Store, generation: int) -> bool:
    """Whether a worker of the generation was reported to have failed."""
    start = KEYS.reports(generation)
    reports = [v for k, v, _ in store.kvs if k.startswith(start)]
    return any(decode(Report, value, lease=1, revision=0).failure for value in reports)


def is_live(store: Store, lease: int) -> bool:
    """Whether that member is there and stays."""
    member = store.value(KEYS.member(lease))
    return member is not None and not decode(Member, member, lease=lease).leaving


def has_stayed(store: Store, lease: int) -> bool:
    """Whether that member is there, was all the time, and stays."""
    return is_live(store, lease) and lease not in store.back


def in_endless_step(store: Store, state: State) -> bool:
    """Whether workers that have all the time they need wait for one that is gone or has failed."""
    local = state.local
    if not local.patient or not state.alive:
        return False
    leases = [p.lease for p in world_of(store)]
    gone = [lease for lease in leases if not is_live(store, lease)]
    awaited = [lease for lease in gone if not is_done(store, local.running, lease)]
    return bool(awaited) or has_failed(store, local.running)


def check_learned(name: str, state: State) -> None:
    """I2: an agent that knows its lease or generation to be gone is stopping its workers."""
    if not state.local.running or state.local.stopping or not state.alive:
        return
    now = state.view.round if state.view else None
    if not state.local.lease or now is None or now.generation != state.local.running:
        raise Violation(f"I2: {name} goes on with generation {state.local.running}")


def check_listing(state: State, write: Write, now: float) -> None:
    """I13: an agent whose own key was gone does not judge others by theirs too soon."""
    if state.life is Life.UNLISTED:
        raise Violation("I13: an agent writes without its key")
    judges = isinstance(write.what, Claim | TakeOver) and " is lost" in write.what.reason
    if judges and now < state.listing_until:
        raise Violation(f"I13: too soon: {write.what}")


def check_relisted(name: str, state: State, store: Store) -> None:
    """I13: a key is put back beside the world that its agent knows, and no other."""
    known, now = state.view.round if state.view else None, round_of(store)
    if not known or not now or (now.generation, now.phase) != (known.generation, Phase.FINAL):
        raise Violation(f"I13: {name} is listed again in another world")


def check_again(before: State, actions: Sequence[Action]) -> None:
    """I1: no agent starts a generation once more, or an older one, whatever etcd has lost."""
    for action in actions:
        if isinstance(action, StartWorkers) and action.round.generation <= before.local.ran:
            raise Violation(f"I1: generation {action.round.generation} after {before.local.ran}")


def check_order(name: str, state: State) -> None:
    """I12: who has seen that it is to go runs no workers but those that are stopping."""
    local, view = state.local, state.view
    if view is None or not local.running or local.stopping or not state.alive:
        return
    if is_told(view, name, local) and not view.outcome:
        raise Violation(f"I12: {name} goes on with generation {local.running}")


def check_size(state: State, limits: Limits) -> None:
    """I4: who coordinates a world of a number that is not wanted has tried to end it."""
    view, local = state.view, state.local
    now = view.round if view else None
    if view is None or now is None or now.phase is not Phase.FINAL or view.outcome:
        return
    leads = now.coordinator == local.lease and view.coverage == Everything()
    done = any(report.done for report in view.reports)
    busy = local.leaving or local.finished or state.pending or state.tried[:1] == ("Claim",)
    if not leads or done or busy:
        return
    if now.nodes not in sizes(asked(view.wanted, limits)):
        raise Violation(f"I4: a world of {now.nodes} goes on, which nobody wants")


def is_told(view: View, name: str, local: Local) -> bool:
    """Whether people want that this node goes."""
    asked = view.wanted or Requests()
    return bool(asked.stop and asked.stop.run == local.run) or name in {
        d.node for d in asked.drains
    }


def check_cut_off(name: str, state: State, now: float, limits: Limits) -> None:
    """I11: nobody is left training when the lease of a node that etcd does not answer may end."""
    local, since = state.local, state.silent_since
    if limits.cut_off is None or since is None or not local.running:
        return
    if now >= since + CUT_OFF * limits.cut_off:
        raise Violation(f"I11: {name} trains on in generation {local.running}")


def check_start(
    name: str, local: Local, acked: int, workers: int, start: StartWorkers, store: Store
) -> None:
    """I2, I3, I8: when workers are started."""
    begins, part = start.round, start.part
    if workers:
        raise Violation(f"I3: {name} starts {begins.generation} beside {workers}")
    if acked != begins.generation or part.lease != local.lease:
        raise Violation(f"I2: {name} starts {begins.generation} without its ack")
    if begins.phase is not Phase.FINAL or begins.master is None:
        raise Violation(f"I8: {name} starts on a round that is not final")
    if store.restored:
        return  # it may not know that yet
    generation, world = store.final
    if begins.generation > generation:
        raise Violation(f"I8: {name} starts on a world that never was")
    if begins.generation == generation and (_unled(begins), part) not in world:
        raise Violation(f"I8: {name} starts on a world of its own")


def checked(name: str, lease: int, txn: Txn, before: Store, after: Store, limits: Limits) -> Store:
    """I1, I4, I5, I7, I8: after one write; the store with what is to be remembered."""
    if any(isinstance(op, Put) and op.key == KEYS.round for op in txn.then):
        _check_fence(name, lease, txn)
    _check_reports(name, txn, before)
    was, now = round_of(before), round_of(after)
    value = after.value(KEYS.ledger)
    top = decode(Ledger, value).generation if value else before.top
    if top < before.top:
        raise Violation(f"I1: generation {before.top} is followed by {top}")
    after = after._replace(top=top)
    if now is None or now == was:
        return after
    if now.phase is Phase.SETUP:
        if now.generation <= before.top:
            raise Violation(f"I1: generation {now.generation} was handed out twice")
        after = after._replace(lost=None, back=())
        _check_end(was, now, before, limits)
    if now.phase is Phase.FINAL and was and was.phase is Phase.FINAL:
        _check_take_over(lease, was, now, before)
    elif now.phase is Phase.FINAL:
        if now.generation <= before.final[0]:
            raise Violation(f"I1: generation {now.generation} has two final worlds")
        participants = world_of(after)
        allowed = {*sizes(limits), *sizes(asked(wanted_of(before), limits))}
        _check_world(now, participants, allowed)
        world = tuple((_unled(now), p) for p in participants)
        after = after._replace(final=(now.generation, world))
    if now.phase is Phase.CLOSED:
        _check_close(before, after, limits)
    return after


def check_alone(name: str, lease: int, before: Store) -> None:
    """I7: only the last member stops the job by leaving."""
    own = KEYS.member(lease)
    others = [k for k, *_ in before.kvs if k.startswith(KEYS.members) and k != own]
    if others:
        raise Violation(f"I7: {name} stops the job with {others} alive")


def check_budget(state: State, write: Write, limits: Limits) -> None:
    """I7: nobody gives up over failures that a long time of training has made good, nor over
    nodes that could not come. An error that came twice before any step is not tried again.
    """
    if isinstance(write.what, Freeze) and state.view:
        now, before = write.what.round, state.view.ledger
        counts = now.restarts > before.restarts
        if counts and _early_errors(now)[-2:] == [EARLY, EARLY]:
            raise Violation("I7: an error that came twice is tried again")
    if not isinstance(write.what, Close):
        return
    if write.what.outcome.exit_code == TOO_FEW and state.silent_since is not None:
        raise Violation("I7: the job is closed for want of nodes, which could not come")
    if write.what.outcome.failure is None:
        return
    assert state.view
    if _can_be_spared(state.view, state.local, write.what.outcome.failure, limits):
        raise Violation("I7: the job is closed over a suspect that it can do without")
    if write.what.outcome.exit_code == IN_VAIN:
        return
    ledger, last = state.view.ledger, state.lasted
    seen = last.seconds if last.generation == ledger.final else 0.0
    counted = [f.at for f in ledger.failures if f.kind is not FailureKind.GONE and not f.free]
    if ledger.trained + seen - max(counted, default=0.0) >= limits.restart_window:
        raise Violation("I7: the job is closed though its failures are forgiven")


def _can_be_spared(view: View, local: Local, failure: Failure, limits: Limits) -> bool:
    """Whether enough others are ready that are no suspects, and the failed node is one."""
    failed = {s.node: s.failed for s in failure_policies.suspects(view.ledger, limits).values()}
    if failure.uptime >= limits.min_uptime or not limits.suspect_after:
        return False
    failed[failure.node] = failed.get(failure.node, 0) + 1
    ready = {ack.lease for ack in view.acks} | {local.lease}
    known = {node for node, times in failed.items() if times >= limits.suspect_after}
    others = [m for m in view.members if m.lease in ready and m.node not in known]
    return failure.node in known and len(others) >= limits.min_nodes


def _early_errors(past: Past) -> list[str]:
    """The errors of workers, oldest first; "" for one after some step, or that says nothing."""
    failures = [f for f in past.failures if f.kind is not FailureKind.GONE]
    return [f.what if f.early else "" for f in failures]


def check_format(before: State, event: Event, actions: Sequence[Action]) -> None:
    """I9: who has seen a newer format neither writes nor starts workers."""
    view = event.view if isinstance(event, ViewChanged) else before.view
    if view and view.newer and any(isinstance(a, Write | StartWorkers) for a in actions):
        raise Violation("I9: an agent writes into a job of a newer format")


def check_leavers(state: State, write: Write, now: float, limits: Limits) -> None:
    """I10: no round is frozen beside a member of the last world that is leaving and still there."""
    if not isinstance(write.what, Freeze) or now - state.phase_since >= limits.leave_deadline:
        return
    assert state.view
    last = {p.lease for p in state.view.world}
    if leavers := [m.node for m in state.view.members if m.leaving and m.lease in last]:
        raise Violation(f"I10: a round is frozen while {leavers} may still save")


def _check_fence(name: str, lease: int, txn: Txn) -> None:
    targets = {(c.key, c.target) for c in txn.compare}
    own = any(k.startswith(KEYS.members) and t == "create" for k, t in targets)
    if (KEYS.round, "mod") not in targets or not own:
        raise Violation(f"I5: {name} moves the round without a fence")
    if not lease:
        raise Violation(f"I5: {name} moves the round without a lease")


def _check_reports(name: str, txn: Txn, before: Store) -> None:
    """I7: whose failure ended a world must not count as a victim of that end."""
    if before.restored:
        return  # it can't know which world stands
    value = before.value(KEYS.ledger)
    standing = KEYS.reports(decode(Ledger, value).generation if value else 0)
    puts = [op for op in txn.then if isinstance(op, Put) and op.key.startswith(standing)]
    for put in puts:
        if decode(Report, put.value, lease=1, revision=0).victim:
            raise Violation(f"I7: {name} is nobody's victim, its world stands")


@cache
def sizes(limits: Limits) -> tuple[int, ...]:
    """All numbers of nodes that a world may have, from small to large."""
    some = range(limits.min_nodes, limits.max_nodes + 1)
    return tuple(limits.sizes) or tuple(n for n in some if n % limits.multiple_of == 0)


def check_joins(state: State, write: Write, limits: Limits) -> None:
    """I4: whoever ends a whole world for newcomers sees enough of them for a larger one."""
    was = state.view.round if state.view else None
    if not isinstance(write.what, Claim) or not was or was.phase is not Phase.FINAL:
        return
    assert state.view
    live = {m.lease for m in state.view.members if not m.leaving}
    world = {p.lease for p in state.view.world}
    allowed = sizes(asked(state.view.wanted, limits))
    failed = any(r.failure for r in state.view.reports) or state.view.unread
    if failed or state.view.coverage != Everything() or not world <= live:
        return
    larger = any(len(world) < size <= len(live) for size in allowed)
    if not larger and len(world) in allowed:
        raise Violation(f"I4: a world of {len(world)} is ended, though {len(live)} make no larger")
    if state.local.finished:
        raise Violation("I4: a world is ended for newcomers whose training is over")


def _check_world(final: Round, world: Sequence[Participant], allowed: set[int]) -> None:
    leases = [p.lease for p in world]
    if len(leases) not in allowed or len(set(leases)) != len(leases):
        raise Violation(f"I4: a world of {leases} where {allowed} are allowed")
    if final.master is None:
        raise Violation("I8: a final round without its master endpoint")
    if [p.group_rank for p in world] != list(range(final.nodes)):
        raise Violation(f"I8: {world} is no world of {final.nodes} nodes")


def _check_take_over(lease: int, was: Round, now: Round, before: Store) -> None:
    """I1: of a final round only the coordinator changes, when the one before is gone."""
    if _unled(now) != _unled(was):
        raise Violation(f"I1: generation {now.generation} has two final worlds")
    if now.coordinator != lease or has_stayed(before, was.coordinator):
        raise Violation(f"I1: generation {now.generation} is led by two")


def _check_end(was: Round | None, now: Round, before: Store, limits: Limits) -> None:
    """I7: a world ends by a failure, or without a node that is not done, or for newcomers, or for
    another number of nodes.
    """
    if was is None or was.phase is not Phase.FINAL or before.restored:
        return
    wanted = asked(wanted_of(before), limits)
    if now.planned and any(was.nodes < x.max_nodes for x in (limits, wanted)):
        return  # also one that was decided before others were wanted
    if now.planned and was.nodes not in sizes(wanted):
        return
    missing = [p.lease for p in world_of(before) if not has_stayed(before, p.lease)]
    done = {lease for lease in missing if is_done(before, was.generation, lease)}
    needed = [lease for lease in missing if lease in before.back or lease not in done]
    if not needed and not has_failed(before, was.generation):
        raise Violation(f"I7: the world of generation {was.generation} is ended for nothing")


def _check_close(before: Store, after: Store, limits: Limits) -> None:
    """I7: a job is closed by all being done or by its budget, never by one node's end."""
    value, ledger_value = after.value(KEYS.outcome), before.value(KEYS.ledger)
    assert value and ledger_value
    outcome, ledger = decode(Outcome, value), decode(Ledger, ledger_value)
    leases = [p.lease for p in world_of(before)]
    done = leases and all(is_done(before, ledger.final, lease) for lease in leases)
    if outcome.state == "succeeded" and not done:
        raise Violation("I7: the job is closed though not every participant is done")
    failure = outcome.failure
    if failure and ledger.restarts < limits.max_restarts:
        came_before = failure.message == EARLY and _early_errors(ledger)[-1:] == [EARLY]
        at_a_place = [f for f in ledger.failures if f.place]
        reached = len(at_a_place) >= limits.stop_after_no_progress
        in_vain = outcome.exit_code == IN_VAIN and reached
        if not (came_before or in_vain):
            raise Violation("I7: the job is closed though restarts are left")
