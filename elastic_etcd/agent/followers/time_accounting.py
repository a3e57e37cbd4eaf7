"""The time accounting of this node's worlds, for the job's history and for --metrics-addr.

It reads the workers' pages when a world begins and when it ends, and not while it trains. All
times are of this agent's clock. The uses of a node's time::

      others begin, and end                  ee.run         it is done
    OTHERS <----> APART --> START -------> FIRST_STEP -------> TRAINED
                    ^         |                |                  |
                    |         +----------------+------------------+
      workers are gone        | the world is over                 | it has finished
                    +------- STOP              DONE: like APART, while others train on
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from msgspec.structs import replace

from elastic_etcd.agent.followers.recovery import Recovery
from elastic_etcd.agent.inbox import Timer
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core.failure_policies import seconds_since_restart
from elastic_etcd.core.lifecycle import Event, Finished, State
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Phase, Round, Spent
from elastic_etcd.core.view import View
from elastic_etcd.protocol.activity import Activity, Doing

log = logging.getLogger(__name__)

_SOONEST, _LATEST = 0.01, 1.0  # seconds between two looks for a world's first step
_FINER = 0.1  # than so much of what is measured
_NO_STEP = frozenset((Doing.COMMIT, Doing.SAVE, Doing.QUIET))  # and training all the same


class Use(Enum):
    """A use of a node's time."""

    APART = auto()  # the way to a world
    OTHERS = auto()  # a world without this node
    START = auto()  # of its workers
    FIRST_STEP = auto()  # in all of them
    TRAINED = auto()
    STOP = auto()  # of its workers
    DONE = auto()


@dataclass(frozen=True)
class Stretch:
    """A stretch of a node's time: its use, and when it began."""

    use: Use
    since: float
    after: "Stretch | None" = None  # START, before FIRST_STEP; before STOP, what was under way
    other: Round | None = None  # of OTHERS


