"""The life of an agent as a pure function: `step(state, event, now) -> (state, actions)`.

An event happens to an agent: a view, a worker's end, a lost lease, a signal, a timer. The agent
answers with actions. Both are plain values with a JSON form. The flight recorder
(agent/followers/recorder.py) writes them down, and tests/support/replay.py steps through them once
more. The model checker drives this very function. The rules (rules.py) decide what the job needs.
"""

import json
from enum import Enum
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from elastic_etcd.core import requests, rules, schema
from elastic_etcd.core.txn import Txn
from elastic_etcd.core.view import Coverage, Everything, Narrow, View, without
from elastic_etcd.times import HOLD, KILLED

# When workers that must be gone with the lease are stopped, as a share of its time to live: the
# rest is for their end.
CUT_OFF = 2 / 3

_ORDER = [*schema.Phase]  # of a round, in time


class Grace(Enum):
    """Why workers are stopped; how long they get before SIGKILL depends on it."""

    FAILURE = "failure"
    CHANGE = "change"
    JOIN = "join"  # no time is set
    LEAVE = "leave"
    CUT_OFF = "cut off"


# --- why an agent ends --------------------------------------------------------------------


class Left(Struct, frozen=True, tag=True):
    """A signal told it to go."""


class Over(Struct, frozen=True, tag=True):
    """The job is over for this node; `run` is which run, if it was never a member of it."""

    reason: str
    run: str = ""


class Error(Struct, frozen=True, tag=True):
    """Going on is impossible; the user is told why."""

    reason: str


class Outdated(Struct, frozen=True, tag=True):
    """The job is written in a format above ours: this agent may not write at all."""

    version: int

    @property
    def reason(self) -> str:
        """The reason, as the user is told it."""
        newer = f"this job was written by a newer elastic_etcd (format {self.version})"
        return f"{newer}; this one knows format {schema.VERSION}: install the newer one here, too"


Ending: TypeAlias = Left | Over | Error | Outdated


# --- events -------------------------------------------------------------------------------


class ViewChanged(Struct, frozen=True, tag=True):
    """There is a newer view of the job."""

    view: View


class Joined(Struct, frozen=True, tag=True):
    """The member key is written. Local says what the fields are; `limits` are the job's."""

    run: str
    spec: int
    lease: int
    created: int
    limits: schema.Limits


class LeaseLost(Struct, frozen=True, tag=True):
    """The server says that the lease is gone."""

    reason: str


class Relisted(Struct, frozen=True, tag=True):
    """The member key is back, with this create revision; 0: the world has been ended meanwhile.

    `patience` is for how many seconds other members may still put back theirs.
    """

    created: int
    patience: float = 0.0


class WriteDone(Struct, frozen=True, tag=True):
    """The pending write was answered; `ok` is whether its fence held."""

    ok: bool


class WorkerEnded(Struct, frozen=True, tag=True):
    """A worker exited; `failure` is None for exit code 0.

    `by_peer`: it says itself that it failed because a peer was gone.
    """

    generation: int
    failure: schema.Failure | None
    by_peer: bool = False


class WorkersHang(Struct, frozen=True, tag=True):
    """That generation hangs and is to be begun anew; `failure` says by whom or what."""

    generation: int
    failure: schema.Failure


class WorkersDiverged(Struct, frozen=True, tag=True):
    """That rank, which runs here, says that replicas differ: `named` are it and maybe others.

    alone: most of the ranks agree, so that it is this one that is wrong.
    """

    generation: int
    rank: int
    line: str
    named: bool
    alone: bool


class WorkersGone(Struct, frozen=True, tag=True):
    """No process of that generation's workers is left on this node."""

    generation: int


class WorkersElastic(Struct, frozen=True, tag=True):
    """Whether all of that generation's workers on this node recover in process."""

    generation: int
    elastic: bool


class WorkersFinished(Struct, frozen=True, tag=True):
    """Whether some of that generation's workers here have left their worlds: they train no more."""

    generation: int
    finished: bool
    left: str = ""  # one of them, and how


