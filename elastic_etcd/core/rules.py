"""Every transition of the rendezvous. All that decides who trains lives in this file.

`decide` answers what one agent does next, from what it sees (a view), what it is (local), what
the user asked for (limits) and how long it has waited (elapsed, on its own clock). It is
total over stale, partial and empty views: whatever it answers, a write that no longer fits
is refused by etcd, because every write carries the revisions on which it was decided.

    setup ──open──> joinable ──freeze──> frozen ──finalise──> final ──> closed
      ^                 │                   │                 │   ^ │
      └──── claim of the next generation by any live member ──┘   └─┘ take over by any live member

A claim ends the world that trains. So in final, where the coordinator is gone, another member does
not claim but takes over the lead of the same round: if that one was done, nothing else is wrong.

Invariants, checked after every step by tests/model:

I1 the generation never decreases; one generation has at most one final world, of which only
   the coordinator changes, when the one before is leaving, or its key is or was gone; no agent
   starts one twice, or an older one, whatever etcd has lost
I2 a worker of generation g starts only under the lease with which its agent acked g, and is
   stopped as soon as the agent learns that this generation is gone, or the lease and its agent
   sees no final round of g
I3 no two generations have live workers of the same node at the same time
I4 a final world has an allowed number of participants, each incarnation once; newcomers end
   none but for a larger one, and none whose training the coordinator knows to be over; one that
   trains on is of a number that its coordinator knows to be wanted
I5 every write that moves the round is one Txn fenced by the round's mod revision and the
   writer's create revision
I6 from every state with min live members, no more crashes and a reachable etcd, a final
   round (or the end of the job) is reached
I7 leaving, failing or finishing of one node never closes the job for the others, nor does
   one that is done end their world
I8 all participants of a final round hold the same generation, ranks, world size and master
I9 an agent that has seen a run in a newer format version writes nothing and starts no workers
I10 no round is frozen while a leaving participant of the last world has its member key, unless
   its deadline is over: it may still write its checkpoint
I11 with `cut_off`, an agent that could not renew its lease for two thirds of it stops its workers
I12 an agent that has seen that its node is drained, or that the run is to stop, stops its workers
   and starts none; a drained node does not join
I13 an agent whose own key was gone takes nobody for lost before it has put the key back, and the
   others have had the time for it; it puts the key back only if no other world has been begun
"""

import math
from enum import Enum
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from elastic_etcd.core import failure_policies, hangs, requests
from elastic_etcd.core.peers import blames_peers, is_left, was_left
from elastic_etcd.core.ranks import assign, choose, ranked
from elastic_etcd.core.schema import (
    Cause,
    Failure,
    Ledger,
    Limits,
    Member,
    Outcome,
    Participant,
    Past,
    Phase,
    Round,
    hexed,
)
from elastic_etcd.core.view import Everything, Narrow, View
from elastic_etcd.core.words import NAMED, counted, listed
from elastic_etcd.times import ACK_PATIENCE, LEAD_TURN, STOP_PATIENCE

JOIN_SETTLE = 1.0  # a change costs nothing where workers recover in process
FIRST_RANKS = 8  # who tries at once to take a lost coordinator's place


class Local(Struct, frozen=True):
    """An agent, as far as it knows itself."""

    run: str
    lease: int = 0  # while it is no member
    created: int = 0  # create revision of the member key: the fence of every write
    spec: int = 0  # create revision of the spec: the fence against another run
    acked: int = 0  # generation acked under this lease
    running: int = 0  # generation whose workers are alive here
    ran: int = 0  # last generation whose workers were started
    reported: int = 0  # generation whose end was reported
    stopping: bool = False
    leaving: bool = False
    elastic: bool = False  # all of its workers recover in process
    patient: bool = False  # they are stopping for newcomers: their step may last
    finished: bool = False  # some of them have left their worlds: their training is over
    left: str = ""  # one of them, and how, as it was before they were stopped
    dead: tuple[int, ...] = ()  # leases of members whose agents it has proved to be gone; for words


class Elapsed(Struct, frozen=True):
    """Seconds on this agent's monotonic clock; no clock of another machine is ever compared.

    `phase`, `join` and `vacant` stand still while etcd is silent: nobody could come.
    """

    phase: float  # since the round was first seen in its phase
    join: float  # since a member was last seen to arrive
    ran: float = 0.0  # how long the last final world was seen to last
    vacant: float = math.inf  # since nobody was seen to coordinate
    listing: float = 0.0  # that are left to others to put back their keys, as this agent has


