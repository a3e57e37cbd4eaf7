"""Tables, and what `scripts/bench recovery` shows: the launchers side by side."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

EVENT = "event → first step of the new world"

# What a target says of a launcher's median, and of torchrun c10d's or inf: reached or not; None
# where that can't be said without torchrun, or the launcher has no target.
Verdict = Callable[[str, float, float], bool | None]
Sample = float | str  # a figure, or why there is none: "job lost", "> 75 s"
Samples = dict[str, list[Sample]]  # by the measure's name


@dataclass(frozen=True)
class Measure:
    """One row; `target` is `met` in words."""

    name: str
    unit: str
    target: str = ""
    met: Verdict | None = None


def at_most(limit: float, *, in_process: float | None = None) -> Verdict:
    """The verdict on what is better the less it is; with ee.run the limit may be another."""
    return lambda name, here, _: here <= (in_process or limit if name == "in process" else limit)


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of figures: the first column says of what."""
    result = Table(title=title)
    for number, column in enumerate(columns):
        result.add_column(column, justify="right" if number else "left")
    for row in rows:
        result.add_row(*row)
    return result


def figures(samples: Sequence[Sample]) -> list[float]:
    return [s for s in samples if not isinstance(s, str)]


def middle(samples: Sequence[Sample]) -> float:
    """The median of the figures; infinite if there are none."""
    found = figures(samples)
    return median(found) if found else float("inf")


def texts(samples: Sequence[Sample]) -> list[str]:
    """What the samples without a figure say, with how many of them do: "2 of 3 job lost"."""
    said = [s for s in samples if isinstance(s, str)]
    share = {text: said.count(text) for text in said}
    if len(samples) == 1:
        return said
    return [f"{count} of {len(samples)} {text}" for text, count in share.items()]


def number(value: float, unit: str) -> str:
    digits = 3 if unit == "s" and value < 1 else 2 if unit in "s%" and value < 10 else 1
    return f"{value:.{digits}f}"


def cell(measure: Measure, samples: list[Sample], baseline: list[Sample], judged: str) -> str:
    """Median, ratio to the baseline and verdict; range and number; what had no figure.

    `judged` is the launcher's name, empty for those that have no targets.
    """
    if not samples:
        return "-"
    found, lines = figures(samples), texts(samples)
    if found:
        value, other = median(found), middle(baseline)
        met = measure.met(judged, value, other) if judged and measure.met else None
        verdict = {None: "", True: " [green]✓[/]", False: " [red]✗[/]"}[met]
        ratio = f" ({value / other:.2f}x)" if figures(baseline) and samples != baseline else ""
        low, high = (number(v, measure.unit) for v in (min(found), max(found)))
        spread = [f"{low}-{high}"] if len(found) > 1 else []
        lines = [f"{number(value, measure.unit)}{ratio}{verdict}", *spread, *lines]
    return "\n".join(lines)


def rows(
    measures: Sequence[Measure], samples: dict[str, Samples], ours: Sequence[str]
) -> list[list[str]]:
    """What was measured: its name, a cell for each launcher, and the target for `ours`."""
    baseline = samples.get("torchrun c10d", {})
    found = []
    for m in measures:
        if any(each.get(m.name) for each in samples.values()):
            base = baseline.get(m.name, [])
            cells = [
                cell(m, s.get(m.name, []), base, name if name in ours else "")
                for name, s in samples.items()
            ]
            found.append([f"{m.name}, {m.unit}", *cells, m.target])
    return found


def table(
    title: str,
    measures: Sequence[Measure],
    samples: dict[str, Samples],
    ours: Sequence[str],
    first: str = EVENT,
) -> Table:
    """One column for each launcher, after the `first`; `ours` are judged by the targets."""
    result = Table(title=title, show_lines=True)
    result.caption = "median (ratio to torchrun c10d) and range; ✓ ✗: target met, missed"
    for column in (first, *samples, "target"):
        result.add_column(column)
    for row in rows(measures, samples, ours):
        result.add_row(*row)
    return result
