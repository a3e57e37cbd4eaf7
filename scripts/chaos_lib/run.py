"""One job under the nemesis: its nodes start, are hit burst by burst, end; then all is checked."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .checker import Replay, Workload, replay, residue, tracebacks, unrecorded
from .machine import end_shortages
from .nemesis import Burst, Fault, Nemesis
from .nodes import MAX_NODES, MIN_NODES, TTL, Disk, Etcd, Nodes
from .report import Outcome, Report

# An agent says so, of itself or of etcd, where programs get no processor for seconds.
STARVED = re.compile(r"(loop|node|machine)( has)? stood still|etcd does not answer")


class Run:
    """`asked()` says that the user wants to stop, `over()` that no more bursts are to come.

    The job must be whole again within `patience` seconds after a burst.
    """

    def __init__(
        self,
        etcd: Etcd,
        disk: Disk,
        directory: Path,
        report: Report,
        asked: Callable[[], bool],
        over: Callable[[], bool],
        patience: float,
    ) -> None:
        self._etcd, self._disk, self._directory, self._report = etcd, disk, directory, report
        self._asked, self._over, self._patience = asked, over, patience
        self.outcome = Outcome()

    def go(self, name: str, bursts: Iterator[Burst], agents: int, *, plain: bool) -> int:
        """Train under these bursts with so many agents at first; how many there are in the end."""
        where = self._etcd.endpoints, self._directory
        nodes = Nodes(*where, name, self._disk, self._report.progress, plain=plain)
        nemesis = Nemesis(self._etcd, nodes, self._asked)
        try:
            for _ in range(agents):
                nodes.join()
            nodes.wait("the job trains", nodes.whole(), self._patience)
            while not self._over():
                burst = next(bursts)
                agents = burst.agents  # also if it is not played: the next job begins with them
                nodes.rest(burst.pause, self._over)
                if not self._over():
                    self._burst(nemesis, nodes, burst)
            # A lease that a fault has let expire ends only now, if etcd was away as well.
            nodes.rest(2 * TTL, lambda: False)
            nodes.wait("the job is whole again", nodes.whole(), self._patience)
            nodes.finish(self._patience)
            self._check_end(nodes)
        except AssertionError as error:
            self.outcome.violations.append(f"{error}")
            nodes.record()
            self._etcd.heal()
            self._history(nodes)
        finally:
            self._disk.thaw()  # what waits for it would not end
            end_shortages()
            nodes.close()
        self.outcome.violations += tracebacks(self._directory, plain=plain)
        return agents

    def _burst(self, nemesis: Nemesis, nodes: Nodes, burst: Burst) -> None:
        """Inject its faults at their times, end those that end, and wait until all is well."""
        self._report.burst(burst, nodes.logs)
        before, starved = nodes.logs.generation, _starved(nodes)
        nemesis.burst(burst, self._injected)
        self._etcd.heal()
        healed = time.monotonic()
        nodes.wait("the job is whole again", nodes.whole(), self._patience)
        self.outcome.recoveries.append(time.monotonic() - healed)
        self._report.recovered(self.outcome.recoveries[-1], nodes.logs)
        now = nodes.logs.generation
        free = burst.free and _starved(nodes) == starved
        assert now == before or not free, (
            f"burst {burst.number} was to cost nothing, and generation {before} ended for {now}\n"
            f"{nodes.job.account()}"
        )

    def _injected(self, fault: Fault, whom: str, at: float) -> None:
        self.outcome.faults[fault.kind] += 1
        self._report.fault(fault, whom, at)

    def _check_end(self, nodes: Nodes) -> None:
        """Everything that must hold now that the job has ended well."""
        found = self.outcome.violations
        found += residue(nodes, self._etcd.healthy)
        replayed = self._history(nodes)
        found += unrecorded(nodes.job, self._etcd.healthy, replayed)
        workload = Workload(self._directory, replayed.worlds())
        found += workload.check()
        self.outcome.steps, self.outcome.samples = workload.steps, workload.samples
        self.outcome.again, self.outcome.pause = workload.again, workload.pause

    def _history(self, nodes: Nodes) -> Replay:
        """What etcd went through, with all that is recorded of it."""
        self._etcd.record_all(self._patience)
        replayed = replay(self._etcd.events(nodes.job.name), MIN_NODES, MAX_NODES)
        self.outcome.generations = len(replayed.finals)
        self.outcome.violations += replayed.wrong
        return replayed


def _starved(nodes: Nodes) -> int:
    """How often an agent has said that programs got no processor for seconds."""
    return sum(len(STARVED.findall(agent.output)) for agent in nodes.job.agents)
