"""One agent's life as a pure function: `step(state, event, now, limits) -> (state, actions)`.

An event is what happens to an agent: a view, a worker's end, a lost lease, a signal, a timer. An
action is what the agent then does. Both are plain values with a JSON form. The flight recorder
(agent/recorder.py) writes them down, and tests/support/replay.py steps through them once more. The
model checker drives this very function. What the job needs is decided in rules.py.
"""

import json
from enum import Enum
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from elastic_etcd.core.rules import (
    Ack,
    Claim,
    Close,
    Decision,
    Elapsed,
    Finalise,
    Freeze,
    Leave,
    Limits,
    Local,
    Open,
    Run,
    Stop,
    Wait,
    decide,
    vanished,
)
from elastic_etcd.core.schema import VERSION, Failure, Phase, Round
from elastic_etcd.core.view import Coverage, Everything, Narrow, View
from elastic_etcd.times import HOLD


class Grace(Enum):
    """Why workers are stopped; how long they get before SIGKILL depends on it."""

    FAILURE = "failure"
    CHANGE = "change"
    LEAVE = "leave"


# --- why an agent ends --------------------------------------------------------------------


class Left(Struct, frozen=True, tag=True):
    """A signal told it to go."""


class Over(Struct, frozen=True, tag=True):
    """The job is over for this node."""

    reason: str


class Error(Struct, frozen=True, tag=True):
    """Going on is impossible; the user is told why."""

    reason: str


class Outdated(Struct, frozen=True, tag=True):
    """The job is written in a format above ours: this agent may not write at all."""

    version: int

    @property
    def reason(self) -> str:
        """What the user is told."""
        newer = f"this job was written by a newer elastic_etcd (format {self.version})"
        return f"{newer}; this one knows format {VERSION}: install the newer one here, too"


Ending: TypeAlias = Left | Over | Error | Outdated


# --- events -------------------------------------------------------------------------------


class ViewChanged(Struct, frozen=True, tag=True):
    """There is a newer view of the job."""

    view: View


class Joined(Struct, frozen=True, tag=True):
    """The member key is written. Local says what the fields are."""

    run: str
    spec: int
    lease: int
    created: int


class LeaseLost(Struct, frozen=True, tag=True):
    """The server says that the lease is gone."""

    reason: str


class WriteDone(Struct, frozen=True, tag=True):
    """The pending write was answered; `ok` is whether its fence held."""

    ok: bool


class WorkerEnded(Struct, frozen=True, tag=True):
    """A worker exited; `failure` is None for exit code 0.

    `by_peer`: it says itself that it failed because a peer was gone.
    """

    generation: int
    failure: Failure | None
    by_peer: bool = False


class WorkersGone(Struct, frozen=True, tag=True):
    """No process of that generation's workers is left on this node."""

    generation: int


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


Event: TypeAlias = (
    ViewChanged
    | Joined
    | LeaseLost
    | WriteDone
    | WorkerEnded
    | WorkersGone
    | Signalled
    | Silent
    | Answered
    | Tick
    | Fatal
)


# --- what is written ----------------------------------------------------------------------


class ReportEnd(Struct, frozen=True, tag=True):
    """Say how this node's workers ended: `failure` is None when all of them exited 0."""

    failure: Failure | None
    victim: bool = False


class MarkLeaving(Struct, frozen=True, tag=True):
    """Say that this node is leaving."""


Writable: TypeAlias = Claim | Open | Freeze | Ack | Finalise | Close | ReportEnd | MarkLeaving


# --- actions ------------------------------------------------------------------------------


class Write(Struct, frozen=True, tag=True):
    """Put it into etcd, as the member with `lease`; answered by WriteDone."""

    what: Writable
    lease: int
    generation: int = 0


class StartWorkers(Struct, frozen=True, tag=True):
    """Start the workers of this final round."""

    round: Round


class StopWorkers(Struct, frozen=True, tag=True):
    """Stop the workers; answered by WorkersGone."""

    grace: Grace


class Rejoin(Struct, frozen=True, tag=True):
    """Join again, as another incarnation; answered by Joined."""


