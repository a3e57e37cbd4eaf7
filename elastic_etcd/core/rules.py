"""Every transition of the rendezvous. All that decides who trains lives in this file.

`decide` answers what one agent does next, from what it sees (a view), what it is (local), what
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
I9 an agent that has seen a key of a newer format version writes nothing and starts no workers
"""

from enum import Enum
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from elastic_etcd.core.ranks import assign, choose
from elastic_etcd.core.schema import (
    Failure,
    Ledger,
    Member,
    Outcome,
    Participant,
    Phase,
    Round,
    hexed,
)
from elastic_etcd.core.view import Everything, Narrow, View
from elastic_etcd.times import ACK_PATIENCE, GRACE_LEAVE, STOP_PATIENCE, UNKILLABLE

LONGEST_BACKOFF = 60.0
NAMED = 3  # nodes of many, in a reason


class Limits(Struct, frozen=True):
    """What the user asked for; times are in seconds."""

    min_nodes: int
    max_nodes: int
    max_restarts: int = 3
    restart_window: float = 3600.0
    min_uptime: float = 10.0
    settle: float = 3.0
    join_settle: float = 1.0
    join_interval: float = 0.0
    join_timeout: float = 600.0
    patience: float = GRACE_LEAVE + UNKILLABLE + STOP_PATIENCE  # with survivors that don't ack


class Local(Struct, frozen=True):
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


class Elapsed(Struct, frozen=True):
    """Seconds on this agent's monotonic clock; no clock of another machine is ever compared.

    `phase` and `join` stand still while etcd is silent: nobody could come.
    """

    phase: float  # since the round was first seen in its phase
    join: float  # since a member was last seen to arrive
    ran: float = 0.0  # how long the last final world was seen to last


class Verdict(Enum):
    """How a run of the job ends: its outcome's state, and the exit code of every agent."""

    SUCCEEDED = ("succeeded", 0)
    FAILED = ("failed", 1)
    BUDGET_USED_UP = ("failed", 3)
    TOO_FEW_NODES = ("failed", 4)
    STOPPED = ("stopped", 0)

    def __init__(self, state: str, exit_code: int) -> None:
        self.state = state
        self.exit_code = exit_code

    def outcome(self, run: str, generation: int, reason: str, failure: Failure | None) -> Outcome:
        """The outcome that says so; `failure` is the root cause."""
        return Outcome(self.state, reason, run, generation, self.exit_code, failure)


# --- decisions ----------------------------------------------------------------------------


class _Decided(Struct, frozen=True, tag=True):
    """What to do, and why; the agent logs the reason when it changes."""

    reason: str


class Claim(_Decided, frozen=True):
    """Begin the next generation, as its coordinator."""

    round: Round
    ledger: Ledger


class Open(_Decided, frozen=True):
    """Let the members join the round."""

    round: Round


class Freeze(_Decided, frozen=True):
    """Fix the participants and their ranks; `without` names live nodes that are not ready."""

    round: Round
    without: tuple[str, ...] = ()


class Ack(_Decided, frozen=True):
    """Say that this node is ready for `generation`."""

    generation: int


class Finalise(_Decided, frozen=True):
    """Begin the world. What the round has decided counts from here on, so nothing counts twice."""

    round: Round
    ledger: Ledger


class Run(_Decided, frozen=True):
    """Start the workers of this final round."""

    round: Round


class Stop(_Decided, frozen=True):
    """Stop the workers; `planned` is whether a join or a leave is the cause."""

    planned: bool


class Wait(_Decided, frozen=True):
    """Do nothing; after `until` seconds decide again, also without any news."""

    until: float | None = None


class Close(_Decided, frozen=True):
    """End the run for everybody."""

    round: Round
    outcome: Outcome


class Leave(_Decided, frozen=True):
    """End this agent: the run is over."""


Decision: TypeAlias = Claim | Open | Freeze | Ack | Finalise | Run | Stop | Wait | Close | Leave


# --- what all agents decide ---------------------------------------------------------------


