"""What the user sees: each burst as it happens, and the summary at the end."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .nemesis import Burst, Fault
from .nodes import WorkerLogs

SHOWN = 60  # lines of a violation


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


class Report:
    """`with Report()`: writes to the terminal, with a line that moves, or to a file or a pipe."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._status = self._console.status("")
        self._shown = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def progress(self, logs: WorkerLogs) -> None:
        """What the job does now."""
        if self._shown != logs.step:
            self._shown = logs.step
            text = f"generation {logs.generation}, step {logs.step}"
            self._status.update(f"{text}, {len(logs.world)} ranks on {_nodes(logs)}")

    def say(self, text: str) -> None:
        self._console.print(text)

    def schedule(self, bursts: Iterable[Burst]) -> None:
        """What would be done, and when, if the job recovered in no time."""
        for burst in bursts:
            self.say(f"burst {burst.number}: {burst.pause} s after the job is whole")
            for fault in burst.faults:
                self.say(f"  +{fault.at:5.2f} s  {escape(str(fault))}")

    def burst(self, burst: Burst, logs: WorkerLogs) -> None:
        self.say(
            f"[bold]burst {burst.number}[/]  generation {logs.generation}, "
            f"step {logs.step}, {_nodes(logs)} train"
        )

    def fault(self, fault: Fault, whom: str, at: float) -> None:
        self.say(f"  +{at:5.2f} s  {escape(str(fault))}  [cyan]{escape(whom)}[/]")

    def recovered(self, seconds: float, logs: WorkerLogs) -> None:
        self.say(
            f"  whole again after {seconds:.1f} s: generation {logs.generation}, "
            f"{len(logs.world)} ranks on {_nodes(logs)}"
        )

    def summary(self, outcome: Outcome, seed: int, folder: str) -> None:
        """The figures, and each violation with an excerpt of the logs that show it."""
        table = Table(title=f"chaos with seed {seed}", show_header=False)
        for kind, count in sorted(outcome.faults.items()):
            table.add_row(kind, str(count))
        table.add_section()
        rows = {
            "faults injected": outcome.faults.total(),
            "generations formed": outcome.generations,
            "steps that count": outcome.steps,
            "samples trained": outcome.samples,
            "steps trained again": outcome.again,
            "longest pause of training": f"{outcome.pause:.1f} s",
            "longest until whole again": f"{max(outcome.recoveries, default=0):.1f} s",
            "violations": len(outcome.violations),
        }
        for name, value in rows.items():
            table.add_row(name, str(value))
        self._console.print(table)
        for number, text in enumerate(outcome.violations, 1):
            self.say(f"[bold red]violation {number}[/], logs in {folder}")
            lines = text.splitlines()
            self._console.print("\n".join(lines[:SHOWN]), markup=False)
            if len(lines) > SHOWN:
                self.say(f"... and {len(lines) - SHOWN} more lines")


def _nodes(logs: WorkerLogs) -> str:
    return " ".join(logs.nodes())
