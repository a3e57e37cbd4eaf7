"""Figures of the benchmarks, as PNG. matplotlib is loaded when one is drawn."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # a file, not a window
from matplotlib import pyplot as plt

from .table import Measure, Samples, figures, middle, number, texts

COLOURS = {
    "torchrun c10d": "#9e9e9e",
    "torchrun etcd-v2": "#c4a484",
    "ft_launcher": "#76b900",
    "exec": "#90caf9",
    "warm": "#1976d2",
    "in process": "#0d2f6b",
}
BAR = 0.8  # of the distance between two events


def bars(
    title: str, measures: Sequence[Measure], all_samples: dict[str, Samples], to: Path
) -> None:
    """One group for each time that was measured, one bar for each launcher; a log scale."""
    shown = [m for m in measures if m.unit == "s" and _drawn(m, all_samples)]
    height = BAR / len(all_samples)
    longest = max(
        value for s in all_samples.values() for m in shown for value in figures(s.get(m.name, []))
    )
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
    """For each start method the stages of a recovery, one below the other, in milliseconds."""
    tall = [0.8 + 0.24 * len(each) for each in found.values()]
    figure, all_axes = plt.subplots(
        *(len(found), 1),
        figsize=(10, sum(tall)),
        height_ratios=tall,
        layout="constrained",
        squeeze=False,
    )
    for axes, (name, each) in zip(all_axes[:, 0], found.items(), strict=True):
        ends = [1e3 * value for value in each.values()]
        begins = [0.0, *ends[:-1]]
        widths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        axes.barh(range(len(ends)), widths, left=begins, color=COLOURS[name])
        for row, (end, width) in enumerate(zip(ends, widths, strict=True)):
            axes.text(end, row, f" {end:.0f} (+{width:.1f})", va="center", fontsize=7)
        axes.set_yticks(range(len(ends)), list(each), fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(ends))
        axes.set_title(f"{name}: ms after SIGKILL of a worker, medians", fontsize=9)
    figure.savefig(to, dpi=150)
    plt.close(figure)
