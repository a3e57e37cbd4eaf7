"""The table that a benchmark prints: torchrun and this program side by side."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isinf
from statistics import median

from rich.table import Table

Samples = dict[str, list[float]]  # by the measure's name


@dataclass(frozen=True)
class Measure:
    """`met` says of the medians (here, torchrun's or inf) whether the goal is reached."""

    name: str
    unit: str
    goal: str
    met: Callable[[float, float], bool]


def finite(values: list[float]) -> list[float]:
    """The samples of jobs that did not hang."""
    return [v for v in values if not isinf(v)]


def summary(values: list[float], unit: str) -> str:
    """Median and range, and how many never came to an end."""
    ended = finite(values)
    never = f"{len(values) - len(ended)} of {len(values)} never" if ended != values else ""
    if not ended:
        return never or "-"
    digits = 3 if unit == "s" and median(ended) < 1 else 2 if unit in "s%" else 1
    low, middle, high = (f"{v:.{digits}f}" for v in (min(ended), median(ended), max(ended)))
    spread = f" ({low}-{high})" if len(ended) > 1 else ""
    return f"{middle} {unit}{spread}{never and ', ' + never}"


def verdict(measure: Measure, here: list[float], torchrun: list[float]) -> bool | None:
    """Whether the goal is reached; None when there is nothing to judge."""
    if not here:
        return None
    other = finite(torchrun)
    return measure.met(median(here), median(other) if other else float("inf"))


def table(title: str, measures: tuple[Measure, ...], here: Samples, torchrun: Samples) -> Table:
    result = Table(title=title)
    for column in ("measure", "torchrun", "elastic_etcd", "ratio", "goal", ""):
        result.add_column(column, justify="left" if column in ("measure", "goal") else "right")
    for m in measures:
        ours, theirs = here.get(m.name, []), torchrun.get(m.name, [])
        both = finite(ours) and finite(theirs)
        ratio = f"{median(finite(ours)) / median(finite(theirs)):.2f}" if both else "-"
        met = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[verdict(m, ours, theirs)]
        row = (summary(theirs, m.unit), summary(ours, m.unit), ratio)
        result.add_row(m.name, *row, m.goal, met)
    return result