class PeerDead(Struct, frozen=True, tag=True):
    """The agent of the member with `lease` is gone, as a call has proved."""

    lease: int


class Signalled(Struct, frozen=True, tag=True):
    """The agent got SIGTERM or SIGINT."""


class Silent(Struct, frozen=True, tag=True):
    """etcd has not answered this agent's keepalive for so many seconds."""

    seconds: float


class Answered(Struct, frozen=True, tag=True):
    """etcd answers again."""


class Tick(Struct, frozen=True, tag=True):
    """The timer is due."""


class Fatal(Struct, frozen=True, tag=True):
    """The agent can't go on."""

    why: Over | Error | Outdated


class Finding(Struct, frozen=True, tag=True):
    """A follower has found what other agents are to know; `by` is its name."""

    by: str
    txn: Txn


class Published(Struct, frozen=True, tag=True):
    """The follower's Txn was answered; `ok` is whether it was done, as far as is known."""

    by: str
    ok: bool


class JobEnded(Struct, frozen=True, tag=True):
    """This agent, which is about to end, knows how the job has ended."""

    outcome: schema.Outcome


Event: TypeAlias = (
    ViewChanged
    | Joined
    | LeaseLost
    | Relisted
    | WriteDone
    | WorkerEnded
    | WorkersHang
    | WorkersDiverged
    | WorkersGone
    | WorkersElastic
    | WorkersFinished
    | PeerDead
    | Signalled
    | Silent
    | Answered
    | Tick
    | Fatal
    | Finding
    | Published
    | JobEnded
)


# --- what is written ----------------------------------------------------------------------


class ReportEnd(Struct, frozen=True, tag=True):
    """Say how this node's workers ended: `failure` is None when all of them exited 0."""

    failure: schema.Failure | None
    victim: bool = False


class MarkLeaving(Struct, frozen=True, tag=True):
    """Say that this node is leaving."""


Writable: TypeAlias = (
    rules.Claim
    | rules.TakeOver
    | rules.Open
    | rules.Freeze
    | rules.Ack
    | rules.Finalise
    | rules.Close
    | ReportEnd
    | MarkLeaving
)


# --- actions ------------------------------------------------------------------------------


class Write(Struct, frozen=True, tag=True):
    """Put it into etcd, as the member with `lease`; answered by WriteDone."""

    what: Writable
    lease: int
    generation: int = 0


class Publish(Struct, frozen=True, tag=True):
    """Put a follower's Txn into etcd, if that answers soon; answered by Published."""

    by: str
    txn: Txn


class StartWorkers(Struct, frozen=True, tag=True):
    """Start the workers of this final round, in which this node is that participant."""

    round: schema.Round
    part: schema.Participant


class StopWorkers(Struct, frozen=True, tag=True):
    """Stop the workers, with SIGKILL `by` then if not before; answered by WorkersGone.

    They have `seconds` for it, if those are given, and else what `grace` gives.
    """

    grace: Grace
    by: float | None = None
    seconds: float | None = None


class Rejoin(Struct, frozen=True, tag=True):
    """Join again, as another incarnation; answered by Joined."""


class Relist(Struct, frozen=True, tag=True):
    """Put the own member key back, under the same lease, if no other world has begun.

    It is answered by Relisted.
    """


class Exit(Struct, frozen=True, tag=True):
    """End the agent; no worker is alive."""

    why: Ending


class SetTimer(Struct, frozen=True, tag=True):
    """Send Tick at `at` on the local monotonic clock; replaces the timer before it."""

    at: float | None


class Log(Struct, frozen=True, tag=True):
    """Log a decision whose reason changed."""

    decision: rules.Decision


Action: TypeAlias = (
    Write | Publish | StartWorkers | StopWorkers | Rejoin | Relist | Exit | SetTimer | Log
)


# --- state --------------------------------------------------------------------------------


