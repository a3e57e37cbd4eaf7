"""Every transition of the rendezvous. All that decides who trains lives in this file.

`decide` answers what one agent does next, from what it sees (a view), what it is (me), what
the user asked for (limits) and how long it has waited (elapsed, on its own clock). It is
total over stale, partial and empty views: whatever it answers, a write that no longer fits
is refused by etcd, because every write carries the revisions on which it was decided.

    setup ──open──> joinable ──freeze──> frozen ──finalise──> final ──> closed
      ^                 │                   │                   │
      └──── claim of the next generation by any live member ────┘

Invariants, checked after every step by tests/model:

I1 the generation never decreases; one generation has at most one final world
I2 a worker of generation g starts only under the lease with which its agent acked g, and is
   stopped as soon as the agent learns that this lease or generation is gone
I3 no two generations have live workers of the same node at the same time
I4 a final world has min..max participants, each incarnation once
I5 every write that moves the round is one Txn fenced by the round's mod revision and the
   writer's create revision
I6 from every state with min live members, no more crashes and a reachable etcd, a final
   round (or the end of the job) is reached
I7 leaving, failing or finishing of one node never closes the job for the others
I8 all participants of a final round hold the same generation, ranks, world size and master
"""

from dataclasses import dataclass, replace
from enum import Enum

from elastic_etcd.core.keys import hexed
from elastic_etcd.core.ranks import assign, choose
from elastic_etcd.core.values import (
    Ledger,
    Member,
    Outcome,
    Participant,
    Phase,
    Report,
    Round,
)
from elastic_etcd.core.view import EVERYTHING, View

LONGEST_BACKOFF = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user asked for; times are in seconds."""

    min_nodes: int
    max_nodes: int
    max_restarts: int = 3
    restart_window: float = 3600.0
    min_uptime: float = 10.0
    settle: float = 3.0
    join_timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class Me:
    """What this agent knows of itself. `lease` is 0 while it is no member."""

    run: str
    lease: int = 0
    created: int = 0  # create revision of the member key: the fence of every write
    spec: int = 0  # create revision of the spec: the fence against another run
    acked: int = 0  # generation acked under this lease
    running: int = 0  # generation whose workers are alive here
    ran: int = 0  # last generation whose workers were started
    reported: int = 0  # generation whose end was reported
    stopping: bool = False
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Seconds on this agent's monotonic clock; no clock of another host is ever compared."""

    phase: float  # since the round was first seen in its phase
    join: float  # since a member was last seen to arrive
    ran: float = 0.0  # how long the last final world was seen to last


