"""The share of a run's time that was training, for `elastic-etcd report` and the log at the end."""

from collections.abc import Iterator
from typing import Any

from elastic_etcd.core.schema import History, Spent
from elastic_etcd.core.words import counted

LOST = ("detect", "hang", "stop", "rendezvous", "start", "first_step", "again")
_SHOWN = {"first_step": "first step", "again": "trained again"}


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
        "goodput": round(trained / known, 4) if known > 0 else None,
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
    """The lines of a run that has ended with this world, in which the agent had rank 0.

    There are none where no step was seen.
    """
    found = of_run(entry)
    return lines(found) if entry.outcome and found["steps"] else iter(())


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The findings of `of_run` in words, a line each."""
    if not (found["steps"] or found["going_on"]):
        yield "goodput is not known: no steps were seen"
    else:
        share = f"trained for {found['trained']:.1f} of {found['seconds']:.1f} s"
        known = " of what is known" if found["unknown"] else ""
        yield f"goodput {100 * found['goodput']:.1f} %{known}: {share}"
    some = [f"{_SHOWN.get(cause, cause)} {s:.1f} s" for cause, s in found["lost"].items() if s]
    yield f"lost: {', '.join(some) or 'nothing'}"
    if found["unknown"]:
        yield f"not known: {found['unknown']:.1f} s, of worlds whose steps nobody saw"
    ended = found["lost"]["detect"] or found["lost"]["hang"]  # a world, and not by its success
    if ended and found["trained"] and not found["commits"]:
        yield "no commits were seen: what was trained again is not known, and counted as trained"
    if found["restarts"]:
        of_them = "" if found["planned"] == found["restarts"] else f"{found['planned']} of them "
        planned = f", {of_them}planned" if found["planned"] else ""
        known = f"; longest pause {found['pause']:.1f} s" if found["pause"] else ""
        number = counted(found["restarts"], "change of the world", "changes of the world")
        yield f"{number}{planned}{known}"