class Exit(Struct, frozen=True, tag=True):
    """End the agent; no worker is alive."""

    why: Ending


class SetTimer(Struct, frozen=True, tag=True):
    """Send Tick at `at` on the local monotonic clock; replaces the timer before it."""

    at: float | None


class Log(Struct, frozen=True, tag=True):
    """Log a decision whose reason changed."""

    decision: Decision


Action: TypeAlias = Write | StartWorkers | StopWorkers | Rejoin | Exit | SetTimer | Log


# --- state --------------------------------------------------------------------------------


class Life(Enum):
    """How far an agent's life has come.

    JOINING ──Joined──> MEMBER ──lease lost──> LOST ──no worker is left──> JOINING
    any of these ──Signalled, Fatal, Leave──> LEAVING ──no worker is left──> ENDED
    """

    JOINING = "joining"
    MEMBER = "member"
    LOST = "lost"
    LEAVING = "leaving"
    ENDED = "ended"


class Held(Struct, frozen=True, tag=True):
    """A worker failed, it seems because of a peer. The failure is held until `until`."""

    failure: Failure
    until: float


class Failed(Struct, frozen=True, tag=True):
    """A worker failed; of a `victim` the next generation had begun by then."""

    failure: Failure
    victim: bool


class Finished(Struct, frozen=True, tag=True):
    """All workers exited 0."""


class Lasted(Struct, frozen=True):
    """A generation that was seen final, and for how many seconds."""

    generation: int = 0
    seconds: float = 0.0


Basis: TypeAlias = tuple[str | int, ...]


class State(Struct, frozen=True):
    """All that an agent remembers. Times are on the local monotonic clock, in seconds."""

    local: Local
    nproc: int
    life: Life = Life.JOINING
    ending: Ending | None = None  # why, when LEAVING or ENDED
    view: View | None = None
    alive: int = 0  # workers that have not exited yet
    result: Held | Failed | Finished | None = None  # of the generation that ran last
    marked: bool = False  # the others know that this node is leaving
    pending: Write | None = None
    tried: Basis = ()  # what was written last, and on what it was based
    phase_since: float = 0.0
    join_since: float = 0.0
    silent_since: float | None = None  # None: etcd answers
    lasted: Lasted = Lasted()
    timer: float | None = None  # when it is due
    logged: str = ""  # the reason


def step(state: State, event: Event, now: float, limits: Limits) -> tuple[State, list[Action]]:
    """What the agent is after `event` at `now`, and what it does."""
    state = _release_failure(_absorb(state, event, now), now)
    actions: list[Action] = []
    if isinstance(state.result, Failed):
        state = _stop_workers(state, actions, Grace.FAILURE)
    return _react(state, now, limits, actions), actions


def coverage(state: State) -> Coverage:
    """What this agent mirrors: everything if it is the coordinator, as far as it knows."""
    now = state.view.round if state.view else None
    if now is None:
        return Narrow()
    return Everything() if now.coordinator == state.local.lease else Narrow(now.coordinator)


# --- what an event changes ----------------------------------------------------------------


def _absorb(state: State, event: Event, now: float) -> State:
    local = state.local
    match event:
        case ViewChanged(view) if view.newer:
            outdated = Outdated(view.newer)
            return replace(_end_life(state, outdated), view=view, ending=outdated)
        case ViewChanged(view):
            return _lose_lease(state) if vanished(view, local) else _take_view(state, view, now)
        case Joined():
            return _become_member(state, event)
        case LeaseLost():
            lost = replace(_lose_lease(state), life=Life.LOST)  # while joining: then once more
            return replace(lost, life=Life.LEAVING) if state.ending else lost
        case WriteDone(ok):
            return _hear_answer(state, ok)
        case WorkerEnded():
            return _end_worker(state, event, now)
        case WorkersGone(generation) if generation == local.running:
            return replace(state, local=replace(local, running=0, stopping=False))
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
        view=None,
        result=None,
        pending=None,
        tried=(),
        silent_since=None,
    )


