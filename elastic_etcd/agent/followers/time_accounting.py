"""The time accounting of this node's worlds, for the job's history and for --metrics-addr.

It reads the workers' pages when a world begins and when it ends, and not while it trains. All
times are of this agent's clock.
"""

import asyncio
import logging
from collections.abc import Sequence

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


class TimeAccounting:
    """Accounts for one world after the other, and for each `recovery` in between."""

    def __init__(self, workers: Workers) -> None:
        self.recovery = Recovery()
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._state = State(Local(run=""), 0)
        self._since = self._loop.time()  # when began what is under way
        self._generation = 0  # of the world that has ended last
        self._spent = Spent()  # on it, or on the one that trains
        self._other: Round | None = None  # a world that trains without this node
        self._began = self._ended = 0.0
        self._trains = False  # here
        self._finished = False  # and was done with it
        self._started = False
        self._first: float | None = None  # when the first step of the world was done
        self._last: float | None = None  # when the newest step here was done, in any world
        self._commits = False  # ever
        self._looking = Timer()

    def spent_on(self, generation: int) -> Spent | None:
        """The time spent on this world, or None if it is not the last one that this node saw.

        While its workers are still stopping it is as much as is known by now.
        """
        return self._spent.plus(Spent(worlds=0)) if generation == self._generation else None

    def see(self, before: State, event: Event, state: State) -> None:
        """Take note of the agent's new state."""
        del event
        self._state = state
        was, own, now = before.local, state.local, self._loop.time()
        if own.lease and not was.lease and not was.ran and not self._other:
            self._since = now
        over = own.stopping or not own.running or isinstance(state.result, Finished)
        if self._trains and over:
            self._end_world(was.running, now)
        elif self._finished and (final := _final(before)) and final.generation == self._generation:
            self._spent = replace(self._spent, trained=self._spent.trained + now - self._since)
            self._since = now  # the others have trained on
        if was.running and not own.running:
            ended = replace(self._spent, stop=now - self._since)
            self._spent = ended if self._finished else self._measured(now)
            self._since = now
            self.recovery.pass_phase("stop", now)
        if own.running and own.running != was.running:
            self._begin_world(now)
        if not own.running:
            self._follow_others(now)

    def _follow_others(self, now: float) -> None:
        """A world without this node's workers; of that only its seconds are known."""
        if is_spare(self._state):
            self.recovery.forget()
        if self._state.view is None:  # it joins again
            return
        final = _final(self._state)
        if final and final.generation == self._generation:
            final = None
        if final and not _is_known(self._state.view, final):
            return  # it may be this node's
        before, self._other = self._other, final
        if before and (final is None or final.generation != before.generation):
            self._generation = before.generation
            self._spent = Spent(planned=int(before.planned), unknown=now - self._since)
            self._since = now
        if final and (before is None or before.generation != final.generation):
            self._since = now

    # --- a world of this node's -----------------------------------------------------------

    def _begin_world(self, now: float) -> None:
        assert self._state.view
        begun = self._state.view.round
        assert begun
        self._tell_world(begun, now)
        self.recovery.begin_world(begun.cause, now)
        self._other = None
        self._spent = Spent(planned=int(begun.planned), rendezvous=now - self._since)
        self._since = self._began = now
        self._trains, self._started, self._first = True, False, None
        self._finished = False
        self._look_later(now)

    def _tell_world(self, begun: Round, now: float) -> None:
        """The line of a change: why, this node's place, and what it has cost until now."""
        view, limits = self._state.view, self._state.limits
        part = view.part(self._state.local.lease) if view else None
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
        self._look_now(now)
        if self._first is None:
            self._look_later(now)

    def _look_later(self, now: float) -> None:
        pause = min(max(_SOONEST, _FINER * (now - self._began)), _LATEST)
        self._looking.start(pause, self._look_for_step)

    def _look_now(self, now: float) -> None:
        pages = self._activities()
        if not self._started and pages and all(page.doing is not Doing.STARTING for page in pages):
            self._started = True
            entered = max(self._since, now - min(page.since_init for page in pages))
            self._spent = replace(self._spent, start=entered - self._since)
            self._since = entered
            self.recovery.pass_phase("start", entered)
        if pages and all(page.steps for page in pages):
            pause = now - self._last if self._last is not None else 0.0
            self._spent = replace(self._spent, first_step=now - self._since, pause=pause)
            self._first = self._since = now
            self.recovery.train(now)

    def _end_world(self, generation: int, now: float) -> None:
        self._looking.cancel()
        if self._first is None:
            self._look_now(now)
        self._trains, self._generation, self._ended = False, generation, now
        self._finished = isinstance(self._state.result, Finished)
        self._spent = self._measured(now)
        if self._finished:
            self._since = now
        idle = now - _trained_until(self._activities(), now, now)
        if self._finished:
            self.recovery.forget()
        else:
            self.recovery.end_world(now, idle)

    def _measured(self, now: float) -> Spent:
        """On the world that has ended, of which some workers may still run."""
        pages, end, finished = self._activities(), self._ended, self._finished
        if self._first is None:
            return self._without_step(end - self._since, finished=finished, stop=now - end)
        last = end if finished else max(self._first, _trained_until(pages, now, end))
        self._last = last
        commits = [page for page in pages if page.commits]
        self._commits = self._commits or bool(commits)
        trained, again = last - self._first, 0.0
        if commits and not finished:
            again = min(trained, max(0.0, min(page.since_commit for page in commits) - now + last))
        elif self._commits and not finished:
            again = trained
        return replace(
            self._spent,
            steps=min(page.steps for page in pages),
            commits=max(page.commits for page in pages),
            trained=trained,
            again=again,
            detect=max(0.0, end - last),
            stop=now - max(end, last),
        )

    def _without_step(self, seconds: float, *, finished: bool, stop: float) -> Spent:
        """On a world that is done, on a script whose steps nobody sees, or on a bad start."""
        spent = replace(self._spent, stop=stop)
        if finished:
            return replace(spent, trained=seconds)
        if self._last is None and not self._started:
            return replace(spent, unknown=seconds)
        if self._started:
            return replace(spent, first_step=seconds)
        return replace(spent, start=seconds)

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
    own, view = state.local, state.view
    now = view.round if view else None
    if view is None or now is None or now.phase is not Phase.FINAL:
        return False
    is_out = view.part(own.lease) is None
    return _is_known(view, now) and own.acked == now.generation and is_out


def _is_known(view: View, final: Round) -> bool:
    """Whether it is known who is in this world: a page may come after its round."""
    if view.page:
        return view.page.generation == final.generation
    return len(view.world) == final.nodes