class Life(Enum):
    """How far an agent's life has come.

    JOINING ──Joined──> MEMBER ──lease lost──> LOST ──no worker is left──> JOINING
    MEMBER ──key or lease gone, its world stands──> UNLISTED ──Relisted──> MEMBER, or LOST
    any of these ──Signalled, an order, Fatal, Leave──> LEAVING ──no worker is left──> ENDED
    """

    JOINING = "joining"
    MEMBER = "member"
    UNLISTED = "unlisted"
    LOST = "lost"
    LEAVING = "leaving"
    ENDED = "ended"


class Held(Struct, frozen=True, tag=True):
    """A worker failed, it seems because of a peer. The failure is held until `until`."""

    failure: schema.Failure
    until: float


class Failed(Struct, frozen=True, tag=True):
    """A worker failed."""

    failure: schema.Failure


class Finished(Struct, frozen=True, tag=True):
    """All workers exited 0."""


class Lasted(Struct, frozen=True):
    """A generation that was seen final, and for how many seconds."""

    generation: int = 0
    seconds: float = 0.0


Basis: TypeAlias = tuple[str | int, ...]


class State(Struct, frozen=True):
    """All that an agent remembers. Times are on the local monotonic clock, in seconds."""

    local: rules.Local
    nproc: int
    life: Life = Life.JOINING
    ending: Ending | None = None  # why, when LEAVING or ENDED
    view: View | None = None
    newest: schema.Round | None = None  # the last round that was seen, in whatever membership
    limits: schema.Limits | None = None  # of the job; None until this agent has joined it
    alive: int = 0  # workers that have not exited yet
    result: Held | Failed | Finished | None = None  # of the generation that ran last
    marked: bool = False  # the others know that this node is leaving
    pending: Write | None = None
    tried: Basis = ()  # what was written last, and on what it was based
    phase_since: float = 0.0
    join_since: float = 0.0
    vacant_since: float | None = None  # None: somebody coordinates
    listing_until: float = 0.0  # until then others may put back their keys, as this agent has
    silent_since: float | None = None  # None: etcd answers
    lasted: Lasted = Lasted()
    timer: float | None = None  # when it is due
    logged: str = ""  # the reason


def step(state: State, event: Event, now: float) -> tuple[State, list[Action]]:
    """Take in `event` at `now`: the agent's next state, and its actions.

    The rules know nothing of followers, whose findings change no state.
    """
    match event:
        case Finding() if isinstance(state.ending, Outdated):
            return state, []  # I9; its follower ends with the agent
        case Finding(by, txn):
            return state, [Publish(by, txn)]
        case Published() | JobEnded() | WorkersDiverged():
            return state, []
    asked = state.life is Life.UNLISTED
    state = _release_failure(_absorb(state, event, now), now)
    if now >= state.listing_until and state.silent_since is None:
        state = replace(state, listing_until=0.0)
    actions: list[Action] = []
    state = _give_up_lease(state, now, actions)
    if isinstance(state.result, Failed):
        state = _stop_workers(state, actions, Grace.FAILURE)
    state = _react(state, now, actions)
    if state.life is Life.UNLISTED and not asked:
        actions.append(Relist())
    return state, actions


def pages(state: State) -> int:
    """On how many pages this job's worlds are."""
    return state.limits.pages if state.limits else 1


def coverage(state: State) -> Coverage:
    """The keys that this agent mirrors: everything if it is the coordinator, as far as it knows."""
    view, lease = state.view, state.local.lease
    if view is None:
        return Narrow()
    now, page = view.round, lease % pages(state)
    if now is None:
        return Narrow(page=page)
    return Everything() if now.coordinator == lease else Narrow(now.coordinator, page)


# --- what an event changes ----------------------------------------------------------------


