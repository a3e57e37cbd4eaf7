"""One job's story: its nodes start, are hit burst by burst, end; then everything is checked."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import leftovers
from .cluster import Cluster, Undo
from .fleet import Fleet
from .history import Replay, replay
from .report import Report
from .schedule import MAX_NODES, MIN_NODES, OF_ETCD, Burst, Fault
from .training import Training

PATIENCE = 90.0  # for the job to be whole again, after a burst


@dataclass
class Outcome:
    """What came of a job, or of several."""

    faults: Counter[str] = field(default_factory=Counter)
    generations: int = 0
    steps: int = 0
    samples: int = 0
    again: int = 0  # steps that were rolled back and trained again
    pause: float = 0.0  # the longest without a step of any rank, seconds
    recoveries: list[float] = field(default_factory=list)  # from the end of a burst, seconds
    violations: list[str] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        self.faults += other.faults
        self.generations += other.generations
        self.steps += other.steps
        self.samples += other.samples
        self.again += other.again
        self.pause = max(self.pause, other.pause)
        self.recoveries += other.recoveries
        self.violations += other.violations


class Story:
    """`asked()` says that the user wants to stop, `over()` that no more bursts are to come."""

    def __init__(
        self,
        etcd: Cluster,
        directory: Path,
        report: Report,
        asked: Callable[[], bool],
        over: Callable[[], bool],
    ) -> None:
        self._etcd, self._directory, self._report = etcd, directory, report
        self._asked, self._over = asked, over
        self.outcome = Outcome()

    def play(self, name: str, bursts: Iterator[Burst], agents: int, *, plain: bool) -> int:
        """Train under these bursts with so many agents at first; how many there are in the end."""
        where = self._etcd.endpoints, self._directory
        fleet = Fleet(*where, name, self._report.progress, plain=plain)
        try:
            for _ in range(agents):
                fleet.join()
            fleet.wait("the job trains", fleet.whole(), PATIENCE)
            while not self._over():
                burst = next(bursts)
                agents = burst.agents  # also if it is not played: the next job begins with them
                fleet.rest(burst.pause, self._over)
                if not self._over():
                    self._burst(fleet, burst)
            fleet.finish(PATIENCE)
            self._check_end(fleet)
        except AssertionError as error:
            self.outcome.violations.append(f"{error}")
            self._etcd.heal()
            self._history(fleet)
        finally:
            fleet.close()
        self.outcome.violations += leftovers.tracebacks(self._directory, plain=plain)
        return agents

    def _burst(self, fleet: Fleet, burst: Burst) -> None:
        """Inject its faults at their times, end those that end, and wait until all is well."""
        began = time.monotonic()
        fleet.begin_burst()
        self._report.burst(burst, fleet.journal)
        faults = list(burst.faults)
        ends: list[tuple[float, Undo]] = []
        while faults or ends:
            ends.sort(key=lambda end: end[0])
            fault = faults[0] if faults and (not ends or faults[0].at <= ends[0][0]) else None
            at = fault.at if fault else ends[0][0]
            fleet.rest(began + at - time.monotonic(), self._asked)
            if fault is None:
                ends.pop(0)[1]()
            elif self._asked():
                faults.clear()
            else:
                faults.pop(0)
                whom, undo = self._inject(fleet, fault)
                self._report.fault(fault, whom, time.monotonic() - began)
                if undo:
                    ends.append((time.monotonic() - began + fault.lasts, undo))
        self._etcd.heal()
        healed = time.monotonic()
        fleet.wait("the job is whole again", fleet.whole(), PATIENCE)
        self.outcome.recoveries.append(time.monotonic() - healed)
        self._report.recovered(self.outcome.recoveries[-1], fleet.journal)

    def _inject(self, fleet: Fleet, fault: Fault) -> tuple[str, Undo | None]:
        self.outcome.faults[fault.kind] += 1
        return (self._etcd if fault.kind in OF_ETCD else fleet).inject(fault)

    def _check_end(self, fleet: Fleet) -> None:
        """Everything that must hold now that the job has ended well."""
        found = self.outcome.violations
        found += leftovers.left(fleet, self._etcd.healthy)
        replayed = self._history(fleet)
        found += leftovers.unrecorded(fleet.job, self._etcd.healthy, replayed)
        training = Training(self._directory, replayed.worlds())
        found += training.check()
        self.outcome.steps, self.outcome.samples = training.steps, training.samples
        self.outcome.again, self.outcome.pause = training.again, training.pause

    def _history(self, fleet: Fleet) -> Replay:
        """What etcd went through, with all that is recorded of it."""
        self._etcd.record_all(PATIENCE)
        replayed = replay(self._etcd.events(fleet.job.name), MIN_NODES, MAX_NODES)
        self.outcome.generations = len(replayed.finals)
        self.outcome.violations += replayed.wrong
        return replayed
