"""`elastic-etcd report`: the goodput of a job's newest run, and where the rest of its time went."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from elastic_etcd.agent import goodput
from elastic_etcd.cli import query, status
from elastic_etcd.core import words
from elastic_etcd.core.schema import Phase, Spent, seconds_of
from elastic_etcd.errors import ElasticEtcdError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from elastic_etcd.cli import parsers
    from elastic_etcd.core.schema import History
    from elastic_etcd.core.view import View
    from elastic_etcd.etcd.client import Client

_EPILOG = f"""\
Goodput is the share of a run's seconds that were spent on steps whose results were kept
(`trained`); it is unknown where no step was seen. `lost` are:
  detect         from a world's last step until it was known to be over
  hang           the same, where it hung
  stop           until no worker was left of it
  rendezvous     until the next world began; of the first one, since its coordinator was there
  start          until its workers trained, or made their process group
  first_step     until their first step had ended
  again          steps after the last commit of a world that was lost; known where it has commits

{query.CODES.replace("no such job ", "no such job, or no world yet ")}"""


def parser() -> parsers.Parser:
    """The command line of `elastic-etcd report JOB`."""
    text = "Shows a run's goodput: seconds trained, and seconds lost by their cause."
    every = "each job under --prefix, one after the other"
    return query.parser("report", text, _EPILOG, every=every)


def main(argv: Sequence[str]) -> int:
    """Print the report; gives the exit code."""
    return query.with_etcd(parser, argv, _show)


async def _show(client: Client, args: Namespace) -> None:
    views = await query.views(client, args)
    for job, view in views.items():
        if args.all and not worlds(view):
            query.note(f"job {job} has had no world yet")
            continue
        found = describe(job, view, time.time())
        if args.json:
            query.print_json(found, args)
        else:
            query.say(f"  {each}" if n else each for n, each in enumerate(words.fields(found)))


def describe(job: str, view: View, now: float) -> dict[str, Any]:
    """The shape of `--json`; `now` is in seconds since 1970. Raises ElasticEtcdError."""
    entries = worlds(view)
    if not entries:
        raise ElasticEtcdError(f"job {job} has had no world yet")
    last, going_on = entries[-1], _going_on(view, entries[-1], now)
    hung = min(going_on, _hangs(view, now))
    if hung:
        before = last.spent_before or Spent(worlds=0)
        last = replace(last, spent_before=before.plus(Spent(worlds=0, hang=hung)))
    found = goodput.of_run(last, going_on - hung) | {"hangs": round(hung, 3)}
    outcome = entries[-1].outcome
    state = outcome.state if outcome else status.state_of(view)
    return {"job": job, "state": state, **found}


def worlds(view: View) -> list[History]:
    """Those of the newest run that are remembered, in order."""
    entries = query.worlds(view)
    return [e for e in entries if e.run == entries[-1].run]


def _hangs(view: View, now: float) -> float:
    """How long its workers have been in their step, where they hang, by the same clocks."""
    hang = status.hanging(view)
    found = seconds_of(hang.at) if hang else None
    return max(0.0, now - found + hang.seconds) if hang and found is not None else 0.0


def _going_on(view: View, last: History, now: float) -> float:
    """How long the world that trains has done so, by its coordinator's clock and this one's."""
    began, current = seconds_of(last.began_at), view.round
    if began is None or not view.members or current is None:
        return 0.0
    if (current.generation, current.phase) != (last.generation, Phase.FINAL):
        return 0.0
    return max(0.0, now - began)