def _absorb(state: State, event: Event, now: float) -> State:
    local = state.local
    match event:
        case ViewChanged(view):
            return _see(state, view, now)
        case Joined():
            return _become_member(state, event)
        case LeaseLost():
            return _hear_of_lost_lease(state, now)
        case Relisted():
            return _hear_relisted(state, event, now)
        case WriteDone(ok):
            heard = _hear_answer(state, ok)
            acked = heard.local.acked != local.acked and _joins(state.view)
            return replace(heard, join_since=now) if acked else heard
        case WorkerEnded() | WorkersHang():
            return _end_worker(state, event, now)
        case WorkersGone() | WorkersElastic() | WorkersFinished() | PeerDead():
            return replace(state, local=_hear_of_processes(local, event))
        case Signalled():
            state = replace(state, local=replace(local, leaving=True))
            return _end_life(state, Left()) if state.ending else state
        case Silent(seconds):
            return replace(state, silent_since=now - seconds)
        case Answered():
            return _leave_out_silence(state, now)
        case Fatal(why):
            return _end_life(state, why)
    return state


def _see(state: State, view: View, now: float) -> State:
    if view.newer:
        outdated = Outdated(view.newer)
        return replace(_end_life(state, outdated), view=view, ending=outdated)
    if is_past(view.round, state.newest):  # the next claim replaces it, in a newer generation
        assert state.newest
        last = max(view.ledger.generation, state.newest.generation)
        view = replace(view, round=None, ledger=replace(view.ledger, generation=last))
        state = replace(state, tried=())
    match _own_key(state, view):
        case _Key.LOST:
            return _lose_lease(state)
        case _Key.STANDS:
            state = replace(state, life=Life.UNLISTED)
    return _heed_order(_take_view(state, view, now))


def is_past(now: schema.Round | None, newest: schema.Round | None) -> bool:
    """Whether etcd has lost `newest`: `now` is older, or of a generation that began once more.

    That is so after an older backup of etcd was restored.
    """
    if now is None or newest is None:
        return False
    if now.generation != newest.generation:
        return now.generation < newest.generation
    if newest.master:  # it was final
        return now.master != newest.master
    earlier = _ORDER.index(now.phase) < _ORDER.index(newest.phase)
    return earlier or (now.phase is not schema.Phase.FINAL and _led_by_another(now, newest))


def _led_by_another(now: schema.Round, newest: schema.Round) -> bool:
    """Whether that generation was begun by another member than `newest` was, which is not final."""
    begun = newest.phase is not schema.Phase.FINAL and now.generation == newest.generation
    return begun and now.coordinator != newest.coordinator


def _become_member(state: State, event: Joined) -> State:
    """Another member than before: nothing that was seen, written or heard counts."""
    local = replace(
        state.local,
        run=event.run,
        spec=event.spec,
        lease=event.lease,
        created=event.created,
    )
    life = Life.LEAVING if state.ending else Life.MEMBER
    return replace(
        state,
        local=local,
        life=life,
        limits=event.limits,
        view=None,
        result=None,
        pending=None,
        tried=(),
        silent_since=None,
        listing_until=0.0,
    )


def _take_view(state: State, view: View, now: float) -> State:
    """Take in a view; note when its phase and its newest member were first seen."""
    old = state.view
    was = (old.round.generation, old.round.phase) if old and old.round else None
    is_ = (view.round.generation, view.round.phase) if view.round else None
    known = {m.lease for m in old.members} if old else set()
    arrived = any(m.lease not in known for m in view.members)
    if _joins(view) and old and len(view.acks) > len(old.acks):
        arrived = True  # at the end of the step that the others are in
    vacant_since = None
    if rules.vacant(view):
        vacant_since = now if state.vacant_since is None else state.vacant_since
    local, newest = state.local, state.newest
    if view.round and newest and _led_by_another(view.round, newest):
        local = replace(local, acked=0)  # that was of a round that etcd has lost
    lasted = state.lasted
    if was and was[1] is schema.Phase.FINAL and was != is_:
        lasted = Lasted(was[0], now - state.phase_since)
    return replace(
        state,
        view=view,
        local=local,
        newest=view.round or newest,
        lasted=lasted,
        phase_since=state.phase_since if was == is_ else now,
        vacant_since=vacant_since,
        join_since=now if arrived else state.join_since,
    )


