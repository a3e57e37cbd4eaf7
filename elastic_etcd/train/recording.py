"""What one rank has recorded as trained on, what follows for all of them, and what was forgotten.

Pure: standard library only, no I/O.
"""

from collections.abc import Sequence

from elastic_etcd.train.dealing import Deal


class Record:
    """How many of the positions that `deal` gives this rank it has trained on: `count`.

    step: rounds that a step of all ranks takes, 0 if not known; it is `told`, or else follows what
    is recorded.
    """

    def __init__(self, deal: Deal, step: int, told: int = 0) -> None:
        self.count = 0
        self.step = told or step
        self._told = told
        self._deal = deal
        self._agreed: tuple[int, Sequence[int]] | None = None  # own count, everybody's
        self._committed: tuple[int, int] | None = None  # handed out, recorded

    def add(self, count: int, handed: int) -> None:
        """Count so many more of the `handed` ones; ValueError if they are not so many."""
        if not 0 <= count <= handed - self.count:
            open_ = handed - self.count
            raise ValueError(f"recorded {count} samples, but {open_} handed out ones are open")
        self.count += count
        rounds = count // len(self._deal.own)
        if rounds and self.count < self._deal.size and not self._told:  # a last batch may be short
            self.step = rounds

    def agree(self, counts: Sequence[int]) -> None:
        """Everybody's count, in rank order, as they are now."""
        self._agreed = self.count, counts
        self.step = self._told  # no rank's batches speak for the others'

    def left(self) -> tuple[range, ...]:
        """What is left of the epoch. Raises RuntimeError in the middle of a step."""
        if self._agreed is None:
            return self._deal.after_own(self.count, self.step)
        if self._agreed[0] != self.count:
            raise RuntimeError("recorded more since agree(): agree again before a commit")
        return self._deal.after(self._agreed[1])

    def missed_between_commits(self, handed: int) -> str:
        """At a commit, with so many handed out: what was forgotten since the last one, or ""."""
        last, self._committed = self._committed, (handed, self.count)
        if last is not None and handed > last[0] and self.count == last[1]:
            return "a commit found nothing recorded since the one before"
        return ""

    def missed_in_epoch(self, start: int, handed: int) -> str:
        """When those from `start` to `handed` are out and no more: what was forgotten, or "".

        Up to a batch may be missing: a loader with drop_last delivers no short one.
        """
        done, missing = self.count - start, handed - self.count
        if missing and (not done or missing > self.step * len(self._deal.own)):
            return f"of {handed - start} indices handed out in an epoch, {done} were recorded"
        return ""
