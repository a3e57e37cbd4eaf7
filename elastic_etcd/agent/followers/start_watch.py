"""Workers that do not come to their first step: told every 30 s, a failure after --start-timeout.

Only what is known counts, each for itself: an import before the process group, the making of the
process group, and in `ee.run` the time from there to the end of the first step. A script that tells
no steps may train: of it nothing else is known than that. All nodes find out together who is behind
(core/hangs.py), as with a hang.
"""

import logging
from typing import Any

from msgspec.structs import replace

from elastic_etcd.agent.followers.hang_watch import HangWatch, is_traced
from elastic_etcd.agent.worker import Worker
from elastic_etcd.core import hangs
from elastic_etcd.core.schema import RankDoing, RankStep
from elastic_etcd.protocol.activity import Activity, Doing

_LINES = 30.0  # seconds from one line to the next
_BEGINS = (Doing.STARTING, Doing.INIT)
_SINCE = {RankDoing.IMPORT: "importing", RankDoing.FIRST: "since_init"}

log = logging.getLogger(__name__)


class StartWatch(HangWatch):
    """A HangWatch that watches the starts, too. timeout: seconds that a stage of one may last."""

    def __init__(self, node: str, timeout: float, *of_hangs: Any) -> None:
        self._node, self._start_timeout = node, timeout
        self._told = 0, 0  # a generation, and how many lines of it
        super().__init__(*of_hangs)

    async def look(self) -> None:
        """Tell of the starts, and look for those that take too long."""
        await super().look()
        self._tell_starts()

    def _tell_starts(self) -> None:
        """A line for each stage; of what is not known only until it would be too long."""
        found = [(w, now) for w, now in self._workers.activities() if _begins(now)]
        uptime = max((worker.uptime for worker, _ in found), default=0.0)
        due = self._workers.generation, int(uptime / _LINES)
        if uptime < _LINES or due <= self._told:
            return
        self._told = due
        by_stage: dict[RankDoing, list[hangs.At]] = {}
        for worker, now in found:
            step = self._rank_step(worker, now)
            by_stage.setdefault(step.doing, []).append(hangs.At(step.rank, self._node, step))
        for stage, some in by_stage.items():
            if stage in hangs.STARTS or uptime < self._start_timeout + _LINES:
                log.info("%s", hangs.begins(some))

    def _activities(self) -> list[tuple[Worker, Activity]]:
        """The seconds of a start are those of its stage."""
        return [(worker, _in_stage(worker, now)) for worker, now in super()._activities()]

    def _is_watched(self, worker: Worker, now: Activity) -> bool:
        return super()._is_watched(worker, now) or _stage(worker, now) is not None

    def _patience(self, now: Activity) -> float:
        return super()._patience(now) if now.steps else self._start_timeout

    def _stands(self, worker: Worker, now: Activity, seconds: float) -> bool:
        """Also if no more is known than that it has not begun, when others are found to wait."""
        begins = _begins(now) and now.seconds >= seconds / 2 and not is_traced(worker.pid)
        return begins or super()._stands(worker, now, seconds)

    def _rank_step(self, worker: Worker, now: Activity) -> RankStep:
        step, stage = super()._rank_step(worker, now), _stage(worker, now)
        if _begins(now) and is_traced(worker.pid):
            stage = RankDoing.TRACED
        return replace(step, doing=stage) if stage else step


def _begins(now: Activity) -> bool:
    return now.doing in _BEGINS and not now.steps


def _stage(worker: Worker, now: Activity) -> RankDoing | None:
    """The stage of its start, None if it has begun to train or that is not known.

    A script may train after its process group, or without any, and tell nothing.
    """
    if not _begins(now):
        return None
    if now.doing is Doing.INIT:
        return RankDoing.GROUP
    if not now.since_init:
        return RankDoing.IMPORT if now.importing else None
    return RankDoing.FIRST if worker.channel and not now.commits else None


def _in_stage(worker: Worker, now: Activity) -> Activity:
    stage = _stage(worker, now)
    return now._replace(seconds=getattr(now, _SINCE[stage])) if stage in _SINCE else now