def decide(view: View, local: Local, limits: Limits, elapsed: Elapsed) -> Decision:
    """What the member `local` does next. Pure; raises nothing for any view."""
    now = view.round
    over = ended(view, local)
    if over:
        return Leave(over)
    if local.running and not local.stopping and (now is None or now.generation != local.running):
        why = now.reason if now else "its coordinator is gone"
        planned = now is not None and now.planned
        return Stop(f"generation {local.running} is over: {why}", planned)
    if local.leaving:
        return Wait("leaving")
    if now is None:
        begun = view.ledger.final > 0
        return _claim(view, local, "no round is under way" if begun else "the job begins")
    if view.coverage not in (Everything(), Narrow(now.coordinator)):
        return Wait(_awaited(now, local, limits))  # not looking at its coordinator yet
    if view.coordinator is None:
        names = (p.node for p in now.participants if p.lease == now.coordinator)
        return _claim(view, local, f"{next(names, 'the coordinator')} is lost")
    if view.coordinator.leaving:
        return _claim(view, local, f"{view.coordinator.node} is leaving", planned=True)
    mine = _own_part(now, local)
    if mine:
        return mine
    if now.coordinator != local.lease:
        return Wait(_awaited(now, local, limits))
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


def _awaited(now: Round, local: Local, limits: Limits) -> str:
    if now.phase is Phase.FINAL and now.group_rank(local.lease) is None:
        if len(now.participants) < limits.max_nodes:
            return "waiting to be taken in"
        return f"spare: {len(now.participants)} nodes train, this one takes a place that gets free"
    return f"{now.phase}: {now.reason}"


def _own_part(now: Round, local: Local) -> Ack | Run | None:
    """What every member does for itself in a round, coordinator or not."""
    generation = now.generation
    takes_part = now.group_rank(local.lease) is not None
    awaited = now.phase is Phase.JOINABLE or (now.phase is Phase.FINAL and not takes_part)
    if awaited and local.acked != generation and not local.running:
        return Ack(f"ready for generation {generation}", generation)
    if takes_part and now.phase is Phase.FINAL and local.ran != generation and not local.running:
        return Run(f"generation {generation}: {now.reason}", now)
    return None


def _claim(view: View, local: Local, reason: str, *, planned: bool = False) -> Claim:
    """Begin the next generation; etcd lets exactly one claim of it through."""
    # Not only what the keys say: somebody may have spoilt both.
    known = view.round.generation if view.round else 0
    last = max(view.ledger.generation, local.acked, local.ran, known)
    now = Round(last + 1, Phase.SETUP, local.lease, reason, local.run, planned=planned)
    ledger = replace(view.ledger, generation=now.generation)
    return Claim(f"claim generation {now.generation}: {reason}", now, ledger)


# --- what the coordinator decides ---------------------------------------------------------


def _lead(view: View, now: Round, local: Local, limits: Limits, elapsed: Elapsed) -> Decision:
    match now.phase:
        case Phase.SETUP:
            return _lead_setup(view, now)
        case Phase.JOINABLE:
            return _lead_joinable(view, now, local, limits, elapsed)
        case Phase.FROZEN:
            return _lead_frozen(view, now, local)
        case Phase.FINAL | Phase.CLOSED:  # who sees it closed has left
            return _lead_final(view, now, local, limits, elapsed)


def _lead_setup(view: View, now: Round) -> Decision:
    """Settle the past: it may be that the last world was finished."""
    last, done = view.ledger.group_ranks, _done(view)
    if last and all(lease in done for lease in last):
        return _close(now, Verdict.SUCCEEDED, "every participant is done")
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
        return _claim(view, local, f"the ack of {spoilt} can't be read")
    own = {local.lease} if local.acked == now.generation else set()
    acked = {ack.lease for ack in view.acks} | own
    ready = [m for m in live if m.lease in acked]
    missing = [m for m in live if m.lease not in acked]
    if len(ready) < limits.min_nodes:
        short = f"{len(ready)} of at least {limits.min_nodes} nodes are ready{_not(missing)}"
        if elapsed.phase >= limits.join_timeout:
            late = f"{short} after {limits.join_timeout:g} s: start more, or raise --join-timeout"
            return _close(now, Verdict.TOO_FEW_NODES, late)
        return Wait(short, limits.join_timeout - elapsed.phase)
    last = frozenset(view.ledger.group_ranks)
    full = len(ready) >= limits.max_nodes
    if not any(m.lease in last for m in live):
        # Who is there but not ready yet is waited for as long as who is not there yet.
        since = elapsed.join if len(ready) == len(live) else min(elapsed.join, elapsed.phase)
        if not full and since < limits.settle:
            of = f"{len(ready)} of at most {limits.max_nodes} nodes are ready"
            why = f"{of}; more may come within {limits.settle:g} s (--settle)"
            return Wait(why, limits.settle - since)
    else:
        # A spare, which has nothing to stop, must not push out a slower survivor.
        awaited = [m for m in missing if not full or m.lease in last]
        left = limits.patience - elapsed.phase
        if all(m.lease not in last for m in awaited):
            patience = max(limits.settle, ACK_PATIENCE)
            left = min(left, patience - min(elapsed.phase, elapsed.join))
        if not own:  # a coordinator always takes part
            return Wait(f"{len(ready)} of {len(live)} live nodes are ready{_not(missing)}")
        if awaited and left > 0:
            return Wait(f"{len(ready)} of {len(live)} live nodes are ready{_not(missing)}", left)
    return _freeze(view, now, ready, limits, elapsed)