def _heed_order(state: State) -> State:
    """Leave, as on a signal, if people want that of a job that is not over."""
    local, view = state.local, state.view
    if view is None or state.ending or rules.ended(view, local) or not _departure(state):
        return state
    return replace(state, local=replace(local, leaving=True))


def _departure(state: State) -> requests.Departure | None:
    local = state.local
    return requests.departure(state.view, local.run, local.lease) if state.view else None


def _joins(view: View | None) -> bool:
    return view is not None and view.round is not None and view.round.joins


def _leave_out_silence(state: State, now: float) -> State:
    """Nobody could come while etcd was silent, so no clock has run; but a world trains on."""
    silent = state.silent_since
    if silent is None:
        return state
    joined = state.join_since + now - max(state.join_since, silent)
    began = state.phase_since + now - max(state.phase_since, silent)
    seen = state.view.round if state.view else None
    if seen and seen.phase is schema.Phase.FINAL:
        began = state.phase_since
    vacant_since = state.vacant_since
    if vacant_since is not None:
        vacant_since += now - max(vacant_since, silent)
    listing = state.listing_until
    return replace(
        state,
        silent_since=None,
        listing_until=listing and listing + now - silent,
        join_since=joined,
        phase_since=began,
        vacant_since=vacant_since,
    )


# --- the own key, and the lease that binds it -----------------------------------------------
#
# Without its key an agent is no member: each fence of its writes compares the key's create
# revision. The key may be gone with the lease, or by somebody's hand alone, and an agent finds it
# out in three ways, none of which says why:
#
#     a view without the key ───────────────────> _see
#     the server's word that the lease is gone ──> _hear_of_lost_lease, as a view without the key
#     etcd is silent until the lease may end ────> _give_up_lease, if workers must end with it
#
# A key is only a sign that an agent lives, and whoever ends a world writes its round. So an agent
# whose world's round is still the newest has lost nothing but the sign: its workers train on, and
# it puts the key back, fenced by the ledger that every claim writes. Nothing else is safe: others
# may have begun another round, or count on workers that are gone with the lease (--when-cut-off).


class _Key(Enum):
    """The own member key in a view, and what it means that it is not there."""

    LISTED = "it is there, or the run is over"
    STANDS = "it is gone, and the world goes on: to be put back"
    LOST = "it is gone, and the membership with it"


def _own_key(state: State, view: View) -> _Key:
    """Say whether the own key is in `view`, and else what follows; after the end nothing does."""
    unlisted = state.life is Life.UNLISTED and not rules.ended(view, state.local)
    if not (unlisted or rules.vanished(view, state.local)):
        return _Key.LISTED
    return _Key.STANDS if _stands(state, view) else _Key.LOST


def _stands(state: State, view: View) -> bool:
    """Whether `view` shows the final round that this agent knows, though its key is gone.

    Whoever ends a world writes its round. So an agent whose lease alone has ended goes on, unless
    its workers have to be gone with the lease.
    """
    was, now, limits = state.view.round if state.view else None, view.round, state.limits
    if state.life not in (Life.MEMBER, Life.UNLISTED) or limits is None or was is None:
        return False
    if limits.cut_off is not None or (view.coverage == Everything() and view.spec is None):
        return False
    if now is None or (now.generation, now.phase) != (was.generation, schema.Phase.FINAL):
        return False
    return was.phase is schema.Phase.FINAL and state.local.running in (0, now.generation)


def _waits_to_be_listed(state: State) -> bool:
    """Whether the own key is gone, or is put back and not seen yet: the end of the job counts."""
    return state.view is not None and _own_key(state, state.view) is not _Key.LISTED


def _hear_of_lost_lease(state: State, now: float) -> State:
    """Take it as a view in which the own key is gone: the fence of `relist` finds out the rest.

    The views may be behind, and none come where etcd refuses them, too.
    """
    if state.life is Life.MEMBER and state.view:
        state = _see(state, without(state.view, state.local.lease), now)
    if state.life is Life.UNLISTED:
        return state
    lost = replace(_lose_lease(state), life=Life.LOST)  # while joining: then once more
    return replace(lost, life=Life.LEAVING) if state.ending else lost


