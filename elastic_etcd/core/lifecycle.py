"""One agent's life as a pure function: `step(state, event) -> (state, actions)`.

Events are what happens to an agent (a view, a worker's end, a lost lease, a signal, a timer);
actions are what it then does. A recorded list of events replays in a test, and the model
checker drives this very function. What the job needs is decided in rules.py.
"""

from dataclasses import dataclass, replace

from elastic_etcd.core.events import (
    Action,
    Arm,
    Broken,
    Emptied,
    Event,
    Exit,
    Grace,
    Joined,
    LeaseLost,
    Rejoin,
    Say,
    Signalled,
    Start,
    Stop,
    Viewed,
    WorkerEnded,
    Write,
    Wrote,
)
from elastic_etcd.core.rules import Act, Decision, Elapsed, Limits, Me, decide, vanished
from elastic_etcd.core.values import Failure, Phase, Report
from elastic_etcd.core.view import EVERYTHING, Coverage, View

# Seconds for which a failure is kept back that a peer seems to have caused: the cause may be known
# later than what follows from it, because a dying process closes its connections before it is gone.
HOLD = 2.0


@dataclass(frozen=True, slots=True)
class State:
    """All that an agent remembers. Times are on the local monotonic clock, in seconds."""

    me: Me
    nproc: int
    view: View | None = None
    alive: int = 0  # workers that have not exited yet
    failure: Failure | None = None  # of the generation that ran last, to be reported
    victim: bool = False  # that failure came after the next generation had begun
    held: float | None = None  # until when that failure is kept back
    finished: bool = False  # all workers of it exited 0
    lost: bool = False  # the lease is gone: rejoin when no worker is left
    marked: bool = False  # the others know that this node is leaving
    ending: Exit | None = None  # exit when no worker is left
    over: bool = False  # Exit or Rejoin was asked for
    writing: Write | None = None
    tried: tuple[object, ...] = ()  # fingerprint of the last write and what it was based on
    phase_since: float = 0.0
    join_since: float = 0.0
    ran: tuple[int, float] = (0, 0.0)  # a generation seen final, and for how long
    armed: float | None = None
    said: str = ""


def step(state: State, event: Event, now: float, limits: Limits) -> tuple[State, list[Action]]:
    """What the agent is after `event` at `now`, and what it does."""
    state = _released(_absorb(state, event, now), now)
    actions: list[Action] = []
    if _failed(state):
        state = _stop(state, actions, Grace.FAILURE)
    return _react(state, now, limits, actions), actions


def coverage(state: State) -> Coverage:
    """What this agent mirrors: everything if it is the coordinator, as far as it knows."""
    now = state.view.round if state.view else None
    if now is None:
        return None
    return EVERYTHING if now.coordinator == state.me.lease else now.coordinator


def _absorb(state: State, event: Event, now: float) -> State:
    me = state.me
    match event:
        case Viewed(view):
            return _lost(state) if vanished(view, me) else _seen(state, view, now)
        case Joined(run, spec, lease, created):
            me = replace(me, run=run, spec=spec, lease=lease, created=created)
            state = replace(state, view=None, lost=False, over=False, writing=None, tried=())
            return replace(_unended(state), me=me)
        case LeaseLost():  # also while joining again: then once more
            return replace(_lost(state), over=False)
        case Wrote(ok):
            return _answered(state, ok)
        case WorkerEnded():
            return _ended(state, event, now)
        case Emptied(generation) if generation == me.running:
            return replace(state, me=replace(me, running=0, stopping=False))
        case Signalled():
            return replace(state, me=replace(me, leaving=True), over=False)
        case Broken(why):
            return replace(state, ending=state.ending or Exit(why), over=False)
    return state


def _seen(state: State, view: View, now: float) -> State:
    """Take in a view; note when its phase and its newest member were first seen."""
    old = state.view
    was = (old.round.generation, old.round.phase) if old and old.round else None
    is_ = (view.round.generation, view.round.phase) if view.round else None
    known = {m.lease for m in old.members} if old else set()
    arrived = any(m.lease not in known for m in view.members)
    ran = state.ran
    if was and was[1] is Phase.FINAL and was != is_:
        ran = (was[0], now - state.phase_since)
    return replace(
        state,
        view=view,
        ran=ran,
        phase_since=state.phase_since if was == is_ else now,
        join_since=now if arrived else state.join_since,
    )


def _lost(state: State) -> State:
    """No member any more: nothing that was acked or seen counts."""
    me = replace(state.me, lease=0, created=0, acked=0)
    return replace(state, me=me, view=None, lost=True, marked=False)


def _answered(state: State, ok: bool) -> State:
    """A refused write is not tried again before the view has changed."""
    write, me = state.writing, state.me
    state = replace(state, writing=None)
    if write is None or write.lease != me.lease:
        return state
    if isinstance(write.what, Report):
        if not ok and write.what.failure and not write.what.victim:
            return replace(state, victim=True)  # the next generation was faster; tell it as such
        return replace(state, me=replace(me, reported=write.generation))
    if write.what is None:
        return replace(state, marked=True)
    if ok and write.what.act is Act.ACK:
        return replace(state, me=replace(me, acked=write.generation))
    return state


