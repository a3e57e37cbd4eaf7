"""How long each phase of a change of world takes on this node, counted for --metrics-addr."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from elastic_etcd.core.schema import Cause

PHASES = ("detect", "stop", "rendezvous", "start", "first_step")
CAUSES = tuple(cause for cause in Cause if cause is not Cause.BEGIN)
_RECOVERY = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds


class Histogram:
    """Numbers of seconds, counted by these upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._names = [*map(str, bounds), "+Inf"]
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one more."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """As Prometheus has them: each with all that are below its bound."""
        return list(zip(self._names, accumulate(self._counts), strict=True))


class Recovery:
    """How long each phase of a change of world takes on this node, and what was lost by its cause.

    The first world of an agent is none, nor is the time in which it is a spare.
    """

    def __init__(self) -> None:
        self.phases = {phase: Histogram(_RECOVERY) for phase in PHASES}
        self.lost: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self.restarts: dict[str, int] = dict.fromkeys(CAUSES, 0)
        self._since: float | None = None  # when the phase of now began
        self._lost = 0.0
        self._cause: Cause | None = None

    def end_world(self, now: float, idle: float) -> None:
        """The world is over; the last step ended `idle` seconds ago."""
        if self._since is not None and self._cause:  # it has had no step
            self.lost[self._cause] += self._lost
        self._since, self._lost, self._cause = now, 0.0, None
        self._observe("detect", idle)

    def forget(self) -> None:
        """No world follows for now."""
        self._since = None

    def pass_phase(self, phase: str, now: float) -> None:
        """This phase ends now, and the next one begins."""
        if self._since is not None:
            self._observe(phase, now - self._since)
            self._since = now

    def begin_world(self, cause: Cause, now: float) -> None:
        """A world begins because of `cause`, which is charged with the seconds lost until now."""
        if cause is Cause.BEGIN:  # etcd knows nothing of a world before
            self.forget()
        if self._since is None:
            return
        self.pass_phase("rendezvous", now)
        self.restarts[cause] += 1
        self.lost[cause] += self._lost
        self._cause, self._lost = cause, 0.0

    def train(self, now: float) -> None:
        """The first step of the world is done."""
        if self._since is not None:
            self.pass_phase("first_step", now)
            assert self._cause
            self.lost[self._cause] += self._lost
            self._since = None

    def _observe(self, phase: str, seconds: float) -> None:
        self.phases[phase].observe(seconds)
        self._lost += seconds