class Verdict(Enum):
    """How a run of the job ends: its outcome's state, and the exit code of every agent."""

    SUCCEEDED = ("succeeded", 0)
    FAILED = ("failed", 1)
    WRONG_USAGE = ("failed", 2)
    BUDGET_USED_UP = ("failed", 3)
    TOO_FEW_NODES = ("failed", 4)
    NO_PROGRESS = ("failed", 9)
    STOPPED = ("stopped", 0)

    def __init__(self, state: str, exit_code: int) -> None:
        self.state = state
        self.exit_code = exit_code

    def outcome(self, run: str, generation: int, reason: str, failure: Failure | None) -> Outcome:
        """The outcome that says so; `failure` is the root cause."""
        return Outcome(self.state, reason, run, generation, self.exit_code, failure)


# --- decisions ----------------------------------------------------------------------------


class _Decided(Struct, frozen=True, tag=True):
    """A thing to do, and why; the agent logs the reason when it changes."""

    reason: str


class Claim(_Decided, frozen=True):
    """Begin the next generation, as its coordinator."""

    round: Round
    ledger: Ledger


class TakeOver(_Decided, frozen=True):
    """Lead the final round in the place of its coordinator, which is gone or leaving."""

    round: Round


class Open(_Decided, frozen=True):
    """Let the members join the round."""

    round: Round


class Freeze(_Decided, frozen=True):
    """Let nobody else join; `without` names nodes that are no longer waited for."""

    round: Round
    without: tuple[str, ...] = ()


class Ack(_Decided, frozen=True):
    """Say that this node is ready for `generation`."""

    generation: int


class Finalise(_Decided, frozen=True):
    """Begin the world. The round's verdicts count from here on, so that nothing counts twice."""

    round: Round
    ledger: Ledger
    world: tuple[Participant, ...]


class Run(_Decided, frozen=True):
    """Start the workers of this final round, in which the agent is this participant."""

    round: Round
    part: Participant


class Stop(_Decided, frozen=True):
    """Stop the workers; `planned` is whether a join or a leave is the cause.

    `patient`: they stop by themselves, when their step is over.
    """

    planned: bool
    patient: bool = False


class Wait(_Decided, frozen=True):
    """Do nothing; after `until` seconds decide again, also without any news."""

    until: float | None = None


class Close(_Decided, frozen=True):
    """End the run for everybody."""

    round: Round
    outcome: Outcome


class Leave(_Decided, frozen=True):
    """End this agent: the run is over."""


Decision: TypeAlias = (
    Claim | TakeOver | Open | Freeze | Ack | Finalise | Run | Stop | Wait | Close | Leave
)


# --- what all agents decide ---------------------------------------------------------------


def decide(view: View, local: Local, limits: Limits, elapsed: Elapsed) -> Decision:
    """Say what the member `local` does next. Pure; raises nothing for any view."""
    now = view.round
    over = ended(view, local)
    if over:
        return Leave(over)
    if local.running and (now is None or now.generation != local.running):
        # Once others train without it, its step is not waited for any more.
        patient = now is not None and now.joins and now.phase is not Phase.FINAL and local.elastic
        if not local.stopping or (local.patient and not patient):
            why = now.reason if now else "its coordinator is gone"
            planned = now is not None and now.planned
            return Stop(f"generation {local.running} is over: {why}", planned, patient)
    if local.leaving:
        return Wait("leaving")
    if now is None or vacant(view):
        left = _turn(view, local) - elapsed.vacant
        if left > 0:
            return Wait("others try to coordinate first", left)
        if now and view.coordinator is None and elapsed.listing > 0:
            return Wait(_may_be_back(now.node or "the coordinator"), elapsed.listing)
        return _replace_coordinator(view, local)
    if not _watched(view, now):
        return Wait(awaited(view, now, local, limits))
    mine = _own_part(view, now, local)
    if mine:
        return mine
    if now.coordinator != local.lease:
        return Wait(awaited(view, now, local, limits))
    if view.coverage != Everything():
        return Wait("reading all of the job")
    return _lead(view, now, local, limits, elapsed)


def ended(view: View, local: Local) -> str:
    """Why there is nothing left to do in this run of the job, "" while there is."""
    if view.outcome and view.outcome.run == local.run:
        return f"{view.outcome.state}: {view.outcome.reason}"
    if view.round and view.round.run != local.run:
        return "another run of this job has begun"
    return view.round.reason if view.round and view.round.phase is Phase.CLOSED else ""


