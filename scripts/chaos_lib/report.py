"""What the user sees: each burst as it happens, and the summary at the end."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .journal import Journal
from .schedule import Burst, Fault

if TYPE_CHECKING:
    from .story import Outcome

SHOWN = 60  # lines of a violation


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

    def progress(self, journal: Journal) -> None:
        """What the job does now."""
        if self._shown != journal.step:
            self._shown = journal.step
            text = f"generation {journal.generation}, step {journal.step}"
            self._status.update(f"{text}, {len(journal.world)} ranks on {_nodes(journal)}")

    def say(self, text: str) -> None:
        self._console.print(text)

    def schedule(self, bursts: Iterable[Burst]) -> None:
        """What would be done, and when, if the job recovered in no time."""
        for burst in bursts:
            self.say(f"burst {burst.number}: {burst.pause} s after the job is whole")
            for fault in burst.faults:
                self.say(f"  +{fault.at:5.2f} s  {escape(str(fault))}")

    def burst(self, burst: Burst, journal: Journal) -> None:
        self.say(
            f"[bold]burst {burst.number}[/]  generation {journal.generation}, "
            f"step {journal.step}, {_nodes(journal)} train"
        )

    def fault(self, fault: Fault, whom: str, at: float) -> None:
        self.say(f"  +{at:5.2f} s  {escape(str(fault))}  [cyan]{escape(whom)}[/]")

    def recovered(self, seconds: float, journal: Journal) -> None:
        self.say(
            f"  whole again after {seconds:.1f} s: generation {journal.generation}, "
            f"{len(journal.world)} ranks on {_nodes(journal)}"
        )

    def summary(self, outcome: "Outcome", seed: int, logs: str) -> None:
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
            self.say(f"[bold red]violation {number}[/], logs in {logs}")
            lines = text.splitlines()
            self._console.print("\n".join(lines[:SHOWN]), markup=False)
            if len(lines) > SHOWN:
                self.say(f"... and {len(lines) - SHOWN} more lines")


def _nodes(journal: Journal) -> str:
    return " ".join(journal.nodes())