def _freeze(
    view: View, now: Round, ready: list[Member], limits: Limits, elapsed: Elapsed
) -> Decision:
    """Count the failure that ended the last world, then freeze or close.

    A failure counts when all of the last world's nodes are back: if one of them is lost, the
    failures of the others are its victims (pytorch#91943), and a world of newcomers only
    starts with a fresh budget. What was used of it is forgiven once the worlds since the last
    failure have lasted for the restart window together, however many they were.
    """
    live = {m.lease for m in _live(view)}
    back = live | _done(view)
    ledger, culprit = view.ledger, _culprit(view)
    trained = round(ledger.trained + elapsed.ran, 3)
    lost = [
        n for lease, n in zip(ledger.group_ranks, ledger.nodes, strict=True) if lease not in back
    ]
    if live.isdisjoint(ledger.group_ranks):
        ledger = replace(ledger, restarts=0, rapid_failures=0)
        trained = 0.0
    elif culprit and lost:
        now = replace(now, reason=f"{' and '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost")
    elif culprit:
        spent = 0 if trained >= limits.restart_window else ledger.restarts
        rapid = ledger.rapid_failures + 1 if culprit.uptime < limits.min_uptime else 0
        if spent >= limits.max_restarts:
            return _give_up(now, culprit, limits)
        ledger = replace(ledger, restarts=spent + 1, rapid_failures=rapid)
        trained = 0.0
        backoff = 0.0 if rapid < 2 else min(LONGEST_BACKOFF, 2.0 ** min(rapid - 2, 10))
        if elapsed.phase < backoff:
            why = f"workers failed {rapid} times right after their start"
            return Wait(why, backoff - elapsed.phase)
    chosen = choose(ready, ledger.group_ranks, now.coordinator, limits.max_nodes)
    world = assign(chosen, ledger.group_ranks)
    assert limits.min_nodes <= len(world) <= limits.max_nodes, f"I4: a world of {len(world)}"
    frozen = replace(
        now,
        phase=Phase.FROZEN,
        participants=tuple(Participant(m.lease, m.node, m.nproc) for m in world),
        restarts=ledger.restarts,
        rapid_failures=ledger.rapid_failures,
        trained=trained,
    )
    takes_part = f"{len(world)} nodes take part"
    left_out = [m for m in _live(view) if m not in ready]
    if left_out:
        late = f"without {_names(left_out)}, not ready after {elapsed.phase:.0f} s"
        return Freeze(f"{takes_part}, {late}", frozen, tuple(m.node for m in left_out[:NAMED]))
    return Freeze(takes_part, frozen)


def _lead_frozen(view: View, now: Round, local: Local) -> Decision:
    """All participants must still be there; group rank 0's ack says where its store will be."""
    live = {m.lease for m in _live(view)}
    for participant in now.participants:
        if participant.lease not in live:
            return _claim(view, local, f"{participant.node} went before its round was final")
    first = now.participants[0]
    master = next((a.master for a in view.acks if a.lease == first.lease), None)
    if master is None:
        return _claim(view, local, f"the ack of {first.node} is gone")
    final = replace(now, phase=Phase.FINAL, master=master)
    ledger = replace(
        view.ledger,
        final=now.generation,
        group_ranks=tuple(p.lease for p in now.participants),
        nodes=tuple(p.node for p in now.participants),
        restarts=now.restarts,
        rapid_failures=now.rapid_failures,
        trained=now.trained,
    )
    return Finalise("all participants are ready", final, ledger)