def vanished(view: View, local: Local) -> bool:
    """Whether the own member key is gone, by hand or with its lease.

    Without it every fence of this agent fails, so it has to join again; likewise without spec.
    """
    own = any(m.lease == local.lease for m in view.members)
    no_spec = view.coverage == Everything() and view.spec is None
    return not ended(view, local) and (no_spec or not own)


def vacant(view: View) -> bool:
    """Whether nobody coordinates: there is no round, or its coordinator is gone or leaving."""
    if view.round is None:
        return True
    gone = view.coordinator is None or view.coordinator.leaving
    return gone and _watched(view, view.round)


def _watched(view: View, now: Round) -> bool:
    """Whether the view has the coordinator's key, if that is there."""
    if isinstance(view.coverage, Narrow):
        return view.coverage.coordinator == now.coordinator
    return True


def may_still_save(view: View, generation: int) -> bool:
    """Whether no world after `generation`'s has begun, or can begin beside one who leaves it."""
    now = view.round
    begins = now is not None and now.phase not in (Phase.SETUP, Phase.JOINABLE)
    return view.ledger.final == generation and not begins


def _known(view: View, now: Round) -> bool:
    """Whether the world of a final round is in the view: a page may come after its round."""
    if view.coverage == Everything():
        return len(view.world) == now.nodes
    return view.page is not None and view.page.generation == now.generation


def awaited(view: View, now: Round, local: Local, limits: Limits) -> str:
    """The thing for which a member waits that has nothing to do in this round."""
    if now.phase is Phase.FINAL and _known(view, now) and not view.part(local.lease):
        own, larger = _own_name(view, local), limits.larger(now.nodes)
        why = failure_policies.why_left_out(now, own, limits)
        if why and larger:
            return f"spare, until it is needed: {why}"
        if larger == now.nodes + 1:
            often = limits.join_interval
            rare = f", once in {often:g} s at most (--join-interval)" if often else ""
            return f"waiting to be taken in{rare}"
        more = f"the next size is {larger}, " if larger else ""
        return f"spare: {_train(now.nodes)}, {more}this one takes a place that gets free"
    if now.phase is Phase.FINAL:
        return f"generation {now.generation} trains: {now.reason}"
    needs = f"once enough nodes are ready, at least {limits.min_nodes}"
    lead = f"; {now.node} says who is not" if now.node else ""
    return f"generation {now.generation} begins {needs}{lead}: {now.reason}"


def _own_part(view: View, now: Round, local: Local) -> Ack | Run | None:
    """The part of every member in a round, coordinator or not: to ack, and to run."""
    generation, final = now.generation, now.phase is Phase.FINAL
    if local.running or (final and not _known(view, now)):
        return None
    part = view.part(local.lease) if final else None
    if part:
        run = Run(f"generation {generation}: {now.reason}", now, part)
        return run if local.ran != generation else None
    if (final or now.phase is Phase.JOINABLE) and local.acked != generation:
        return Ack(f"ready for generation {generation}", generation)
    return None


def _turn(view: View, local: Local) -> float:
    """Seconds before this member tries to take a coordinator's place: none for the first ranks.

    Etcd lets one of all that try through, and each of the others costs it a refused Txn. A member
    that is not in the last world comes after those that are, and know how long it has trained.
    """
    part, nodes = view.part(local.lease), view.ledger.nodes
    turns, first = 0, FIRST_RANKS
    after = max(nodes, FIRST_RANKS) if nodes > 1 else 0  # of one node there is no other
    own = part.group_rank if part else after
    while own >= first:
        turns, first = turns + 1, first * 4
    return turns * LEAD_TURN


def _replace_coordinator(view: View, local: Local) -> Claim | TakeOver:
    """Lead in a coordinator's place. The world that trains goes on if that one was done.

    Its report says whether it was, and only a coordinator reads it: the new one decides then. A
    coordinator that has marked itself as leaving has workers to stop, so that it is not done.
    """
    now = view.round
    if now is None:
        if view.ledger.final > 0:
            return _claim(view, local, "no round is under way", Cause.FAILURE)
        return _claim(view, local, "the job begins", Cause.BEGIN)
    if view.coordinator:
        return _claim(view, local, _is_leaving(view, view.coordinator.node), Cause.LEAVE)
    why = _are_lost(local, {now.coordinator: now.node or "the coordinator"})
    if now.phase is not Phase.FINAL:
        return _claim(view, local, why, Cause.LOST)
    lead = replace(now, coordinator=local.lease, node=_own_name(view, local))
    return TakeOver(f"lead generation {now.generation} from here on: {why}", lead)