class Act(Enum):
    """What a decision asks for."""

    CLAIM = "claim"
    OPEN = "open"
    FREEZE = "freeze"
    ACK = "ack"
    FINALISE = "finalise"
    RUN = "run"
    STOP = "stop"
    WAIT = "wait"
    CLOSE = "close"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do and why; the agent logs the reason when it changes.

    `until` is for WAIT: seconds after which to decide again without any news.
    `round` is what CLAIM to FINALISE write, `ledger` what CLAIM and FINALISE write beside it:
    what a round has decided counts only from its final on, so that nothing counts twice.
    """

    act: Act
    reason: str
    until: float | None = None
    round: Round | None = None
    ledger: Ledger | None = None
    outcome: Outcome | None = None


def decide(view: View, me: Me, limits: Limits, elapsed: Elapsed) -> Decision:
    """What the member `me` does next. Pure; raises nothing for any view."""
    now = view.round
    over = ended(view, me)
    if over:
        return Decision(Act.LEAVE, over)
    if me.running and not me.stopping and (now is None or now.generation != me.running):
        why = now.reason if now else "its coordinator is gone"
        return Decision(Act.STOP, f"generation {me.running} is over: {why}")
    if me.leaving:
        return Decision(Act.WAIT, "leaving")
    if now is None:
        begun = view.ledger.final > 0
        return _claim(view, me, "no round is under way" if begun else "the job begins")
    if view.coverage not in (EVERYTHING, now.coordinator):
        return Decision(Act.WAIT, _waiting(now, me, limits))  # not looking at its coordinator yet
    if view.coordinator is None:
        names = (p.node for p in now.participants if p.lease == now.coordinator)
        return _claim(view, me, f"{next(names, 'the coordinator')} is lost")
    if view.coordinator.leaving:
        return _claim(view, me, f"{view.coordinator.node} is leaving", planned=True)
    mine = _own_part(now, me)
    if mine:
        return mine
    if now.coordinator != me.lease:
        return Decision(Act.WAIT, _waiting(now, me, limits))
    if view.coverage != EVERYTHING:
        return Decision(Act.WAIT, "reading all of the job")
    lead = {
        Phase.SETUP: _setup,
        Phase.JOINABLE: _joinable,
        Phase.FROZEN: _frozen,
        Phase.FINAL: _final,
    }[now.phase]
    return lead(view, now, me, limits, elapsed)


def ended(view: View, me: Me) -> str:
    """Why there is nothing left to do in this run of the job, "" while there is."""
    if view.outcome and view.outcome.run == me.run:
        return f"{view.outcome.state}: {view.outcome.reason}"
    if view.round and view.round.run != me.run:
        return "another run of this job has begun"
    return view.round.reason if view.round and view.round.phase is Phase.CLOSED else ""


def vanished(view: View, me: Me) -> bool:
    """Whether the own member key is gone though the lease may live: removed by hand, or lost.

    Without it every fence of this agent fails, so it has to join again; likewise without spec.
    """
    own = any(m.lease == me.lease for m in view.members)
    no_spec = view.coverage == EVERYTHING and view.spec is None
    return not ended(view, me) and (no_spec or not own)


def _waiting(now: Round, me: Me, limits: Limits) -> str:
    if now.phase is Phase.FINAL and now.place(me.lease) is None:
        if len(now.participants) < limits.max_nodes:
            return "waiting to be taken in"
        return f"spare: {len(now.participants)} nodes train, this one takes a place that gets free"
    return f"{now.phase}: {now.reason}"


def _own_part(now: Round, me: Me) -> Decision | None:
    """What every member does for itself in a round, coordinator or not."""
    generation = now.generation
    if now.phase is Phase.JOINABLE and me.acked != generation and not me.running:
        return Decision(Act.ACK, f"ready for generation {generation}")
    takes_part = now.place(me.lease) is not None
    if takes_part and now.phase is Phase.FINAL and me.ran != generation and not me.running:
        return Decision(Act.RUN, f"generation {generation}: {now.reason}", round=now)
    return None


def _claim(view: View, me: Me, reason: str, *, planned: bool = False) -> Decision:
    """Begin the next generation; etcd lets exactly one claim of it through."""
    # Not only what the keys say: somebody may have spoilt both.
    last = max(view.ledger.generation, me.acked, me.ran, view.round.generation if view.round else 0)
    now = Round(last + 1, Phase.SETUP, me.lease, reason, me.run, planned=planned)
    return Decision(
        Act.CLAIM,
        f"claim generation {now.generation}: {reason}",
        round=now,
        ledger=replace(view.ledger, generation=now.generation),
    )


def _setup(view: View, now: Round, me: Me, limits: Limits, elapsed: Elapsed) -> Decision:
    """Settle the past: it may be that the last world was finished."""
    del me, limits, elapsed
    places, done = view.ledger.places, _done(view)
    if places and all(lease in done for lease in places):
        return _close(view, now, "succeeded", "every participant is done", 0)
    return Decision(Act.OPEN, now.reason, round=replace(now, phase=Phase.JOINABLE))


def _joinable(view: View, now: Round, me: Me, limits: Limits, elapsed: Elapsed) -> Decision:
    """Wait for exactly the live members; only the first formation waits the settle time.

    A re-formation knows by leases who is alive, and a dead node's lease ends by itself.
    """
    live = _live(view)
    if spoilt := _unread(view, live):
        return _claim(view, me, f"the ack of {spoilt} can't be read")
    acked = {ack.lease for ack in view.acks} | ({me.lease} if me.acked == now.generation else set())
    ready = [m for m in live if m.lease in acked]
    if len(ready) < limits.min_nodes:
        short = f"{len(ready)} of at least {limits.min_nodes} nodes are ready"
        if elapsed.phase >= limits.join_timeout:
            late = f"{short} after {limits.join_timeout:g} s: start more, or raise --join-timeout"
            return _close(view, now, "failed", late, 4)
        return Decision(Act.WAIT, short, until=limits.join_timeout - elapsed.phase)
    places = frozenset(view.ledger.places)
    full = len(ready) >= limits.max_nodes
    if not any(m.lease in places for m in live):
        # Who is there but not ready yet is waited for as long as who is not there yet.
        since = elapsed.join if len(ready) == len(live) else min(elapsed.join, elapsed.phase)
        if not full and since < limits.settle:
            of = f"{len(ready)} of at most {limits.max_nodes} nodes are ready"
            why = f"{of}; more may come within {limits.settle:g} s (--settle)"
            return Decision(Act.WAIT, why, until=limits.settle - since)
    else:
        # A spare, which has nothing to stop, must not take the place of a slower survivor.
        awaited = [m for m in live if not full or m.lease in places]
        if any(m.lease not in acked for m in awaited):
            return Decision(Act.WAIT, f"{len(ready)} of {len(live)} live nodes are ready")
    return _budget(view, now, ready, limits, elapsed)


def _budget(
    view: View, now: Round, ready: list[Member], limits: Limits, elapsed: Elapsed
) -> Decision:
    """Count the failure that ended the last world, then freeze or close.

    A failure counts when all of the last world's nodes are back: if one of them is lost, the
    failures of the others are its victims (pytorch#91943), and a world of newcomers only
    starts with a fresh budget.
    """
    back = {m.lease for m in ready} | _done(view)
    ledger, culprit = view.ledger, _culprit(view)
    lost = [n for lease, n in zip(ledger.places, ledger.nodes, strict=True) if lease not in back]
    if {m.lease for m in ready}.isdisjoint(ledger.places):
        ledger = replace(ledger, restarts=0, quick=0)
    elif culprit and lost:
        now = replace(now, reason=f"{' and '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost")
    elif culprit:
        assert culprit.failure is not None
        spent = 0 if elapsed.ran >= limits.restart_window else ledger.restarts
        quick = ledger.quick + 1 if culprit.failure.uptime < limits.min_uptime else 0
        if spent >= limits.max_restarts:
            return _give_up(view, now, limits)
        ledger = replace(ledger, restarts=spent + 1, quick=quick)
        backoff = 0.0 if quick < 2 else min(LONGEST_BACKOFF, 2.0 ** min(quick - 2, 10))
        if elapsed.phase < backoff:
            why = f"workers failed {quick} times right after their start"
            return Decision(Act.WAIT, why, until=backoff - elapsed.phase)
    chosen = choose(ready, ledger.places, now.coordinator, limits.max_nodes)
    world = assign(chosen, ledger.places)
    assert limits.min_nodes <= len(world) <= limits.max_nodes, f"I4: a world of {len(world)}"
    frozen = replace(
        now,
        phase=Phase.FROZEN,
        participants=tuple(Participant(m.lease, m.node, m.nproc) for m in world),
        restarts=ledger.restarts,
        quick=ledger.quick,
    )
    return Decision(Act.FREEZE, f"{len(world)} nodes take part", round=frozen)


def _frozen(view: View, now: Round, me: Me, limits: Limits, elapsed: Elapsed) -> Decision:
    """All participants must still be there; group rank 0's ack says where its store will be."""
    del limits, elapsed
    live = {m.lease for m in _live(view)}
    for participant in now.participants:
        if participant.lease not in live:
            return _claim(view, me, f"{participant.node} went before its round was final")
    first = now.participants[0]
    master = next((a.master for a in view.acks if a.lease == first.lease), None)
    if master is None:
        return _claim(view, me, f"the ack of {first.node} is gone")
    final = replace(now, phase=Phase.FINAL, master=master)
    ledger = replace(
        view.ledger,
        final=now.generation,
        places=tuple(p.lease for p in now.participants),
        nodes=tuple(p.node for p in now.participants),
        restarts=now.restarts,
        quick=now.quick,
    )
    return Decision(Act.FINALISE, "all participants are ready", round=final, ledger=ledger)


def _final(view: View, now: Round, me: Me, limits: Limits, elapsed: Elapsed) -> Decision:
    """Watch over the world that trains; begin the next one when it is no longer right."""
    del elapsed
    done = _done(view)
    if all(p.lease in done for p in now.participants):
        return _close(view, now, "succeeded", "every participant is done", 0)
    culprit = _culprit(view)
    if culprit:
        return _claim(view, me, str(culprit.failure))
    members = {m.lease: m for m in view.members}
    for p in now.participants:
        if p.lease in done:
            continue
        if p.lease not in members:
            return _claim(view, me, f"{p.node} is lost")
        if members[p.lease].leaving:
            return _claim(view, me, f"{p.node} is leaving", planned=True)
    if spoilt := _unread(view, [m for m in view.members if now.place(m.lease) is not None]):
        return _claim(view, me, f"the report of {spoilt} can't be read")
    waiting = [m for m in _live(view) if now.place(m.lease) is None]
    # A world that has begun to finish takes nobody in: it would begin anew.
    if waiting and len(now.participants) < limits.max_nodes and not done:
        return _claim(view, me, f"{waiting[0].node} joins", planned=True)
    return Decision(Act.WAIT, f"{len(now.participants)} nodes train")


def _give_up(view: View, now: Round, limits: Limits) -> Decision:
    culprit = _culprit(view)
    assert culprit is not None
    used = f"all {limits.max_restarts} restarts are used up (--max-restarts)"
    why = f"{culprit.failure}; {used if limits.max_restarts else 'no restart is allowed'}"
    return _close(view, now, "failed", why, 3 if limits.max_restarts else 1)


def _close(view: View, now: Round, state: str, reason: str, exit_code: int) -> Decision:
    culprit = _culprit(view) if exit_code in (1, 3) else None
    outcome = Outcome(
        state=state,
        reason=reason,
        run=now.run,
        generation=now.generation,
        exit_code=exit_code,
        failure=culprit.failure if culprit else None,
    )
    closed = replace(now, phase=Phase.CLOSED, reason=f"{state}: {reason}")
    return Decision(Act.CLOSE, closed.reason, round=closed, outcome=outcome)


def _unread(view: View, members: list[Member]) -> str:
    """Whose ack or report somebody has written over: its writer would not repeat it."""
    return next((m.node for m in members if hexed(m.lease) in view.unread), "")


def _live(view: View) -> list[Member]:
    return [m for m in view.members if not m.leaving]


def _done(view: View) -> set[int]:
    return {r.lease for r in view.reports if r.failure is None}


def _culprit(view: View) -> Report | None:
    """The first failure by etcd revision; the later ones are its victims (pytorch#113546)."""
    return next((r for r in view.reports if r.failure and not r.victim), None)