def _ended(state: State, event: WorkerEnded, now: float) -> State:
    """Of a generation that is being stopped, no worker's end is a failure of its own."""
    if event.generation != state.me.running:
        return state
    state = replace(state, alive=state.alive - 1)
    if state.me.stopping:
        return state
    if not event.failure:
        return replace(state, finished=state.alive == 0 and not state.failure)
    if state.failure and event.by_peer:  # one that is held already speaks for both
        return state
    held = now + HOLD if event.by_peer else None
    return replace(state, failure=event.failure, victim=not _present(state), held=held)


def _released(state: State, now: float) -> State:
    """A failure is kept back until its time is over or another cause has ended the generation."""
    present = _present(state)
    if state.held is None or (now < state.held and present):
        return state
    return replace(state, held=None, victim=not present)


def _failed(state: State) -> bool:
    """Whether there is a failure that is not kept back."""
    return state.failure is not None and state.held is None


def _present(state: State) -> bool:
    """Whether the generation that ran here last is still the job's."""
    now = state.view.round if state.view else None
    return now is not None and now.generation == state.me.ran


def _unended(state: State) -> State:
    """Nothing is known of any worker's end."""
    return replace(state, failure=None, victim=False, held=None, finished=False)


def _stop(state: State, actions: list[Action], grace: Grace) -> State:
    if state.me.running and not state.me.stopping:
        actions.append(Stop(grace))
        return replace(state, me=replace(state.me, stopping=True))
    return state


def _react(state: State, now: float, limits: Limits, actions: list[Action]) -> State:
    """What follows from all that is known, in the order of urgency."""
    if state.me.leaving and not state.ending:
        state = _stop(replace(state, ending=Exit(None)), actions, Grace.LEAVE)
    if state.ending or state.lost:
        state = _stop(state, actions, Grace.FAILURE)
        if not state.me.running and not state.over:
            actions.append(state.ending or Rejoin())
            return replace(state, over=True)
    if state.over or not state.me.lease:
        return state
    if state.me.leaving:
        return state if state.marked else _write(state, actions, None, 0, ("leaving",))
    if _owes_report(state):
        report = Report(state.me.lease, 0, state.failure, state.victim)
        basis = ("report", state.me.ran, state.victim)
        state = _write(state, actions, report, state.me.ran, basis)
    if state.view is None or state.ending:
        return state
    return _decide(state, state.view, now, limits, actions)


def _owes_report(state: State) -> bool:
    """A failure is reported unless it is held, success when no process of the workers is left."""
    ended = _failed(state) or (state.finished and not state.me.running)
    return ended and state.me.reported != state.me.ran


def _decide(state: State, view: View, now: float, limits: Limits, actions: list[Action]) -> State:
    generation, seconds = state.ran
    ran = seconds if generation == view.ledger.final else 0.0
    elapsed = Elapsed(now - state.phase_since, now - state.join_since, ran)
    decision = decide(view, state.me, limits, elapsed)
    if decision.reason != state.said:
        actions.append(Say(decision))
        state = replace(state, said=decision.reason)
    if decision.act is Act.STOP:
        planned = view.round and view.round.planned
        state = _stop(state, actions, Grace.CHANGE if planned else Grace.FAILURE)
        return _decide(state, view, now, limits, actions)
    waits = None if decision.until is None else now + decision.until
    due = min((at for at in (waits, state.held) if at is not None), default=None)
    if due != state.armed:
        actions.append(Arm(due))
        state = replace(state, armed=due)
    if decision.act is Act.LEAVE:
        state = _stop(replace(state, ending=Exit(decision.reason)), actions, Grace.CHANGE)
        return _react(state, now, limits, actions)
    if decision.act is Act.RUN:
        assert decision.round
        assert state.me.lease
        assert not state.me.running, "I3: older workers are alive"
        actions.append(Start(decision.round))
        generation = decision.round.generation
        me = replace(state.me, running=generation, ran=generation)
        state = replace(_unended(state), me=me, alive=state.nproc)
        return _decide(state, view, now, limits, actions)  # a coordinator has more to do
    if decision.act is Act.WAIT:
        return state
    generation = view.round.generation if view.round else 0
    basis = (decision.act, view.round_mod, view.ledger_mod, state.me.acked)
    return _write(state, actions, decision, generation, basis)


def _write(
    state: State,
    actions: list[Action],
    what: Decision | Report | None,
    generation: int,
    basis: tuple[object, ...],
) -> State:
    """One write at a time, and each only once on the same basis."""
    if state.writing or state.tried == basis:
        return state
    write = Write(what, state.me.lease, generation)
    actions.append(write)
    return replace(state, writing=write, tried=basis)