def _own_name(view: View, local: Local) -> str:
    return next((m.node for m in view.members if m.lease == local.lease), "")


def _claim(
    view: View,
    local: Local,
    reason: str,
    cause: Cause,
    *,
    joins: bool = False,
) -> Claim:
    """Begin the next generation; etcd lets exactly one claim of it through."""
    # Not only what the keys say: somebody may have spoilt both.
    known = view.round.generation if view.round else 0
    last = max(view.ledger.generation, local.acked, local.ran, known)
    own = _own_name(view, local)
    now = Round(
        last + 1, Phase.SETUP, local.lease, reason, local.run, own, cause=cause, joins=joins
    )
    ledger = replace(view.ledger, generation=now.generation)
    return Claim(f"claim generation {now.generation}: {reason}", now, ledger)


# --- what the coordinator decides ---------------------------------------------------------


def _lead(view: View, now: Round, local: Local, limits: Limits, elapsed: Elapsed) -> Decision:
    match now.phase:
        case Phase.SETUP:
            return _lead_setup(view, now, limits)
        case Phase.JOINABLE:
            return _lead_joinable(view, now, local, limits, elapsed)
        case Phase.FROZEN:
            return _lead_frozen(view, now, local, limits)
        case Phase.FINAL | Phase.CLOSED:  # who sees it closed has left
            return _lead_final(view, now, local, limits, elapsed)


def _lead_setup(view: View, now: Round, limits: Limits) -> Decision:
    """Settle the past: it may be that the last world was finished."""
    done = _done(view)
    if view.world and done.issuperset(_leases(view)):
        return _succeeded(view, now, limits)
    return Open(now.reason, replace(now, phase=Phase.JOINABLE))


def _lead_joinable(
    view: View, now: Round, local: Local, limits: Limits, elapsed: Elapsed
) -> Decision:
    """Wait for exactly the live members; only the first formation waits the settle time.

    A re-formation knows by leases who is alive, and a dead node's lease ends by itself. A live
    one that is not ready in time is left out: one stuck agent must not block all others.
    """
    live = _live(view)
    if spoilt := _unread(view, live):
        return _claim(view, local, f"the ack of {spoilt} can't be read", Cause.FAILURE)
    own = {local.lease} if local.acked == now.generation else set()
    acked = {ack.lease for ack in view.acks} | own
    ready = [m for m in live if m.lease in acked]
    missing = [m for m in live if m.lease not in acked]
    if now.joins and (patient := _await_steps(view, now, local, limits, ready, missing)):
        return patient
    if len(ready) < limits.min_nodes:
        short = f"{_ready(ready, missing)}; at least {limits.min_nodes} must be"
        whole = f"{limits.join_timeout:g} s"
        if elapsed.phase >= limits.join_timeout:
            late = f"{short}, and are not after {whole}: start more, or raise --join-timeout"
            return _close(now, Verdict.TOO_FEW_NODES, late)
        return Wait(
            f"{short}, within {whole} (--join-timeout)", limits.join_timeout - elapsed.phase
        )
    if leavers := _await_leavers(view, limits, elapsed):
        return leavers
    last = frozenset(_leases(view))
    if _all_new(view):
        full = len(ready) >= limits.max_nodes
        # Who is there but not ready yet is waited for as long as who is not there yet.
        since = elapsed.join if len(ready) == len(live) else min(elapsed.join, elapsed.phase)
        # Nodes that come one after the other don't put it off for longer than --join-timeout.
        longest = max(limits.settle, limits.join_timeout)
        left = min(limits.settle - since, longest - elapsed.phase)
        if not full and left > 0:
            more = f"up to {limits.max_nodes} may come within {limits.settle:g} s (--settle)"
            return Wait(f"{_are(len(ready))} ready; {more}", left)
    else:
        # A spare, which has nothing to stop, must not push out a slower survivor.
        full = limits.largest(len(ready)) == limits.largest(len(live))
        awaited = [m for m in missing if not full or m.lease in last]
        waited = min(elapsed.phase, elapsed.join) if now.joins else elapsed.phase
        left = limits.patience - waited
        if all(m.lease not in last for m in awaited):
            patience = max(limits.settle, ACK_PATIENCE)
            left = min(left, patience - min(elapsed.phase, elapsed.join))
        waits = _ready(ready, missing)
        if awaited and not own and now.joins:  # nobody else can make the coordinator hurry
            late = f"{_names(awaited)} did not stop within {limits.patience:g} s of the first"
            return Wait(waits, left) if left > 0 else _claim(view, local, late, Cause.JOIN)
        if not own:  # who coordinates takes part
            return Wait(waits)
        if awaited and left > 0:
            return Wait(waits, left)
    return _freeze(view, now, local, ready, limits, elapsed)


