"""The table that a benchmark prints: torchrun and this program side by side."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isinf
from statistics import median

from rich.table import Table

Samples = dict[str, list[float]]  # by the measure's name


@dataclass(frozen=True)
class Measure:
    """`met` says of the medians (here, torchrun's or nan) whether the goal is reached."""

    name: str
    unit: str
    goal: str
    met: Callable[[float, float], bool]


def summary(values: list[float], unit: str) -> str:
    """Median and range; infinite is "never"."""
    if not values:
        return "-"
    digits = 3 if unit == "s" and median(values) < 1 else 2 if unit in "s%" else 1
    low, middle, high = (
        "never" if isinf(v) else f"{v:.{digits}f}"
        for v in (min(values), median(values), max(values))
    )
    spread = f" ({low}-{high})" if len(values) > 1 else ""
    return f"{middle} {unit}{spread}"


def verdict(measure: Measure, here: list[float], other: list[float]) -> bool | None:
    """None when there is nothing to judge."""
    if not here:
        return None
    return measure.met(median(here), median(other) if other else float("nan"))


def table(title: str, measures: tuple[Measure, ...], here: Samples, torchrun: Samples) -> Table:
    result = Table(title=title)
    for column in ("measure", "torchrun", "elastic_etcd", "ratio", "goal", ""):
        result.add_column(column, justify="left" if column in ("measure", "goal") else "right")
    for m in measures:
        ours, theirs = here.get(m.name, []), torchrun.get(m.name, [])
        ratio = f"{median(ours) / median(theirs):.2f}" if ours and theirs else "-"
        met = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[verdict(m, ours, theirs)]
        row = (summary(theirs, m.unit), summary(ours, m.unit), ratio)
        result.add_row(m.name, *row, m.goal, met)
    return result