class TimeAccounting:
    """Accounts for one world after the other, and for each `recovery` in between."""

    def __init__(self, workers: Workers) -> None:
        self.recovery = Recovery()
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._state = State(Local(run=""), 0)
        self._at = Stretch(Use.APART, self._loop.time())
        self._generation = 0  # of the world that has ended last
        self._spent = Spent()  # on it, or on the one that trains
        self._last: float | None = None  # when the newest step here was done, in any world
        self._commits = False  # ever
        self._looking = Timer()

    def spent_on(self, generation: int) -> Spent | None:
        """The time spent on this world, or None if it is not the last one that this node saw.

        While its workers are still stopping it is as much as is known by now.
        """
        return self._spent.plus(Spent(worlds=0)) if generation == self._generation else None

    def see(self, before: State, event: Event, state: State) -> None:
        """Take note of the agent's new state, which may lead over several stretches."""
        del event
        self._state, now = state, self._loop.time()
        while (at := self._next(before, now)) is not self._at:
            self._at = at
        if not state.local.running and is_spare(state):
            self.recovery.forget()

    def _next(self, before: State, now: float) -> Stretch:
        """The stretch that follows on the one of now, or that one itself."""
        at, was, own, view = self._at, before.local, self._state.local, self._state.view
        over = own.stopping or not own.running or isinstance(self._state.result, Finished)
        begins = not over and own.running != was.running
        last, final = _final(before), _final(self._state)
        new = final.generation if final else 0
        known = not own.running and view and (final is None or _is_known(view, final))
        match at.use:
            case Use.START | Use.FIRST_STEP | Use.TRAINED:
                at = self._end_world(was.running, now) if over else at
            case Use.STOP if at.after and not own.running:
                self._spent = self._measured(at.after, at.since, now)
                self.recovery.pass_phase("stop", now)
                at = Stretch(Use.APART, now)
            case Use.DONE if at.since < now and last and last.generation == self._generation:
                self._spent = replace(self._spent, trained=self._spent.trained + now - at.since)
                at = Stretch(Use.DONE, now)  # the others have trained on
            case Use.DONE if at.since < now and was.running and not own.running:
                self._spent = replace(self._spent, stop=now - at.since)
                at = Stretch(Use.DONE, now)
            case Use.APART if at.since < now and own.lease and not was.lease and not was.ran:
                at = Stretch(Use.APART, now)
            case _ if begins and view and view.round:
                at = self._begin_world(view, view.round, now)
            case Use.APART | Use.DONE if known and final and new != self._generation:
                at = Stretch(Use.OTHERS, now, other=final)
            case Use.OTHERS if known and at.other and new != at.other.generation:
                self._generation = at.other.generation  # only its seconds are known
                self._spent = Spent(planned=int(at.other.planned), unknown=now - at.since)
                at = Stretch(Use.APART, now)
        return at

    def _begin_world(self, view: View, begun: Round, now: float) -> Stretch:
        self._tell_world(view, begun, now)
        self.recovery.begin_world(begun.cause, now)
        self._spent = Spent(planned=int(begun.planned), rendezvous=now - self._at.since)
        self._looking.start(_SOONEST, self._look_for_step)
        return Stretch(Use.START, now)

    def _tell_world(self, view: View, begun: Round, now: float) -> None:
        """The line of a change: why, this node's place, and what it has cost until now."""
        part, limits = view.part(self._state.local.lease), self._state.limits
        if part is None or limits is None:
            return
        last = part.first_rank + part.nproc - 1
        ranks = f"ranks {part.first_rank}-{last}" if part.nproc > 1 else f"rank {last}"
        told = f"group rank {part.group_rank} of {begun.nodes}, {ranks} of {begun.world_size}"
        if begun.restarts and not seconds_since_restart(begun):
            told += f", restart {begun.restarts} of {limits.max_restarts}"
        if self._last is not None:
            told += f", {now - self._last:.1f} s after the last step"
            if self._spent.again >= _FINER:
                told += f", {self._spent.again:.1f} s are trained again"
        log.info("generation %d (%s): %s", begun.generation, begun.reason, told)

    def _look_for_step(self) -> None:
        """Look for the first step again and again, the less often the longer it takes."""
        now = self._loop.time()
        self._at = self._look(now)
        if self._at.use is not Use.TRAINED:
            began = (self._at.after or self._at).since
            pause = min(max(_SOONEST, _FINER * (now - began)), _LATEST)
            self._looking.start(pause, self._look_for_step)

    def _look(self, now: float) -> Stretch:
        """See how far the workers are."""
        at, pages = self._at, self._activities()
        if at.use is Use.START and pages and all(p.doing is not Doing.STARTING for p in pages):
            entered = max(at.since, now - min(page.since_init for page in pages))
            self._spent = replace(self._spent, start=entered - at.since)
            self.recovery.pass_phase("start", entered)
            at = Stretch(Use.FIRST_STEP, entered, after=at)
        if at.use is not Use.TRAINED and pages and all(page.steps for page in pages):
            pause = now - self._last if self._last is not None else 0.0
            self._spent = replace(self._spent, first_step=now - at.since, pause=pause)
            self.recovery.train(now)
            at = Stretch(Use.TRAINED, now)
        return at

    def _end_world(self, generation: int, now: float) -> Stretch:
        self._looking.cancel()
        at, self._generation = self._look(now), generation
        if isinstance(self._state.result, Finished):
            self.recovery.forget()
            self._spent = self._measured(at, now, now, finished=True)
            return Stretch(Use.DONE, now)
        self.recovery.end_world(now, now - _trained_until(self._activities(), now, now))
        self._spent = self._measured(at, now, now)
        return Stretch(Use.STOP, now, after=at)

    def _measured(self, at: Stretch, end: float, now: float, *, finished: bool = False) -> Spent:
        """On the world that has ended in that stretch; some workers may still run."""
        if at.use is not Use.TRAINED:  # done, or steps that nobody sees, or a bad start
            start = "unknown" if self._last is None else "start"
            part = "first_step" if at.use is Use.FIRST_STEP else start
            seconds = {"trained" if finished else part: end - at.since}
            return replace(self._spent, stop=now - end, **seconds)
        pages = self._activities()
        last = end if finished else max(at.since, _trained_until(pages, now, end))
        self._last = last
        commits = [page.since_commit for page in pages if page.commits]
        self._commits = self._commits or bool(commits)
        trained = last - at.since
        lost = max(0.0, min(commits) - now + last) if commits else trained
        return replace(
            self._spent,
            steps=min(page.steps for page in pages),
            commits=max(page.commits for page in pages),
            trained=trained,
            again=min(trained, lost) if self._commits and not finished else 0.0,
            detect=max(0.0, end - last),
            stop=now - max(end, last),
        )

    def _activities(self) -> list[Activity]:
        return [page.read() for page in self._workers.pages]


def _trained_until(pages: Sequence[Activity], now: float, end: float) -> float:
    """When the newest step was done; what is no step, and under way at the end, is until then."""
    trained = [page for page in pages if page.steps]
    last = now - min((page.seconds for page in trained), default=0.0)
    return max(last, end) if any(page.doing in _NO_STEP for page in trained) else last


def _final(state: State) -> Round | None:
    """The round whose world trains."""
    now = state.view.round if state.view else None
    return now if now and now.phase is Phase.FINAL else None


def is_spare(state: State) -> bool:
    """Whether a world trains that has no place for this node."""
    own, view, final = state.local, state.view, _final(state)
    if view is None or final is None or view.part(own.lease):
        return False
    return _is_known(view, final) and own.acked == final.generation


def _is_known(view: View, final: Round) -> bool:
    """Whether it is known who is in this world: a page may come after its round."""
    page = view.page
    return page.generation == final.generation if page else len(view.world) == final.nodes