def _await_steps(
    view: View,
    now: Round,
    local: Local,
    limits: Limits,
    ready: list[Member],
    missing: list[Member],
) -> Claim | Close | Wait | None:
    """Let newcomers wait until the world that they end has come to the end of its step.

    As long as that is whole: where one of its nodes goes, or a worker fails, the others may never
    come out of the step, so that another claim, which is not for newcomers, makes them hurry. A
    node that ends its training meanwhile is done. When the first has stopped the others follow.
    """
    last, done = frozenset(_leases(view)), _done(view)
    if last and done.issuperset(last):
        return _succeeded(view, now, limits)
    awaited = [m for m in missing if m.lease in last]
    if not awaited:
        return None
    if leavers := [m for m in _leavers(view) if m.lease not in done]:
        return _claim(view, local, _is_leaving(view, leavers[0].node), Cause.LEAVE)
    if lost := _lost(view):
        return _claim(view, local, _are_lost(local, lost), Cause.LOST)
    if failed := next((r.failure for r in view.reports if r.failure), None):
        return _claim(view, local, str(failed), Cause.FAILURE)
    if len(ready) >= limits.min_nodes and any(m.lease in last - done for m in ready):
        return None
    return Wait(f"{_names(awaited)} {'is' if len(awaited) == 1 else 'are'} in a step still")


def _await_leavers(view: View, limits: Limits, elapsed: Elapsed) -> Wait | None:
    """Begin no world beside a node of the last one that may still write its checkpoint.

    Its key goes when nothing runs there any more. It may need its whole deadline, and has it.
    """
    leavers = _leavers(view)
    if not leavers:
        return None
    longest = max(requests.leave_deadline(view, m, limits) for m in leavers)
    left = longest + STOP_PATIENCE - elapsed.phase
    if left <= 0:
        return None
    are = "is" if len(leavers) == 1 else "are"
    return Wait(f"{_names(leavers)} {are} leaving and may still save (--leave-deadline)", left)


def _freeze(
    view: View,
    now: Round,
    local: Local,
    ready: list[Member],
    limits: Limits,
    elapsed: Elapsed,
) -> Decision:
    """Count what ended the last world, then freeze the round or close the job.

    Which of four things has ended it decides what it costs, and the first that fits is it:

        all of its nodes are new ─> nothing is remembered: a world of newcomers has a fresh budget
        a node of it is gone ─────> nothing: failures of the others are its victims (pytorch#91943)
        no worker has failed ─────> nothing: it was ended for newcomers, or what etcd had was wrong
        a worker has failed ──────> its node is left out ─> nothing, as long as others are enough
                                    another start is no use, or all are used up ─> the job ends
                                    else ─> a restart, after a while if workers fail at once

    That a node is gone can be seen only here, when all that live are back, because a dying node's
    peers fail before it is missed. Nothing counts before a world begins with it: the round has it
    until then, and if this coordinator is lost the next one counts the same from the same ledger
    and reports, so that no failure counts twice however often a formation begins anew.
    """
    left = left_here(view, local) or next((ack.left for ack in view.acks if ack.left), "")
    culprit, lost = _culprit(view, left), _lost(view)
    past = failure_policies.after(view.ledger, elapsed.ran)
    match _all_new(view), bool(lost), culprit:
        case True, _, _:
            past = replace(past, restarts=0, trained=0.0, failures=())
        case _, True, _:
            gone = [node for node in lost.values() if not requests.drained(view, node)]
            past = failure_policies.with_gone(past, gone, limits)
            now = _ended_by_lost(now, local, lost) if culprit else now
        case _, _, Failure():
            cost = _count(view, now, culprit, past, ready, limits)
            if isinstance(cost, Close):
                return cost
            now, past = cost
            backoff = failure_policies.backoff(past)
            if elapsed.phase < backoff:
                times = failure_policies.rapid_failures(past)
                why = f"workers failed {times} times right after their start"
                return Wait(why, backoff - elapsed.phase)
    fit, _ = _fit(view, ready, past, limits)
    frozen = replace(
        now,
        phase=Phase.FROZEN,
        restarts=past.restarts,
        trained=past.trained,
        failures=past.failures,
    )
    return _freeze_with(fit, frozen, ready, view, limits, elapsed)


