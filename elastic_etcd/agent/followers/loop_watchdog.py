"""Notices that the event loop stands still, and says where.

Nothing on the loop may wait, as the lease is renewed there. Something that waits all the same, or
computes for seconds, can be seen by another thread only.
"""

import logging
import sys
import threading
import traceback
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Self

from elastic_etcd.agent.inbox import Timer

_DEPTH = 5

log = logging.getLogger(__name__)


class Watchdog:
    """`async with Watchdog(ttl)`: warns when the loop has not turned for half of `ttl` seconds.

    The warning has the innermost calls of the loop's thread, and does not need the loop. It comes
    once each time; when the loop turns again, the log says how long it stood.
    """

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._period = ttl / 8
        self._turned = monotonic()
        self._watched = threading.get_ident()
        self._beating = Timer()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    async def __aenter__(self) -> Self:
        self._beat()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._beating.cancel()
        self._ended.set()

    @property
    def stands(self) -> float:
        """Seconds since the loop has turned, which it does several times in each `ttl`."""
        return monotonic() - self._turned

    def _beat(self) -> None:
        self._turned = monotonic()
        self._beating.start(self._period, self._beat)

    def _watch(self) -> None:
        woken = monotonic()
        stood_at: float | None = None  # when it last turned before it was told
        while not self._ended.wait(self._period):
            before, woken = woken, monotonic()
            turned = self._turned
            if stood_at is not None and turned > stood_at:
                log.warning("the agent's loop turns again, after %.1f s", turned - stood_at)
                stood_at = None
            # A thread that was late itself has been stopped, and so has the loop: it comes next.
            stopped = woken - before > 2 * self._period
            if woken - before > self._ttl / 2:
                text = "this process stood still for %.1f s: was it stopped, or its machine?"
                log.warning(text, woken - before)
            if stood_at is None and not stopped and woken - turned > self._ttl / 2:
                stood_at = turned
                self._tell_standstill(woken - turned)

    def _tell_standstill(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._watched)  # noqa: SLF001 - the one way to see it
        log.warning(
            "the agent's loop has stood still for %.1f s (when it does for its lease's %g s, this "
            "node counts as lost), in %s",
            *(seconds, self._ttl, _where(frame)),
        )


def _where(frame: FrameType | None) -> str:
    """The innermost calls, the last one first. No source is read: its disk may stand still."""
    if frame is None:
        return "an unknown place"
    calls = traceback.StackSummary.extract(
        traceback.walk_stack(frame), limit=_DEPTH, lookup_lines=False
    )
    return ", called by ".join(
        f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in calls
    )