def _hear_relisted(state: State, event: Relisted, now: float) -> State:
    """A member as before, which gives the others the time to be that, too.

    Its ack, which went with its lease, is needed of a spare only.
    """
    if state.life is not Life.UNLISTED:
        return state
    if not event.created:
        return _lose_lease(state)
    return replace(
        _leave_out_silence(state, now),
        local=replace(state.local, created=event.created, acked=0),
        life=Life.MEMBER,
        pending=None,
        tried=(),
        listing_until=now + event.patience,
    )


def _lose_lease(state: State) -> State:
    """No member any more: nothing that was acked or seen counts."""
    local = replace(state.local, lease=0, created=0, acked=0)
    life = Life.LOST if state.life in (Life.MEMBER, Life.UNLISTED) else state.life
    return replace(state, local=local, life=life, view=None, vacant_since=None, marked=False)


def _cut_off(state: State) -> tuple[float, float] | None:
    """When the workers begin to stop, and are gone, as nobody hears of this node; None: never."""
    after = state.limits.cut_off if state.limits else None
    if after is None or state.silent_since is None or not state.local.running:
        return None
    return state.silent_since + CUT_OFF * after, state.silent_since + after


def _give_up_lease(state: State, now: float, actions: list[Action]) -> State:
    """Before it may have ended, so that no worker is left when others begin a world.

    From there on it is as lost: the agent joins again, as soon as etcd answers.
    """
    cut_off = _cut_off(state)
    if cut_off is None or now < cut_off[0]:
        return state
    _, end = cut_off
    actions.append(StopWorkers(Grace.CUT_OFF, end - KILLED))
    state = _lose_lease(state)
    local = replace(state.local, stopping=True, patient=False)
    return replace(state, silent_since=None, local=local)


# --- what other events change -------------------------------------------------------------


def _hear_answer(state: State, ok: bool) -> State:
    """A refused write is not tried again before the view has changed."""
    write, local = state.pending, state.local
    state = replace(state, pending=None)
    if write is None or write.lease != local.lease:
        return state
    match write.what:
        case ReportEnd(schema.Failure(), False) if not ok:
            return state  # the next generation was faster; its victim, once that is seen
        case ReportEnd():
            return replace(state, local=replace(local, reported=write.generation))
        case MarkLeaving():
            return replace(state, marked=True)
        case rules.Ack() if ok:
            return replace(state, local=replace(local, acked=write.generation))
    return state


def _end_worker(state: State, event: WorkerEnded | WorkersHang, now: float) -> State:
    """Note a worker's end, which is no failure while the generation is being stopped.

    But if its step may last, nobody has made it end.
    """
    if event.generation != state.local.running:
        return state
    if isinstance(event, WorkerEnded):
        state = replace(state, alive=state.alive - 1)
    if state.local.stopping and not state.local.patient:
        return state
    if isinstance(event, WorkersHang):
        return replace(state, result=Failed(event.failure))
    if not event.failure:
        finished = not state.alive and state.result is None
        return replace(state, result=Finished()) if finished else state
    if event.by_peer:  # one that is held already speaks for both
        return replace(state, result=state.result or Held(event.failure, now + HOLD))
    return replace(state, result=Failed(event.failure))


def _hear_of_processes(
    local: rules.Local, event: WorkersGone | WorkersElastic | WorkersFinished | PeerDead
) -> rules.Local:
    """Note that an agent is dead, or how the workers are; of an older generation it is no news."""
    if isinstance(event, PeerDead):
        return replace(local, dead=(*local.dead, event.lease))
    if event.generation != local.running:
        return local
    if isinstance(event, WorkersElastic):
        return replace(local, elastic=event.elastic)
    if isinstance(event, WorkersFinished):
        left = local.left if local.stopping else event.left
        return replace(local, finished=event.finished, left=left)
    return replace(local, running=0, stopping=False, patient=False)