def _ended_by_lost(now: Round, local: Local, lost: dict[int, str]) -> Round:
    """The round of which a worker's failure was the reason, before these nodes were missed."""
    if now.reason.startswith(tuple(f"{node} is leaving" for node in lost.values())):
        return replace(now, cause=Cause.LEAVE)
    return replace(now, reason=_are_lost(local, lost), cause=Cause.LOST)


def _count(
    view: View, now: Round, culprit: Failure, past: Past, ready: list[Member], limits: Limits
) -> tuple[Round, Past] | Close:
    """Say what a worker's failure costs: nothing, a restart or the job."""
    used = failure_policies.restarts_used(past, limits)
    noted = failure_policies.with_failure(past, culprit, limits)
    fit, doubt = _fit(view, ready, noted, limits)
    if culprit.node in doubt.difference(m.node for m in fit):
        why = failure_policies.why_left_out(noted, culprit.node, limits)
        free = failure_policies.with_failure(past, culprit, limits, free=True)
        return replace(now, reason=f"{culprit}; {why}", cause=Cause.FAILURE), free
    if why := failure_policies.final_error(noted):
        wrong = failure_policies.is_usage_error(noted.failures[-1])
        verdict = Verdict.WRONG_USAGE if wrong else Verdict.FAILED
        return _close(now, verdict, f"{culprit}; {why}", culprit)
    if why := failure_policies.no_progress(noted, limits):
        return _close(now, Verdict.NO_PROGRESS, f"{culprit}; {why}", culprit)
    if used >= limits.max_restarts:
        return _give_up(now, culprit, limits, failure_policies.repeated(noted))
    if is_left(culprit):  # which may be known since the claim only
        now = replace(now, reason=str(culprit), cause=Cause.FAILURE)
    return now, replace(noted, restarts=used + 1)


def _freeze_with(
    fit: list[Member],
    frozen: Round,
    ready: list[Member],
    view: View,
    limits: Limits,
    elapsed: Elapsed,
) -> Freeze:
    """Freeze, and name those that are not waited for, or are left out."""
    late, doubted = _but(_live(view), ready), _but(ready, fit)
    leavers = _leavers(view)
    after = f"after {elapsed.phase:.0f} s"
    told = counted(limits.largest(len(fit)), "node takes part", "nodes take part")
    if late:
        told += f", without {_names(late)}, not ready {after}"
    if doubted:
        told += f", without {_names(doubted)}, left out (--suspect-after)"
    if leavers:
        told += f", beside {_names(leavers)}, still leaving {after} (--leave-deadline)"
    named = (*late, *doubted, *leavers)[:NAMED]
    return Freeze(told, frozen, tuple(m.node for m in named))


def _but(members: list[Member], those: list[Member]) -> list[Member]:
    """All members but those."""
    leases = {m.lease for m in those}
    return [m for m in members if m.lease not in leases]


def _fit(
    view: View, ready: list[Member], past: Past, limits: Limits
) -> tuple[list[Member], frozenset[str]]:
    """Those of `ready` that take part, and the names of the nodes that had better not."""
    doubt = failure_policies.doubted(past, limits)
    return failure_policies.trusted(ready, doubt, _leases(view), limits.min_nodes), doubt


def _all_new(view: View) -> bool:
    """Whether nobody of the last world is there."""
    return {m.lease for m in _live(view)}.isdisjoint(_leases(view))


def _leases(view: View) -> tuple[int, ...]:
    """The leases of the last world, in rank order."""
    return tuple(p.lease for p in view.world)


def _lost(view: View) -> dict[int, str]:
    """The nodes of the last world that are gone, but for those that had finished; by lease."""
    back = {m.lease for m in _live(view)} | _done(view)
    return {p.lease: p.node for p in view.world if p.lease not in back}


def _are_lost(local: Local, lost: dict[int, str]) -> str:
    """`n2 is lost: its lease has ended`, and that it is dead where this agent has proved that."""
    names, proved = " and ".join(lost.values()), all(lease in local.dead for lease in lost)
    if len(lost) == 1:
        return f"{names} is lost: its {'agent is gone' if proved else 'lease has ended'}"
    return f"{names} are lost: their {'agents are gone' if proved else 'leases have ended'}"


