"""Workers that do not end their step for too long: where each stands, and which one is behind.

Only what is known to be a step is watched: not what comes before the first one of a world has
ended, nor saves and what `ee.quiet` was told, nor a commit as long as it moves bytes. The agents
find out together which rank the others wait for (core/hangs.py); an agent that gets no answer names
its own workers. With --start-timeout what comes before the first step is watched, too.
"""

import asyncio
import logging
import math
from datetime import UTC, datetime
from typing import TypeAlias

from msgspec import UNSET
from msgspec.structs import replace

from elastic_etcd.agent.followers.evidence import Evidence, gather, status
from elastic_etcd.agent.followers.periodic import PeriodicFollower, leads
from elastic_etcd.agent.inbox import Tasks
from elastic_etcd.agent.output.logs import Logs
from elastic_etcd.agent.worker import Worker
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core import hangs, schema, writes
from elastic_etcd.core.lifecycle import Event, State
from elastic_etcd.core.schema import Hang, Keys, NodeSteps, RankStep
from elastic_etcd.core.view import View
from elastic_etcd.protocol.activity import Activity, Doing
from elastic_etcd.times import HANG_ALONE, HANG_AT_LEAST, HANG_LEARNT

_PERIOD = 1.0
_TIMES = 10  # the slowest of the recent steps
_COMMIT = 3  # times as long as a step a commit may move nothing; it takes memory, too

log = logging.getLogger(__name__)

Reached: TypeAlias = tuple[Doing, int]  # an activity, after how many steps


