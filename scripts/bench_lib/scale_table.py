"""What one change of a job took, and tables of that."""

import math
from dataclasses import dataclass

from rich.table import Table

from .scale_fleet import Counts

FINAL, REQUESTS, EVENTS, GROWTH = 5.0, 10, 20, 1.1  # the goals


@dataclass(frozen=True)
class Change:
    """One change of a job. Times are in seconds from the cause until the last agent knows."""

    name: str
    agents: int
    learned: float  # that the old world is over
    final: float  # the new world
    counts: Counts
    joining: float  # for a formation, how long all took to join
    generations: int  # that were begun
    cpu: float  # of all agents, in seconds


def exponent(points: list[tuple[float, float]]) -> float:
    """The slope of a straight line through the logarithms: total ~ N^exponent."""
    logs = [(math.log(n), math.log(total)) for n, total in points if total > 0]
    if len(logs) < 2:
        return math.nan
    x, y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    slope: float = sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)
    return slope


def table(changes: list[Change]) -> Table:
    """Of each kind of change a row for each size."""
    result = Table(title="rendezvous at scale: from the cause until the last agent knows")
    names = ("change", "agents", "learned", "final", "requests", "watches", "events", "KB")
    for name in (*names, "CPU: etcd", "agents"):
        result.add_column(name, justify="left" if name == "change" else "right")
    kinds = list(dict.fromkeys(c.name for c in changes))
    for c in sorted(changes, key=lambda c: kinds.index(c.name)):
        n, of = c.agents, c.counts
        each = (of.requests / n, of.watches / n, of.events / n, of.sent_bytes / n / 1e3)
        times = (f"{c.learned:.2f} s", f"{c.final:.2f} s")
        cpu = (f"{of.cpu:.2f} s", f"{c.cpu:.2f} s")
        result.add_row(c.name, str(n), *times, *(f"{value:.1f}" for value in each), *cpu)
    result.caption = "requests, watches, events and KB: of each agent"
    return result


def exponents(changes: list[Change]) -> dict[str, dict[str, float]]:
    """How totals grow with the number of agents: N^x, for each kind of change."""
    found = {}
    for name in dict.fromkeys(c.name for c in changes):
        of = [c for c in changes if c.name == name]
        found[name] = {
            total: exponent([(c.agents, getattr(c.counts, total)) for c in of])
            for total in ("requests", "watches", "events", "sent_bytes")
        }
    return found


def growth(found: dict[str, dict[str, float]]) -> Table:
    """Those exponents."""
    result = Table(title="growth of totals: N^x")
    for name in ("change", "requests", "watches", "events", "bytes"):
        result.add_column(name, justify="left" if name == "change" else "right")
    for name, fits in found.items():
        result.add_row(name, *("-" if math.isnan(fit) else f"{fit:.2f}" for fit in fits.values()))
    return result


def missed(changes: list[Change], found: dict[str, dict[str, float]]) -> list[str]:
    """The goals that are not reached."""
    said = []
    for c in changes:
        if c.name == "formation" and c.agents <= 1000 and c.final > FINAL:
            said.append(f"{c.agents} agents final after {c.final:.1f} s, goal {FINAL:g} s")
        for what, goal in (("requests", REQUESTS), ("events", EVENTS)):
            each = getattr(c.counts, what) / c.agents
            if each > goal:
                said.append(f"{c.name}, {c.agents} agents: {each:.1f} {what} each, goal {goal}")
    for name, fits in found.items():
        over = {what: fits[what] for what in ("requests", "events") if fits[what] > GROWTH}
        said += [f"{name}: {what} grow as N^{x:.2f}, goal {GROWTH}" for what, x in over.items()]
    return said


def beside(found: list[tuple[int, dict[str, float] | None]], bound: float) -> Table:
    """Formations of torch's handlers."""
    result = Table(title="torch: DynamicRendezvousHandler on a TCPStore, first formation")
    for name in ("agents", "final", "requests each", "KB each"):
        result.add_column(name, justify="right")
    for n, of in found:
        if of is None:
            result.add_row(str(n), f"not within {bound:g} s", "-", "-")
            continue
        each = (f"{of['requests'] / n:.1f}", f"{of['received'] / n / 1e3:.1f}")
        result.add_row(str(n), f"{of['final']:.2f} s", *each)
    return result