def _lead_frozen(view: View, now: Round, local: Local, limits: Limits) -> Decision:
    """All that are ready and still there take part; group rank 0's ack says where its store is."""
    masters = {ack.lease: ack.master for ack in view.acks}
    ready = [m for m in _live(view) if m.lease in masters]
    fit, _ = _fit(view, ready, now, limits)
    last, size = _leases(view), limits.largest(len(fit))
    if not size:
        why = f"only {_are(len(fit))} left of those that were ready"
        return _claim(view, local, why, Cause.FAILURE)
    world = ranked(assign(choose(fit, last, now.coordinator, size), last))
    assert len(world) == size, f"I4: a world of {len(world)}"
    master = masters[world[0].lease]
    if master is None:
        return _claim(view, local, f"the ack of {world[0].node} names no store", Cause.FAILURE)
    final = replace(
        now,
        phase=Phase.FINAL,
        nodes=len(world),
        world_size=world[-1].first_rank + world[-1].nproc,
        master=master,
    )
    ledger = replace(
        view.ledger,
        final=now.generation,
        nodes=len(world),
        restarts=now.restarts,
        trained=now.trained,
        failures=now.failures,
    )
    return Finalise("all participants are ready", final, ledger, world)


def _lead_final(view: View, now: Round, local: Local, limits: Limits, elapsed: Elapsed) -> Decision:
    """Watch over the world that trains; begin the next one when it is no longer right."""
    done = _done(view)
    if len(view.world) != now.nodes:
        return _claim(view, local, "who takes part can't be read", Cause.FAILURE)
    if done.issuperset(_leases(view)):
        return _succeeded(view, now, limits)
    culprit = _culprit(view)
    if culprit:  # beside a node that goes it is taken for that one's victim, see _freeze
        leavers = [m for m in _leavers(view) if m.lease not in done]
        why = _is_leaving(view, leavers[0].node) if leavers else str(culprit)
        return _claim(view, local, why, Cause.FAILURE)
    members, missing = {m.lease: m for m in view.members}, ""
    for p in view.world:
        if p.lease in done:
            continue
        if p.lease not in members and elapsed.listing > 0:
            missing = missing or p.node
        elif p.lease not in members:
            return _claim(view, local, _are_lost(local, {p.lease: p.node}), Cause.LOST)
        elif members[p.lease].leaving:
            return _claim(view, local, _is_leaving(view, p.node), Cause.LEAVE)
    if missing:
        return Wait(_may_be_back(missing), elapsed.listing)
    world = frozenset(_leases(view))
    if spoilt := _unread(view, [m for m in view.members if m.lease in world]):
        return _claim(view, local, f"the report of {spoilt} can't be read", Cause.FAILURE)
    # A world that has begun to finish takes nobody in: it would begin anew.
    other = None if done else _other_size(view, now, local, limits, elapsed)
    return other or Wait(_train(now.nodes))


def _other_size(
    view: View, now: Round, local: Local, limits: Limits, elapsed: Elapsed
) -> Claim | Wait | None:
    """Begin anew a healthy world that is to have another size, or can have a larger one."""
    if limits.largest(now.nodes) != now.nodes and not local.finished:
        why = f"the job is scaled to {limits.nnodes} nodes"
        return _claim(view, local, why, Cause.SCALE, joins=local.elastic)
    world = frozenset(_leases(view))
    ready = {ack.lease for ack in view.acks}  # one that hangs must not end a world
    waiting = [m for m in _live(view) if m.lease not in world and m.lease in ready]
    there, size = now.nodes + len(waiting), limits.larger(now.nodes)
    if not waiting or not size:
        return None
    if local.finished:
        finish = counted(now.nodes, "node finishes, and takes", "nodes finish, and take")
        return Wait(f"{finish} nobody in")
    if there >= size:
        return _take_in(view, now, local, waiting, limits, elapsed)
    return Wait(f"{_train(now.nodes)}, {there} are there, the next size is {size}")