def _take_view(state: State, view: View, now: float) -> State:
    """Take in a view; note when its phase and its newest member were first seen."""
    old = state.view
    was = (old.round.generation, old.round.phase) if old and old.round else None
    is_ = (view.round.generation, view.round.phase) if view.round else None
    known = {m.lease for m in old.members} if old else set()
    arrived = any(m.lease not in known for m in view.members)
    lasted = state.lasted
    if was and was[1] is Phase.FINAL and was != is_:
        lasted = Lasted(was[0], now - state.phase_since)
    return replace(
        state,
        view=view,
        lasted=lasted,
        phase_since=state.phase_since if was == is_ else now,
        join_since=now if arrived else state.join_since,
    )


def _leave_out_silence(state: State, now: float) -> State:
    """Nobody could come while etcd was silent, so no clock has run; but a world trains on."""
    silent = state.silent_since
    if silent is None:
        return state
    joined = state.join_since + now - max(state.join_since, silent)
    began = state.phase_since + now - max(state.phase_since, silent)
    seen = state.view.round if state.view else None
    if seen and seen.phase is Phase.FINAL:
        began = state.phase_since
    return replace(state, silent_since=None, join_since=joined, phase_since=began)


def _lose_lease(state: State) -> State:
    """No member any more: nothing that was acked or seen counts."""
    local = replace(state.local, lease=0, created=0, acked=0)
    life = Life.LOST if state.life is Life.MEMBER else state.life
    return replace(state, local=local, life=life, view=None, marked=False)


def _hear_answer(state: State, ok: bool) -> State:
    """A refused write is not tried again before the view has changed."""
    write, local = state.pending, state.local
    state = replace(state, pending=None)
    if write is None or write.lease != local.lease:
        return state
    match write.what:
        case ReportEnd(Failure(), False) if not ok and isinstance(state.result, Failed):
            # The next generation was faster; tell it as its victim.
            return replace(state, result=replace(state.result, victim=True))
        case ReportEnd():
            return replace(state, local=replace(local, reported=write.generation))
        case MarkLeaving():
            return replace(state, marked=True)
        case Ack() if ok:
            return replace(state, local=replace(local, acked=write.generation))
    return state


def _end_worker(state: State, event: WorkerEnded, now: float) -> State:
    """Of a generation that is being stopped, no worker's end is a failure of its own."""
    if event.generation != state.local.running:
        return state
    state = replace(state, alive=state.alive - 1)
    if state.local.stopping:
        return state
    if not event.failure:
        finished = not state.alive and state.result is None
        return replace(state, result=Finished()) if finished else state
    if event.by_peer:  # one that is held already speaks for both
        return replace(state, result=state.result or Held(event.failure, now + HOLD))
    return replace(state, result=Failed(event.failure, not _present(state)))


def _release_failure(state: State, now: float) -> State:
    """A failure is kept back until its time is over or another cause has ended the generation."""
    match state.result:
        case Held(failure, until) if now >= until or not _present(state):
            return replace(state, result=Failed(failure, not _present(state)))
    return state


def _present(state: State) -> bool:
    """Whether the generation that ran here last is still the job's."""
    now = state.view.round if state.view else None
    return now is not None and now.generation == state.local.ran


# --- what follows -------------------------------------------------------------------------


def _stop_workers(state: State, actions: list[Action], grace: Grace) -> State:
    if state.local.running and not state.local.stopping:
        actions.append(StopWorkers(grace))
        return replace(state, local=replace(state.local, stopping=True))
    return state


def _end_life(state: State, why: Ending) -> State:
    """Exit when no worker is left; the first cause is told."""
    return replace(state, life=Life.LEAVING, ending=state.ending or why)


