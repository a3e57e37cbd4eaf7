"""Tables, and what `scripts/bench recovery` shows: the launchers side by side, also drawn."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

COLOURS = {
    "torchrun c10d": "#9e9e9e",
    "torchrun etcd-v2": "#c4a484",
    "torchrun etcd-v3": "#ffb74d",
    "ft_launcher": "#76b900",
    "exec": "#90caf9",
    "prefork": "#1976d2",
    "in process": "#0d2f6b",
}
BAR = 0.8  # of the distance between two events
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


def markdown(
    measures: Sequence[Measure],
    samples: dict[str, Samples],
    ours: Sequence[str],
    first: str = EVENT,
) -> str:
    """The same for a document."""
    lines = [[first, *samples, "target"], ["---"] * (len(samples) + 2)]
    lines += rows(measures, samples, ours)
    plain = (re.sub(r"\[/?\w*\]", "", " | ".join(line)).replace("\n", "<br>") for line in lines)
    return "".join(f"| {line} |\n" for line in plain)


def _pyplot() -> Any:
    """Loaded when something is drawn."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")  # a file, not a window
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    mpl.rcParams["svg.hashsalt"] = "elastic_etcd"  # the same figures, the same file
    from matplotlib import pyplot as plt  # noqa: PLC0415

    return plt


def bars(
    title: str, measures: Sequence[Measure], all_samples: dict[str, Samples], to: Path
) -> None:
    """One group for each time that was measured, one bar for each launcher; a log scale."""
    shown = [m for m in measures if m.unit == "s" and _drawn(m, all_samples)]
    height = BAR / len(all_samples)
    longest = max(
        value for s in all_samples.values() for m in shown for value in figures(s.get(m.name, []))
    )
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(10, 1.0 + 0.95 * len(shown)), layout="constrained")
    for index, (name, samples) in enumerate(all_samples.items()):
        colour = COLOURS[name]
        for row, measure in enumerate(shown):
            y = row - BAR / 2 + (index + 0.5) * height
            label = name if row == 0 else "_"
            found = samples.get(measure.name, [])
            if not found:
                axes.barh(y, 0, height, color=colour, label=label)
            elif not (times := figures(found)):
                look = {"fill": False, "edgecolor": colour, "hatch": "////"}
                axes.barh(y, longest, height, label=label, **look)
                axes.text(longest, y, f" {', '.join(texts(found))}", va="center", fontsize=7)
            else:
                value = middle(found)
                spread = [[value - min(times)], [max(times) - value]]
                axes.barh(y, value, height, color=colour, label=label, xerr=spread)
                said = "  ".join([number(value, "s"), *texts(found)])
                axes.text(max(times), y, f" {said}", va="center", fontsize=7)
    axes.set_yticks(range(len(shown)), [m.name for m in shown])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(0.05, longest * 3)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("seconds to the first step of the new world; hatched: did not recover")
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncols=len(all_samples))
    figure.savefig(to, dpi=150)
    plt.close(figure)


def _drawn(measure: Measure, all_samples: dict[str, Samples]) -> bool:
    return any(samples.get(measure.name) for samples in all_samples.values())


def stages(found: dict[str, dict[str, float]], to: Path) -> None:
    """For each start method, side by side, the stages of a recovery, in milliseconds."""
    tall = 0.8 + 0.24 * max(map(len, found.values()))
    plt = _pyplot()
    size = (6.5 * len(found), tall)
    figure, all_axes = plt.subplots(
        1, len(found), figsize=size, layout="constrained", squeeze=False
    )
    for axes, (name, each) in zip(all_axes[0], found.items(), strict=True):
        ends = [1e3 * value for value in each.values()]
        begins = [0.0, *ends[:-1]]
        widths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        axes.barh(range(len(ends)), widths, left=begins, color=COLOURS[name])
        for row, (end, width) in enumerate(zip(ends, widths, strict=True)):
            axes.text(end, row, f" {end:.0f} (+{width:.1f})", va="center", fontsize=7)
        axes.set_yticks(range(len(ends)), list(each), fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2 * max(ends))
        axes.set_title(f"{name}: ms after SIGKILL of a worker, medians", fontsize=9)
    svg = to.suffix == ".svg"
    figure.savefig(to, dpi=150, metadata={"Date": None} if svg else None)  # as svg.hashsalt
    plt.close(figure)
