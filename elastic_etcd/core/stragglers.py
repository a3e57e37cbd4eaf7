"""Which nodes are slow: the coordinator's line, by how long a step takes each of them.

All ranks end a step together, so that what tells them apart is the time outside of collectives.
Each node publishes its own now and then, and once a node is told to be slow nothing more is said of
it until it is as fast as the others again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from elastic_etcd.core.schema import MOST_STRAGGLERS, StepTime, Stragglers
from elastic_etcd.core.view import View

NAMED = 3  # nodes of many, in a line
SHARE = 0.1  # of a step, that it must be longer for it: else the slow thing is something else
STEPS = 50  # over which a node is measured
SAME = 0.1  # a step time that differs by less from the one before is not worth a write


class NodeTimes(NamedTuple):
    """A node of a world: its name, and in seconds its step and what is outside of collectives."""

    name: str
    outside: float
    whole: float


def is_same(time: StepTime, before: StepTime) -> bool:
    """Whether it says no more than the one before."""
    return abs(time.outside - before.outside) <= SAME * before.outside


def lead(view: View, factor: float) -> Stragglers | None:
    """The coordinator's next line; None as long as there is nothing new, or too few tell."""
    times = {t.lease: t for t in view.step_times if t.generation == view.trains}
    known = [(p.node, times[p.lease]) for p in view.world if p.lease in times]
    if len(known) < 2 or 2 * len(known) <= len(view.world):
        return None
    nodes = [NodeTimes(name, time.outside, time.whole) for name, time in known]
    return compared(view.stragglers or Stragglers(), view.trains, nodes, factor)


def compared(
    known: Stragglers, generation: int, nodes: Sequence[NodeTimes], factor: float
) -> Stragglers | None:
    """The line about those that are slow and were not, or else are so no more.

    A node is slow if it takes more than `factor` times the median, and fast again below the middle
    between that and the median: a node at the border is named once. The median of two nodes is the
    faster one.
    """
    by_time = sorted(nodes, key=lambda node: -node.outside)
    median = by_time[len(nodes) // 2].outside  # of an even number the faster one of the two
    slow = [n for n in by_time if n.name not in known.nodes and _is_slow(n, median, factor)]
    names = {node.name for node in nodes if node.outside > median * (1 + factor) / 2}
    still = tuple(name for name in known.nodes if name in names)
    if slow:
        named = (*still, *(node.name for node in slow))[:MOST_STRAGGLERS]
        return Stragglers(generation, known.number + 1, _line(slow, median, len(nodes)), named)
    there = {node.name for node in nodes}
    if fast := [name for name in known.nodes if name in there.difference(still)]:
        line = f"{_who(fast)} as fast as the others again"
        return Stragglers(generation, known.number + 1, line, still)
    return None


def _is_slow(node: NodeTimes, median: float, factor: float) -> bool:
    return node.outside > factor * median and node.outside - median >= SHARE * node.whole


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
    """`n3 is`, `n3 and n4 are`; of many nodes the first few."""
    if len(names) == 1:
        return f"{names[0]} is"
    more = len(names) - NAMED
    *first, last = (*names[:NAMED], f"{more} more nodes") if more > 0 else names
    return f"{', '.join(first)} and {last} are"