def _take_in(
    view: View, now: Round, local: Local, waiting: list[Member], limits: Limits, elapsed: Elapsed
) -> Claim | Wait:
    """End a healthy world for newcomers: for all that come one after the other at once.

    Each end costs a plain script what it has done since its checkpoint, so that a node that fails
    or goes again and again is left out. A world always has the minimum of nodes, so that nobody
    below it waits here.
    """
    left_out = failure_policies.left_out(now, limits)
    off = {m.lease: left_out.get(m.node, 0.0) - elapsed.phase for m in waiting}
    welcome = [m for m in waiting if off[m.lease] <= 0]
    nodes, there = _train(now.nodes), now.nodes + len(welcome)
    if there < limits.larger(now.nodes):
        return Wait(f"{nodes}, without {_names(waiting)} (--suspect-after)", min(off.values()))
    settle = 0.0 if there >= limits.max_nodes else _join_settle(local, limits) - elapsed.join
    left = max(settle, limits.join_interval - elapsed.phase)
    who = f"{_names(welcome)} {'joins' if len(welcome) == 1 else 'join'}"
    if left > 0:
        return Wait(f"{nodes}, {who} soon", left)
    return _claim(view, local, who, Cause.JOIN, joins=local.elastic)


def _join_settle(local: Local, limits: Limits) -> float:
    if limits.join_settle is not None:
        return limits.join_settle
    return 0.0 if local.elastic else JOIN_SETTLE


def _give_up(now: Round, culprit: Failure, limits: Limits, repeated: str) -> Close:
    if not limits.max_restarts:
        return _close(now, Verdict.FAILED, f"{culprit}; no restart is allowed", culprit)
    most = limits.max_restarts
    used = "the only restart is" if most == 1 else f"all {most} restarts are"
    again = f"; {repeated}" if repeated else ""
    why = f"{culprit}; {used} used up (--max-restarts){again}"
    return _close(now, Verdict.BUDGET_USED_UP, why, culprit)


def _succeeded(view: View, now: Round, limits: Limits) -> Close:
    world = {p.node for p in view.world}
    out = failure_policies.were_left_out(view.ledger, world, limits)
    return _close(now, Verdict.SUCCEEDED, f"every participant is done{out}")


def _close(now: Round, verdict: Verdict, reason: str, failure: Failure | None = None) -> Close:
    outcome = verdict.outcome(now.run, now.generation, reason, failure)
    closed = replace(now, phase=Phase.CLOSED, reason=f"{verdict.state}: {reason}")
    return Close(closed.reason, closed, outcome)


def _unread(view: View, members: list[Member]) -> str:
    """The node whose ack or report somebody has written over: it would not repeat that."""
    return next((m.node for m in members if hexed(m.lease) in view.unread), "")


def _names(members: list[Member]) -> str:
    return listed([m.node for m in members])


def _are(nodes: int) -> str:
    return counted(nodes, "node is", "nodes are")


def _train(nodes: int) -> str:
    return counted(nodes, "node trains", "nodes train")


def _ready(ready: list[Member], missing: list[Member]) -> str:
    """`1 node is ready, n2 and n3 are not yet`."""
    late = f"{_names(missing)} {'is' if len(missing) == 1 else 'are'} not" if missing else ""
    if late and not ready:
        return f"{late} ready yet"
    return f"{_are(len(ready))} ready{f', {late} yet' if late else ''}"


def _is_leaving(view: View, node: str) -> str:
    drain = requests.drained(view, node)
    return f"{node} is leaving" + (f" (drained{requests.by(drain)})" if drain else "")


def _may_be_back(node: str) -> str:
    return f"{node}, too, may put its key back"


def _live(view: View) -> list[Member]:
    return [m for m in view.members if not m.leaving]


def _leavers(view: View) -> list[Member]:
    """The members of the last world that have said that they go, and are still there."""
    last = frozenset(_leases(view))
    return [m for m in view.members if m.leaving and m.lease in last]


def _done(view: View) -> set[int]:
    return {r.lease for r in view.reports if r.failure is None}


def left_here(view: View, local: Local) -> str:
    """A worker of this node that has left the last world's others, and how; "" if none has."""
    return local.left if local.ran == view.ledger.final else ""


def _culprit(view: View, left_early: str = "") -> Failure | None:
    """The first failure by etcd revision; the later ones are its victims (pytorch#113546).

    If that is of a worker that has lost its peers, whose training was over before, those are named:
    by the agent of one of them, by the reports of nodes that are done, or by an ack.
    """
    failures = [report for report in view.reports if report.failure]
    first = next((r.failure for r in failures if not r.victim), None)
    if first is None or not blames_peers(first):
        return first
    left = next((r.failure for r in failures if r.failure and is_left(r.failure)), None)
    done = _done(view)
    ended = [
        hangs.At(rank, p.node, None)
        for p in view.world
        for rank in range(p.first_rank, p.first_rank + p.nproc)
        if p.lease in done
    ]
    told = f"{hangs.who(ended)} ended" if ended else left_early
    return left or (was_left(first, told) if told else first)