class HangWatch(PeriodicFollower):
    """Looks at each worker once a second, and asks and answers together with the other agents.

    limits: seconds in one step, and from a world's start to its first step. None for a step: ten
    times the slowest of the recent ones, but twice the longest that this agent has seen, and a
    minute, at least; None for a start: for ever.
    """

    name = "hangs"

    def __init__(
        self,
        limits: tuple[float | None, float | None],
        keys: Keys,
        workers: Workers,
        logs: Logs,
        tasks: Tasks,
    ) -> None:
        super().__init__(keys, workers, tasks)
        self._timeout, self._start_timeout = limits
        self._logs = logs
        self._last_line: tuple[int, int] | None = None  # its generation and number
        self._found: Hang | None = None  # by its line, and nobody has acted on it
        self._question = (0, 0), 0.0  # the open one, as long as this agent leads, and since when
        self._gathering = asyncio.Lock()
        self._slowest = 0.0  # of all steps of all worlds, as far as one look a second shows
        self._seen: dict[int, Activity] = {}  # by rank, at the look before
        self._begin(0)

    def _begin(self, generation: int) -> None:
        """A step that was given up may have been slow only: no more than its time counts."""
        for last in filter(_is_step, self._seen.values()):
            self._slowest = max(self._slowest, min(last.seconds, self._patience(last)))
        self._generation, self._began = generation, self._loop.time()
        self._seen.clear()
        self._evidence: dict[int, Evidence] = {}  # by rank; of those that have not gone on
        self._number = 0  # of the steps that were published last
        self._published: dict[int, Reached] = {}  # where the ranks that stood were then
        self._judged: dict[int, Reached] = {}  # the same, once all were asked
        self._again = math.inf  # seconds in its step, until a judged one is asked about again
        self._suspicion: float | None = None  # since when nobody has asked about one
        self._longest = 0.0  # of those that nobody has asked about

    def see(self, before: State, event: Event, state: State) -> None:
        """Take note of the agent's new state, and of a new line, not one from before this agent."""
        super().see(before, event, state)
        view = state.view
        if view is None or not state.local.lease:
            return
        found = hangs.of_now(view)
        key = (found.generation, found.number) if found and found.line else (0, 0)
        if found and self._last_line is not None and key > self._last_line:
            self._found = found
        self._last_line = max(key, self._last_line or key)
        if view is not before.view and (view.hang or view.steps):
            self.news.set()

    def pause(self) -> float:
        """A second."""
        return _PERIOD

    async def look(self) -> None:
        """Look at each worker; then time has passed for all that waits, too."""
        if self._generation != self._workers.generation:
            self._begin(self._workers.generation)
        found = [(w, now) for w, now in self._activities() if self._is_late(w, now)]
        self._suspect([worker for worker, _ in found])
        self._longest = max((now.seconds for _, now in found), default=0.0)
        await self.hear()

    async def hear(self) -> None:
        """Ask as the coordinator, answer what is asked, and act on what was found."""
        state, view = self.state, self.state.view
        if view and state.local.lease:
            await self._lead(state, view)
            if state.local.running == view.trains == self._generation:
                await self._tell(state, view)
        if found := self._found:
            self._found = None
            log.log(logging.WARNING if found.alarm else logging.INFO, "%s", found.line)
            if found.alarm:
                self._restart(found)
            else:
                self._again = 2 * found.seconds

    # --- this node's own workers ----------------------------------------------------------

    def _activities(self) -> list[tuple[Worker, Activity]]:
        """The workers, with what they do: a commit in which nothing moves counts as a step.

        The seconds before a first step that is watched are those since the world's start.
        """
        found = []
        for worker, now in self._workers.activities():
            if self._start_timeout and _stage(now):
                found.append((worker, now._replace(seconds=self._loop.time() - self._began)))
                continue
            stuck = now.doing is Doing.COMMIT and now.seconds >= _COMMIT * self._patience(now)
            found.append((worker, now._replace(doing=Doing.STEP) if stuck else now))
        return found

    def _is_watched(self, worker: Worker, now: Activity) -> bool:
        """Whether it is in what ends soon: in a step, the first one only with --start-timeout."""
        del worker
        return _is_step(now) or (self._start_timeout is not None and _stage(now) is not None)

    def _is_late(self, worker: Worker, now: Activity) -> bool:
        """Whether it stands in its step for too long, and nobody knows it yet."""
        rank = worker.spec.rank
        found = self._evidence.get(rank)
        if found and _reached(now) != (found.doing, found.steps):
            after = f" after step {found.steps + 1}" if found.doing is Doing.STEP else ""
            log.warning("rank %d goes on%s", rank, after)
            del self._evidence[rank]
        before, self._seen[rank] = self._seen.get(rank), now
        if before and _is_step(before) and now.steps > before.steps:
            self._slowest = max(self._slowest, before.seconds)
        if not self._is_watched(worker, now):
            return False
        if self._judged.get(rank) == _reached(now) and now.seconds < self._again:
            return False
        if before is None or _reached(before) != _reached(now):
            return False  # a page that is read while it is written may be of two times
        return now.seconds >= self._patience(now) and not is_traced(worker.pid)

    def _patience(self, now: Activity) -> float:
        """How long its step, or its start, may take."""
        if self._start_timeout is not None and _stage(now):
            return self._start_timeout
        if self._timeout is not None:
            return self._timeout
        learnt = min(2 * self._slowest, HANG_LEARNT)
        return max(HANG_AT_LEAST, _TIMES * now.slowest, learnt)

    def _suspect(self, late: list[Worker]) -> None:
        """All nodes are asked about these, as soon as etcd answers."""
        if not late:
            self._suspicion = None
        elif self._suspicion is None:
            self._suspicion = self._loop.time()
        elif self._loop.time() >= self._suspicion + HANG_ALONE and not self._gathering.locked():
            self._tasks.create(self._gather(late))

    async def _gather(self, hanging: list[Worker]) -> None:
        await gather(hanging, self._workers, self._logs, self._evidence, self._gathering)

    # --- all nodes together ---------------------------------------------------------------

    async def _lead(self, state: State, view: View) -> None:
        if not leads(state):
            return
        asked = hangs.of_now(view)
        key = (asked.generation, asked.number) if asked else (0, 0)
        if self._question[0] != key:
            self._question = key, self._loop.time()
        following = hangs.lead(view, self._loop.time() - self._question[1])
        if following:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            told = replace(following, at=now if following.line else "")
            await self.publish(writes.put_hang(self._keys, view, state.local, told))

    async def _tell(self, state: State, view: View) -> None:
        """Publish where the workers are, where that was asked or is to be asked."""
        asked = hangs.of_now(view)
        number = asked.number if asked else 0
        if asked and not asked.line:
            if self._number < number and await self._publish_steps(state, view, asked):
                self._number = number
            if self._number >= number:  # all nodes were asked about those that were published
                self._judged, self._suspicion, self._again = self._published, None, math.inf
        elif asked and asked.alarm and self._has_gone_on():
            stood = self._published
            if not await self._publish_steps(state, view, replace(asked, evidence=False)):
                self._published = stood
        elif self._suspicion is not None and self._number <= number:
            question = Hang(self._generation, number + 1, self._longest)
            if await self._publish_steps(state, view, question):
                self._number = number + 1

    def _has_gone_on(self) -> bool:
        """Whether a rank that was published as one that stands does so no more."""
        now = {worker.spec.rank: _reached(at) for worker, at in self._activities()}
        return any(now.get(rank) != place for rank, place in self._published.items())

    async def _publish_steps(self, state: State, view: View, asked: Hang) -> bool:
        if asked.evidence:
            stand = [w for w, now in self._activities() if self._stands(w, now, asked.seconds)]
            await self._gather(stand)
        found = self._activities()
        self._published = {
            w.spec.rank: _reached(now) for w, now in found if self._stands(w, now, asked.seconds)
        }
        ranks = tuple(self._rank_step(worker, now) for worker, now in found)
        steps = NodeSteps(state.local.lease, asked.number, ranks)
        return await self.publish(writes.put_steps(self._keys, view, state.local, steps))

    def _rank_step(self, worker: Worker, now: Activity) -> RankStep:
        rank, doing, what = worker.spec.rank, schema.RankDoing[now.doing.name], now.what
        file = ""
        found = self._evidence.get(rank)
        if self._is_watched(worker, now) and is_traced(worker.pid):
            doing = schema.RankDoing.TRACED
        elif found and _reached(now) == (found.doing, found.steps):
            doing = schema.RankDoing.WAIT if found.in_collective else doing
            what = "stopped" if status(worker.pid, "State") == "T" else found.place
            file = found.file
        if self._start_timeout and doing is not schema.RankDoing.TRACED:
            doing = _stage(now) or doing
        seconds = round(now.seconds, 3)
        return RankStep(rank, now.steps + 1, doing, seconds, what, now.told, file or UNSET)

    def _stands(self, worker: Worker, now: Activity, seconds: float) -> bool:
        """Whether it is there for about as long as the one that was found first."""
        long = now.seconds >= seconds / 2
        return self._is_watched(worker, now) and long and not is_traced(worker.pid)

    def _restart(self, found: Hang) -> None:
        """It is the agent of the rank that is behind, else of group rank 0, that ends the world."""
        state, limits = self.state, self.state.limits
        if limits is None or not (found.start or limits.hang_action == "restart"):
            return
        if state.view is None or state.local.running != found.generation:
            return
        part = state.view.part(state.local.lease)
        at = {worker.spec.rank: _reached(now) for worker, now in self._activities()}
        stand = {rank for rank, place in at.items() if place == self._judged.get(rank)}
        if found.rank is None and part and part.group_rank == 0 and stand:
            self._workers.give_up(None, found.line, "")
        elif found.rank in stand:
            stack = self._evidence[found.rank].stack if found.rank in self._evidence else ""
            self._workers.give_up(found.rank, found.line, stack)


def _is_step(now: Activity) -> bool:
    """Whether it is in one that is watched: not in the first."""
    return now.doing is Doing.STEP and now.steps > 0


def _stage(now: Activity) -> schema.RankDoing | None:
    """How far its start has come; None from its first step or commit on, and where it is quiet."""
    if now.doing not in (Doing.STARTING, Doing.INIT) or now.steps or now.commits:
        return None
    if now.doing is Doing.INIT:
        return schema.RankDoing.GROUP
    return schema.RankDoing.FIRST if now.since_init else schema.RankDoing.BEFORE


def _reached(now: Activity) -> Reached:
    return now.doing, now.steps


def is_traced(pid: int) -> bool:
    """Whether a debugger has the process."""
    return status(pid, "TracerPid") not in ("", "0")
