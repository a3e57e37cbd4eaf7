"""How many steps lie between two commits by default: by what a commit costs, and a failure may."""

import logging
import math
import time
from collections.abc import Sequence

from elastic_etcd.train.collectives import rank_and_size

SHARE = 0.01  # of the time, for commits
LONGEST = 30.0  # seconds between two, whatever they cost

log = logging.getLogger("elastic_etcd")


class CommitInterval:
    """The steps between two commits with commit_every="auto", the same on all ranks.

    A world begins with a commit at each step. At each commit the ranks exchange `times`, of which
    all make the same number, or twice the last one where that is less: `take`. So an unusual time
    does little.
    """

    def __init__(self) -> None:
        self.steps = 1
        self._commit = self._asked = 0.0  # seconds that the last commit took, and the question
        self._cost = self._a_step = 0.0  # seconds, of all ranks
        self._since = time.monotonic()
        self._settled = self._told = False

    def begin(self) -> None:
        """A world begins, whose newcomers have measured nothing."""
        self.steps, self._commit, self._asked, self._since = 1, 0.0, 0.0, time.monotonic()

    def times(self, steps: int) -> list[int]:
        """This rank's microseconds: for the last commit, to ask before it, and for a step since.

        There were so many steps since.
        """
        a_step = (time.monotonic() - self._since) / steps
        return [int(seconds * 1e6) for seconds in (self._commit, self._asked, a_step)]

    def take(self, ranks: Sequence[Sequence[int]], asked: float) -> None:
        """Take the times of all ranks, which were `asked` in so many seconds.

        The rank that was asked last has not waited for others.
        """
        commits, questions, steps = ([x / 1e6 for x in times] for times in zip(*ranks, strict=True))
        self._cost, self._a_step = max(commits) + min(questions), max(*steps, 1e-6)
        wanted = min(math.ceil(self._cost / SHARE / self._a_step), int(LONGEST / self._a_step))
        self._settled = self._cost > 0 and wanted <= 2 * self.steps
        self.steps = max(1, min(wanted, 2 * self.steps))
        self._asked = asked

    def committed(self, seconds: float) -> None:
        """A commit has ended, and took so long."""
        self._commit, self._since = seconds, time.monotonic()

    def tell(self) -> None:
        """Say once how many steps that is, as soon as it is known."""
        if self._told or not self._settled:
            return
        self._told = True
        rank, _ = rank_and_size()
        if rank == 0:
            apart = self.steps * self._a_step
            steps = f"{self.steps} steps" if self.steps > 1 else "step"
            log.info(
                "state.steps() commits each %s, which is about each %.2g s and takes %.2g %% "
                "of the time: a failure costs about that at most, and the step under way. "
                "commit_every=n is another number, None is none",
                *(steps, apart, 100 * self._cost / (self._cost + apart)),
            )