def _lead_final(view: View, now: Round, local: Local, limits: Limits, elapsed: Elapsed) -> Decision:
    """Watch over the world that trains; begin the next one when it is no longer right."""
    done = _done(view)
    if all(p.lease in done for p in now.participants):
        return _close(now, Verdict.SUCCEEDED, "every participant is done")
    culprit = _culprit(view)
    if culprit:
        return _claim(view, local, str(culprit))
    members = {m.lease: m for m in view.members}
    for p in now.participants:
        if p.lease in done:
            continue
        if p.lease not in members:
            return _claim(view, local, f"{p.node} is lost")
        if members[p.lease].leaving:
            return _claim(view, local, f"{p.node} is leaving", planned=True)
    world = {p.lease for p in now.participants}
    if spoilt := _unread(view, [m for m in view.members if m.lease in world]):
        return _claim(view, local, f"the report of {spoilt} can't be read")
    ready = {ack.lease for ack in view.acks}  # one that hangs must not end a world
    waiting = [m for m in _live(view) if m.lease not in world and m.lease in ready]
    # A world that has begun to finish takes nobody in: it would begin anew.
    if waiting and len(now.participants) < limits.max_nodes and not done:
        return _take_in(view, now, local, waiting, limits, elapsed)
    return Wait(f"{len(now.participants)} nodes train")


def _take_in(
    view: View, now: Round, local: Local, waiting: list[Member], limits: Limits, elapsed: Elapsed
) -> Claim | Wait:
    """End a healthy world for newcomers: for all that come one after the other at once.

    Each end costs a plain script what it has done since its checkpoint. A world always has the
    minimum of nodes, so that nobody below it waits here.
    """
    full = len(now.participants) + len(waiting) >= limits.max_nodes
    settle = 0.0 if full else limits.join_settle - elapsed.join
    left = max(settle, limits.join_interval - elapsed.phase)
    who = f"{_names(waiting)} {'joins' if len(waiting) == 1 else 'join'}"
    if left > 0:
        return Wait(f"{len(now.participants)} nodes train, {who} soon", left)
    return _claim(view, local, who, planned=True)


def _give_up(now: Round, culprit: Failure, limits: Limits) -> Close:
    if not limits.max_restarts:
        return _close(now, Verdict.FAILED, f"{culprit}; no restart is allowed", culprit)
    used = f"all {limits.max_restarts} restarts are used up (--max-restarts)"
    return _close(now, Verdict.BUDGET_USED_UP, f"{culprit}; {used}", culprit)


def _close(now: Round, verdict: Verdict, reason: str, failure: Failure | None = None) -> Close:
    outcome = verdict.outcome(now.run, now.generation, reason, failure)
    closed = replace(now, phase=Phase.CLOSED, reason=f"{verdict.state}: {reason}")
    return Close(closed.reason, closed, outcome)


def _unread(view: View, members: list[Member]) -> str:
    """Whose ack or report somebody has written over: its writer would not repeat it."""
    return next((m.node for m in members if hexed(m.lease) in view.unread), "")


def _names(members: list[Member]) -> str:
    """Their nodes' names, the first few of many."""
    named = [m.node for m in members[:NAMED]]
    if more := len(members) - len(named):
        return f"{', '.join(named)} and {more} more"
    return " and ".join(filter(None, (", ".join(named[:-1]), *named[-1:])))


def _not(missing: list[Member]) -> str:
    return f", {_names(missing)} not" if missing else ""


def _live(view: View) -> list[Member]:
    return [m for m in view.members if not m.leaving]


def _done(view: View) -> set[int]:
    return {r.lease for r in view.reports if r.failure is None}


def _culprit(view: View) -> Failure | None:
    """The first failure by etcd revision; the later ones are its victims (pytorch#113546)."""
    return next((r.failure for r in view.reports if r.failure and not r.victim), None)
