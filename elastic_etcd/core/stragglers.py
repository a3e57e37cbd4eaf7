"""Which nodes are slow: the coordinator's line, by how long a step takes each of them.

All ranks end a step together, so that what tells them apart is the time outside of collectives.
Each node publishes its own now and then, and once a node is told to be slow nothing more is said of
it until it is as fast as the others again. Both have to last, so that nobody flaps.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from elastic_etcd.core.schema import MOST_STRAGGLERS, StepTime, Stragglers
from elastic_etcd.core.view import View
from elastic_etcd.core.words import listed

SHARE = 0.1  # of a step, that it must be longer for it: else the slow thing is something else
FLOOR = 0.01  # seconds, at least: less is a busy machine's or a small model's
LASTING = 30.0  # seconds until a change is told
QUIET = 600.0  # seconds until a node is named again
STEPS = 50  # over which a node is measured
AGAIN = "as fast as the others again"
SAME = 0.1  # a step time that differs by less from the one before is not worth a write


class NodeTimes(NamedTuple):
    """A node of a world: its name, and in seconds its step and what is outside of collectives."""

    name: str
    outside: float
    whole: float


def is_same(time: StepTime, before: StepTime) -> bool:
    """Whether it says no more than the one before."""
    return abs(time.outside - before.outside) <= SAME * before.outside


def measured(view: View) -> list[NodeTimes]:
    """The nodes of the world that trains, as far as they tell; none if too few do."""
    times = {t.lease: t for t in view.step_times if t.generation == view.trains}
    known = [(p.node, times[p.lease]) for p in view.world if p.lease in times]
    if len(known) < 2 or 2 * len(known) <= len(view.world):
        return []
    return [NodeTimes(name, time.outside, time.whole) for name, time in known]


def turned(known: Stragglers, nodes: Sequence[NodeTimes], factor: float) -> frozenset[str]:
    """The nodes that are slow and were not, or are so no more.

    A node is slow if it takes more than `factor` times the median, and fast again below the middle
    between that and the median. The median of two nodes is the faster one.
    """
    median = _median(nodes) if nodes else 0.0
    border = median * (1 + factor) / 2
    fast = (n.name for n in nodes if n.name in known.nodes and n.outside <= border)
    slow = (n.name for n in nodes if n.name not in known.nodes and _is_slow(n, median, factor))
    return frozenset((*fast, *slow))


def compared(
    known: Stragglers, generation: int, nodes: Sequence[NodeTimes], told: Collection[str]
) -> Stragglers:
    """The next line, about those of `told`, which have turned: the slow ones, or else the fast."""
    slow = [n for n in nodes if n.name in told and n.name not in known.nodes]
    slow.sort(key=lambda node: -node.outside)
    there = {node.name for node in nodes}
    still = tuple(name for name in known.nodes if name in there.difference(told))
    fast = [name for name in known.nodes if name in told]
    line = _line(slow, _median(nodes), len(nodes)) if slow else f"{_who(fast)} {AGAIN}"
    named = (*still, *(node.name for node in slow))[:MOST_STRAGGLERS]
    return Stragglers(generation, known.number + 1, line, named)


def _median(nodes: Sequence[NodeTimes]) -> float:
    """The middle one; of an even number the faster one of the two."""
    return sorted((n.outside for n in nodes), reverse=True)[len(nodes) // 2]


def _is_slow(node: NodeTimes, median: float, factor: float) -> bool:
    more = node.outside - median
    return node.outside > factor * median and more >= max(FLOOR, SHARE * node.whole)


def _line(slow: Sequence[NodeTimes], median: float, count: int) -> str:
    most = slow[0].outside
    times = f"{most / median:.1f} x " if median else "more than "
    return (
        f"{_who([node.name for node in slow])} slow: {'' if len(slow) == 1 else 'up to '}"
        f"{_time(most)} a step outside of collectives, {times}the median of {count} nodes "
        f"({_time(median)}), over the last {STEPS} steps or more"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def _who(names: Sequence[str]) -> str:
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'}"