def _release_failure(state: State, now: float) -> State:
    """A failure is kept back until its time is over or another cause has ended the generation."""
    match state.result:
        case Held(failure, until) if now >= until or not _present(state):
            return replace(state, result=Failed(failure))
    return state


def _present(state: State) -> bool:
    """Whether the generation that ran here last is still the job's.

    The ledger of a claim may be seen before its round.
    """
    view, ran = state.view, state.local.ran
    if view is None or view.round is None:
        return False
    return view.round.generation == ran and view.ledger.generation <= ran


# --- what follows -------------------------------------------------------------------------


def _begin_to_leave(state: State, actions: list[Action]) -> State:
    """On a signal, or on an order, which says how long the workers have."""
    departure, state = _departure(state), _end_life(state, Left())
    grace = Grace.LEAVE if departure is None or departure.save else Grace.CHANGE
    return _stop_workers(state, actions, grace, departure.seconds if departure else None)


def _stop_workers(
    state: State, actions: list[Action], grace: Grace, seconds: float | None = None
) -> State:
    """Once; and once more where they had all the time that they need, and have not any more."""
    local, patient = state.local, grace is Grace.JOIN
    if local.running and (not local.stopping or (local.patient and not patient)):
        actions.append(StopWorkers(grace, seconds=seconds))
        return replace(state, local=replace(local, stopping=True, patient=patient))
    return state


def _end_life(state: State, why: Ending) -> State:
    """Exit when no worker is left; the first cause is told. No key is put back first."""
    if state.life is Life.UNLISTED:
        state = _lose_lease(state)
    return replace(state, life=Life.LEAVING, ending=state.ending or why)


def _react(state: State, now: float, actions: list[Action]) -> State:
    """Do what follows from all that is known, in the order of urgency."""
    if state.local.leaving and not state.ending:
        state = _begin_to_leave(state, actions)
    if state.life in (Life.LOST, Life.LEAVING):
        state = _stop_workers(state, actions, Grace.FAILURE)
        if not state.local.running:
            return _exit_or_rejoin(state, actions)
    if state.life in (Life.JOINING, Life.ENDED) or not state.local.lease:
        return state
    if isinstance(state.ending, Outdated):
        return state
    if _waits_to_be_listed(state):
        return _set_timer(state, rules.Wait("its key is gone"), now, actions)
    if _cut_off(state) and (state.local.leaving or state.life is Life.LEAVING):
        state = _set_timer(state, rules.Wait("leaving"), now, actions)
    if state.local.leaving:
        if state.marked or _is_done(state):
            return state
        return _write(state, actions, MarkLeaving(), 0, ("leaving",))
    state = _report_end(state, actions)
    if state.view is None or state.limits is None or state.life is Life.LEAVING:
        return state
    return _decide(state, state.view, state.limits, now, actions)


def _is_done(state: State) -> bool:
    """Whether the others know that all workers here exited 0: nobody waits for this node."""
    finished = isinstance(state.result, Finished)
    return finished and state.local.reported == state.local.ran


def _exit_or_rejoin(state: State, actions: list[Action]) -> State:
    """No worker is left: exit, or join again."""
    if state.ending:
        actions.append(Exit(state.ending))
        return replace(state, life=Life.ENDED)
    actions.append(Rejoin())
    return replace(state, life=Life.JOINING)


def _report_end(state: State, actions: list[Action]) -> State:
    """A failure is reported unless it is held; success at once, whatever the workers leave.

    A failure that is told after the next generation has begun may be of that: a victim's.
    """
    generation = state.local.ran
    if state.local.reported == generation:
        return state
    match state.result:
        case Failed(failure):
            report = ReportEnd(failure, not _present(state))
        case Finished():
            report = ReportEnd(None)
        case _:
            return state
    ledger = state.view.ledger_mod if state.view else 0
    basis = ("report", generation, int(report.victim), ledger)
    return _write(state, actions, report, generation, basis)


