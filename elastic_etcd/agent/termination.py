"""How a generation ends on this node, and whether anything of it is left.

I3 rests on WorkersGone, which comes from here only: when no worker runs, nothing of any worker's
process group is there, and what left its group is found and ended, if it has an accelerator; the
rest has a moment more. A worker that waits at the barrier without a process group of torch's (it is
parked) counts as gone.

Two values say where a generation stands. Its workers were asked for something, by the last word:

    NOTHING ──stop without a grace──> PATIENTLY
       │                               │     ^
       │                         stop, kill  stop without a grace
       │                               v     │
       └──stop with a grace, kill────> FIRMLY

Its end goes one way until the next generation begins:

    LIVES ──no process of it is left──> SWEEPS ──what left the groups has ended, too──> GONE
      │                                                                                  ^
      └───────────── all that is left is parked, and was asked to stop ─────────────────┘
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from enum import Enum, auto
from typing import Any, ParamSpec

from elastic_etcd.agent.guardian import Guardian
from elastic_etcd.agent.inbox import Tasks, Timer, Unkillable
from elastic_etcd.agent.worker import Worker
from elastic_etcd.core.lifecycle import WorkersGone
from elastic_etcd.protocol.messages import Change, Interrupt
from elastic_etcd.system.leftovers import Mark, end_late, end_leftovers
from elastic_etcd.system.processes import ProcessGroups
from elastic_etcd.times import STUCK

_LATE = 10.0  # seconds until the log names those that do not stop; then twice as many, and so on
_LOOK_AGAIN = 1.0

Given = ParamSpec("Given")

log = logging.getLogger(__name__)


class Asked(Enum):
    """A word to the workers of a generation."""

    NOTHING = auto()
    PATIENTLY = auto()  # to stop when their step is over
    FIRMLY = auto()  # to stop within a grace, or at once


class Ending(Enum):
    """A part of the way to the end of a generation."""

    LIVES = auto()
    SWEEPS = auto()  # what has left the groups is found and ended
    GONE = auto()  # nothing of it runs, though some of it may be parked


def next_end(end: Ending, asked: Asked, *, left: bool, parked: bool) -> Ending:
    """The next part, if something of it is `left` that runs, and some of it is `parked`."""
    match end:
        case Ending.GONE:
            return end
        case _ if left:
            return end
        case _ if parked and asked is Asked.NOTHING:  # it may go on without those that have ended
            return end
        case Ending.LIVES if not parked:  # what a parked one has started lives on with it
            return Ending.SWEEPS
        case _:
            return Ending.GONE


class Termination:
    """Stops the workers of one generation after the other, and puts WorkersGone once for each.

    `running` and `parked` are theirs by pid, kept by whoever starts them: a worker that has ended
    is in neither and is `bury`ed, after any other change `settle_soon` is called. The guardian is
    told of every process group.
    """

    def __init__(
        self,
        kill_timeout: float,
        tasks: Tasks,
        guardian: Guardian,
        mark: Mark,
        running: Mapping[int, Worker],
        parked: Mapping[int, Worker],
    ) -> None:
        self.asked = Asked.NOTHING
        self.signal = signal.SIGTERM  # for those that can't park
        self._kill_timeout = kill_timeout
        self._inbox = tasks.inbox
        self._tasks = tasks
        self._guardian = guardian
        self._mark = mark
        self._running = running
        self._parked = parked
        self._dead: dict[int, Worker] = {}  # something of their groups may still run
        self._groups = ProcessGroups(self._groups_emptied)
        self._pending = 0  # starts, and failures whose cause is being read
        self._sweeps: set[asyncio.Task[None]] = set()
        self._generation = 0
        self._end = Ending.GONE
        self._kill, self._late = Timer(), Timer()
        self._stuck, self._unkillable = Timer(), Timer()

    @property
    def stopping(self) -> bool:
        """Whether they were asked to stop, in whatever way."""
        return self.asked is not Asked.NOTHING

    @property
    def gone(self) -> bool:
        """Whether nothing of the generation runs, though some of it may be parked."""
        return self._end is Ending.GONE

    def begin(self, generation: int) -> None:
        """Workers of `generation` are about to run."""
        assert self.gone, "I3: older workers are alive"
        self._generation = generation
        self.asked, self._end = Asked.NOTHING, Ending.LIVES

    def wait_for(
        self, work: Callable[Given, Awaitable[None]], *args: Given.args, **kwargs: Given.kwargs
    ) -> None:
        """Begin `work`. Before it is done the generation is not gone."""

        async def wait() -> None:
            await work(*args, **kwargs)
            self._done()

        self._begin(wait)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None] | None:
        """Begin `work`, which says by `_done` that nothing waits for it any more."""
        if self._tasks.ended:  # nobody waits for anything any more
            return None
        self._pending += 1
        return self._tasks.create(work())

    def _done(self) -> None:
        self._pending -= 1
        self._settle()

    def bury(self, worker: Worker) -> None:
        """A worker has ended; what is left of its process group is killed."""
        self._dead[worker.pid] = worker
        self._groups.add(worker.pid)
        self.guard()

    def guard(self) -> None:
        """Tell the guardian which process groups there are."""
        self._guardian.guard(groups=tuple(self._running), parked=tuple(self._parked))

    def settle_soon(self) -> None:
        """See in the loop's next turn whether all is gone."""
        asyncio.get_running_loop().call_soon(self._settle)

    # --- stopping -------------------------------------------------------------------------

    def stop(
        self, grace: float | None, notice: Change | Interrupt | None, park: float | None
    ) -> None:
        """As Workers.stop."""
        if self.gone:  # WorkersGone is in the inbox
            return
        again = self.asked is Asked.FIRMLY
        self.asked = Asked.PATIENTLY if grace is None else Asked.FIRMLY
        for worker in self._running.values():
            parks = notice is not None and worker.tell(notice)
            if not (parks or again) and grace is not None:
                worker.terminate(self.signal)
            seconds = park if parks and park is not None else grace
            if seconds is not None:
                worker.give(seconds)
        self.settle_soon()
        if notice:
            self._late.start(_LATE, self._tell_late, notice, _LATE)
        if grace is not None:
            self._kill_late(asyncio.get_running_loop().time())

    def kill(self) -> None:
        """SIGKILL the process group of every worker that still runs now."""
        for timer in (self._kill, self._late, self._stuck, self._unkillable):
            timer.cancel()
        self.asked = Asked.FIRMLY
        for worker in self._running.values():
            worker.kill()
        self.settle_soon()

    def _kill_late(self, now: float) -> None:
        """SIGKILL to those that have used up their grace, and wait for the next one's end."""
        self._kill.cancel()
        waiting = [worker for worker in self._running.values() if not worker.killed]
        late = [worker for worker in waiting if worker.end <= now]
        for worker in late:
            if worker.channel and not worker.finished:
                rank = worker.spec.rank
                log.warning("rank %d: not stopped within %g s: SIGKILL", rank, worker.grace)
            worker.kill()
        if late == waiting:
            if late:
                self.kill()
            return
        end = min(worker.end for worker in waiting if worker not in late)
        loop = asyncio.get_running_loop()
        self._kill.start(end - loop.time(), self._kill_late, end)
        self.settle_soon()

    def _tell_late(self, notice: Change | Interrupt, seconds: float) -> None:
        """Name those that have not stopped; and again, if it takes longer still."""
        reason, finished = notice.reason, self._ranks(finished=True)
        if late := self._ranks(finished=False):
            what = "no state.check()" if isinstance(notice, Change) else "not out of its step"
            why = "they are waited for" if self.asked is Asked.PATIENTLY else "they will be killed"
            log.warning("%s: rank %s: %s for %g s; %s", reason, late, what, seconds, why)
        if finished:
            log.info("%s: rank %s: still at work after its training", reason, finished)
        if late or finished:
            self._late.start(2 * seconds, self._tell_late, notice, 2 * seconds)

    def _ranks(self, *, finished: bool) -> str:
        """The ranks that run and were to park, or those that have `finished` and can't."""
        found = [
            worker.spec.rank
            for worker in self._running.values()
            if worker.finished == finished and (finished or worker.channel)
        ]
        return ", ".join(map(str, sorted(found)))

    # --- is anything left? ----------------------------------------------------------------

    def _groups_emptied(self, groups: Collection[int]) -> None:
        for group in groups:
            self._dead.pop(group).output.close()
        self._settle()

    def _settle(self) -> None:
        """Go on to the sweep when nothing of the generation is left, and then put WorkersGone."""
        left = bool(self._running or self._groups or self._pending)
        if not left:
            self._kill.cancel()
            self._late.cancel()
        before = self._end
        self._end = next_end(before, self.asked, left=left, parked=bool(self._parked))
        match before, self._end:
            case Ending.LIVES, Ending.SWEEPS:
                if sweep := self._begin(self._sweep):
                    self._sweeps.add(sweep)
                    sweep.add_done_callback(self._sweeps.discard)
            case Ending.LIVES | Ending.SWEEPS, Ending.GONE:
                self.guard()
                self._inbox.put(WorkersGone(self._generation))
        self._expect_an_end()

    async def finish_sweeps(self) -> None:
        """Wait for the end of all that is being killed: its mark is not seen any more."""
        if self._sweeps:
            await asyncio.wait(self._sweeps)

    async def _sweep(self) -> None:
        generation = self._generation
        others = await end_leftovers(self._mark, generation)
        self._done()
        await end_late(self._mark, generation, others)

    def _expect_an_end(self) -> None:
        """Tell what SIGKILL has not ended; give a generation up that has to end and does not."""
        killed = self._killed()
        if self._groups or killed:
            self._stuck.start_once(STUCK, self._tell_stuck)
        else:
            self._stuck.cancel()
        left = self._running or self._groups or self._end is Ending.SWEEPS
        if self.stopping and left and len(killed) == len(self._running):
            self._unkillable.start_once(self._kill_timeout, self._look_again)
        else:
            self._unkillable.cancel()

    def _killed(self) -> list[Worker]:
        """Those that are still there."""
        return [worker for worker in self._running.values() if worker.killed]

    def _look_again(self) -> None:
        """An agent that stood still meanwhile has to see first what has ended."""
        self._unkillable.start(_LOOK_AGAIN, self._inbox.put, Unkillable())

    def _tell_stuck(self) -> None:
        ranks = [worker.spec.rank for worker in (*self._killed(), *self._dead.values())]
        log.warning(
            "generation %d: processes of rank %s are still there %d s after SIGKILL, stuck in the "
            "kernel (a hung device or network file system?); this node waits for them",
            self._generation, ", ".join(map(str, ranks)), STUCK,
        )  # fmt: skip
