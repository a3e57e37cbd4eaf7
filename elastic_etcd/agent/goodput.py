"""The share of a run's time that was training, for `elastic-etcd report` and the log at the end."""

from collections.abc import Iterator
from typing import Any

from elastic_etcd.core.schema import History, Spent
from elastic_etcd.core.words import fields

LOST = ("detect", "hang", "stop", "rendezvous", "start", "first_step", "again")


def total(spent: Spent | None) -> float:
    """How many seconds a world took, from its rendezvous to its end.

    `again` and `pause` are not added: they are parts of the others.
    """
    if spent is None:
        return 0.0
    start = spent.rendezvous + spent.start + spent.first_step
    return start + spent.trained + spent.detect + spent.hang + spent.stop + spent.unknown


def of_run(entry: History, going_on: float = 0.0) -> dict[str, Any]:
    """The shape of `report --json`, from the history of a run's newest world.

    going_on: how many seconds that world has trained by now, if it has not ended.
    """
    spent = entry.spent_until_now or Spent(worlds=0)
    worlds = spent.worlds + (0 if entry.spent else 1)
    lost = {cause: round(getattr(spent, cause), 3) for cause in LOST}
    trained = max(0.0, spent.trained - spent.again) + going_on
    known = total(spent) - spent.unknown + going_on
    return {
        "run": entry.run or "",
        "generation": entry.generation,
        "goodput": round(trained / known, 4) if spent.steps or going_on else None,
        "seconds": round(known, 3),
        "trained": round(trained, 3),
        "going_on": round(going_on, 3),
        "lost": lost,
        "unknown": round(spent.unknown, 3),
        "worlds": worlds,
        "restarts": max(0, worlds - 1),
        "planned": spent.planned,
        "pause": round(spent.pause, 3),
        "steps": spent.steps,
        "commits": spent.commits,
    }


def at_end(entry: History) -> Iterator[str]:
    """The fields of a run that has ended with this world, in which the agent had rank 0, in a line.

    There are none where no step was seen.
    """
    found = of_run(entry)
    if entry.outcome and found["steps"]:
        yield ", ".join(fields(found))
