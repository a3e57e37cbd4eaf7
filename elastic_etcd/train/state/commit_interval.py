"""How many steps lie between two commits by default: by what a commit costs, and a failure may."""

import logging
import math
import time
from collections.abc import Iterable

from elastic_etcd.train.collectives import rank_and_size

SHARE = 0.01  # of the time, for commits
LONGEST = 30.0  # seconds between two, whatever they cost

log = logging.getLogger("elastic_etcd")


class CommitInterval:
    """The steps between two commits with commit_every="auto", the same on all ranks.

    A world begins with a commit at each step. At each commit every rank says how many steps it
    wants until the next but one, by its own times: `wanted`; all take the largest number, or twice
    the last one where that is less: `take`. So an unusual time does little.
    """

    def __init__(self) -> None:
        self.steps = 1
        self._cost = 0.0  # seconds, of the last commit
        self._a_step = 0.0  # seconds
        self._since = time.monotonic()
        self._settled = self._told = False

    def begin(self) -> None:
        """A world begins, whose newcomers have measured nothing."""
        self.steps, self._cost, self._since = 1, 0.0, time.monotonic()

    def wanted(self, steps: int) -> int:
        """This rank's number, when it has taken so many steps since the last commit."""
        self._a_step = max((time.monotonic() - self._since) / steps, 1e-6)
        wanted = min(math.ceil(self._cost / SHARE / self._a_step), int(LONGEST / self._a_step))
        return max(1, wanted)

    def take(self, wanted: Iterable[int]) -> None:
        """Take the numbers that all ranks want."""
        most = max(wanted)
        self._settled = self._cost > 0 and most <= 2 * self.steps
        self.steps = min(most, 2 * self.steps)

    def tell(self) -> None:
        """Say once how many steps that is, as soon as it is known."""
        if self._told or not self._settled:
            return
        self._told = True
        rank, _ = rank_and_size()
        if rank == 0:
            apart = self.steps * self._a_step
            steps = f"{self.steps} steps" if self.steps > 1 else "step"
            log.warning(
                "state.steps() commits each %s, which is about each %.2g s and takes %.2g %% "
                "of the time: a failure costs at most that and the step under way. "
                "commit_every=n is another number, None is none",
                *(steps, apart, 100 * self._cost / (self._cost + apart)),
            )

    def committed(self, seconds: float) -> None:
        """A commit has ended, and took so long."""
        self._cost, self._since = seconds, time.monotonic()