def _decide(
    state: State, view: View, limits: schema.Limits, now: float, actions: list[Action]
) -> State:
    lasted = state.lasted.seconds if state.lasted.generation == view.ledger.final else 0.0
    clock = now if state.silent_since is None else state.silent_since
    phase, join = clock - state.phase_since, clock - state.join_since
    waited = clock - (clock if state.vacant_since is None else state.vacant_since)
    listing = max(0.0, state.listing_until - clock)
    elapsed = rules.Elapsed(max(0.0, phase), max(0.0, join), lasted, max(0.0, waited), listing)
    scaled = requests.scaled(view, state.local.run, limits)
    decision = rules.decide(view, state.local, scaled, elapsed)
    if decision.reason != state.logged:
        actions.append(Log(decision))
        state = replace(state, logged=decision.reason)
    if isinstance(decision, rules.Stop):
        grace = Grace.CHANGE if decision.planned else Grace.FAILURE
        grace = Grace.JOIN if decision.patient else grace
        state = _stop_workers(state, actions, grace)
        return _decide(state, view, limits, now, actions)
    state = _set_timer(state, decision, now, actions)
    match decision:
        case rules.Wait():
            return state
        case rules.Leave(reason):
            state = _stop_workers(_end_life(state, Over(reason)), actions, Grace.CHANGE)
            return _react(state, now, actions)
        case rules.Run(_, begins, part):
            state = _start_workers(state, begins, part, actions)
            return _decide(state, view, limits, now, actions)  # a coordinator has more to do
    generation = view.round.generation if view.round else 0
    kind = type(decision).__name__
    basis = (kind, view.round_mod, view.ledger_mod, state.local.acked)
    return _write(state, actions, decision, generation, basis)


def _set_timer(state: State, decision: rules.Decision, now: float, actions: list[Action]) -> State:
    """Due when the decision may change, a failure was held for long enough or a lease may end.

    While etcd is silent only its answer changes a decision.
    """
    due = [state.result.until] if isinstance(state.result, Held) else []
    if cut_off := _cut_off(state):
        due.append(cut_off[0])
    answers = state.silent_since is None
    if answers and isinstance(decision, rules.Wait) and decision.until is not None:
        due.append(now + decision.until)
    at = min(due, default=None)
    if at == state.timer:
        return state
    actions.append(SetTimer(at))
    return replace(state, timer=at)


def _start_workers(
    state: State, begins: schema.Round, part: schema.Participant, actions: list[Action]
) -> State:
    assert not state.local.running, "I3: older workers are alive"
    actions.append(StartWorkers(begins, part))
    generation = begins.generation
    local = replace(state.local, running=generation, ran=generation)
    local = replace(local, elastic=False, finished=False, left="", dead=())
    return replace(state, local=local, result=None, alive=state.nproc)


def _write(
    state: State, actions: list[Action], what: Writable, generation: int, basis: Basis
) -> State:
    """Begin a write, if none is under way; each only once on the same basis."""
    if state.pending or state.tried == basis:
        return state
    write = Write(what, state.local.lease, generation)
    actions.append(write)
    return replace(state, pending=write, tried=basis)


# --- records ------------------------------------------------------------------------------


def to_json(value: Struct) -> bytes:
    """Make a line of JSON, from which `from_json` makes an equal value.

    Half a character in the words of a worker becomes a question mark.
    """
    try:
        return msgspec.json.encode(value, enc_hook=int)  # a Lease
    except UnicodeEncodeError:
        fields = msgspec.to_builtins(value, enc_hook=int)
        return json.dumps(fields, ensure_ascii=False).encode(errors="replace")


def from_json(kind: Any, line: bytes) -> Any:
    """The value in `line`, which is of `kind`. Raises ValueError."""
    try:
        return msgspec.json.decode(line, type=kind, dec_hook=_recorded_lease)
    except msgspec.MsgspecError as error:  # in its older versions no ValueError
        raise ValueError(str(error)) from None


def _recorded_lease(kind: type, lease: Any) -> Any:
    return kind(lease)