def _react(state: State, now: float, limits: Limits, actions: list[Action]) -> State:
    """What follows from all that is known, in the order of urgency."""
    if state.local.leaving and not state.ending:
        state = _stop_workers(_end_life(state, Left()), actions, Grace.LEAVE)
    if state.life in (Life.LOST, Life.LEAVING):
        state = _stop_workers(state, actions, Grace.FAILURE)
        if not state.local.running:
            return _exit_or_rejoin(state, actions)
    if state.life in (Life.JOINING, Life.ENDED) or not state.local.lease:
        return state
    if isinstance(state.ending, Outdated):
        return state
    if state.local.leaving:
        return state if state.marked else _write(state, actions, MarkLeaving(), 0, ("leaving",))
    state = _report_end(state, actions)
    if state.view is None or state.life is Life.LEAVING:
        return state
    return _decide(state, state.view, now, limits, actions)


def _exit_or_rejoin(state: State, actions: list[Action]) -> State:
    """No worker is left: exit, or join again."""
    if state.ending:
        actions.append(Exit(state.ending))
        return replace(state, life=Life.ENDED)
    actions.append(Rejoin())
    return replace(state, life=Life.JOINING)


def _report_end(state: State, actions: list[Action]) -> State:
    """A failure is reported unless it is held, success when no process of the workers is left."""
    generation = state.local.ran
    if state.local.reported == generation:
        return state
    match state.result:
        case Failed(failure, victim):
            report = ReportEnd(failure, victim)
        case Finished() if not state.local.running:
            report = ReportEnd(None)
        case _:
            return state
    basis = ("report", generation, int(report.victim))
    return _write(state, actions, report, generation, basis)


def _decide(state: State, view: View, now: float, limits: Limits, actions: list[Action]) -> State:
    lasted = state.lasted.seconds if state.lasted.generation == view.ledger.final else 0.0
    clock = now if state.silent_since is None else state.silent_since
    phase, join = clock - state.phase_since, clock - state.join_since
    elapsed = Elapsed(max(0.0, phase), max(0.0, join), lasted)
    decision = decide(view, state.local, limits, elapsed)
    if decision.reason != state.logged:
        actions.append(Log(decision))
        state = replace(state, logged=decision.reason)
    if isinstance(decision, Stop):
        grace = Grace.CHANGE if decision.planned else Grace.FAILURE
        state = _stop_workers(state, actions, grace)
        return _decide(state, view, now, limits, actions)
    state = _set_timer(state, decision, now, actions)
    match decision:
        case Wait():
            return state
        case Leave(reason):
            state = _stop_workers(_end_life(state, Over(reason)), actions, Grace.CHANGE)
            return _react(state, now, limits, actions)
        case Run(_, begins):
            state = _start_workers(state, begins, actions)
            return _decide(state, view, now, limits, actions)  # a coordinator has more to do
    generation = view.round.generation if view.round else 0
    kind = type(decision).__name__
    basis = (kind, view.round_mod, view.ledger_mod, state.local.acked)
    return _write(state, actions, decision, generation, basis)


def _set_timer(state: State, decision: Decision, now: float, actions: list[Action]) -> State:
    """Due when the decision may change or a failure has been held for long enough.

    While etcd is silent only its answer changes a decision.
    """
    due = [state.result.until] if isinstance(state.result, Held) else []
    answers = state.silent_since is None
    if answers and isinstance(decision, Wait) and decision.until is not None:
        due.append(now + decision.until)
    at = min(due, default=None)
    if at == state.timer:
        return state
    actions.append(SetTimer(at))
    return replace(state, timer=at)


def _start_workers(state: State, begins: Round, actions: list[Action]) -> State:
    assert not state.local.running, "I3: older workers are alive"
    actions.append(StartWorkers(begins))
    generation = begins.generation
    local = replace(state.local, running=generation, ran=generation)
    return replace(state, local=local, result=None, alive=state.nproc)


def _write(
    state: State, actions: list[Action], what: Writable, generation: int, basis: Basis
) -> State:
    """One write at a time, and each only once on the same basis."""
    if state.pending or state.tried == basis:
        return state
    write = Write(what, state.local.lease, generation)
    actions.append(write)
    return replace(state, pending=write, tried=basis)


# --- records ------------------------------------------------------------------------------


def to_json(value: Struct) -> bytes:
    """One line of JSON, from which `from_json` makes an equal value.

    Half a character in what a worker said becomes a question mark.
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
