"""`elastic-etcd events`: a job's history, or that of each with --all, and its news as they come."""

from __future__ import annotations

import time
from operator import itemgetter
from typing import TYPE_CHECKING

from elastic_etcd.agent.history import news, past
from elastic_etcd.cli import query
from elastic_etcd.cli.query import in_one_line
from elastic_etcd.core.schema import Keys
from elastic_etcd.core.txn import Snapshot
from elastic_etcd.core.view import Everything, view_of
from elastic_etcd.etcd.mirror import first

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Mapping, Sequence

    from elastic_etcd.agent.history import Event
    from elastic_etcd.cli import options
    from elastic_etcd.core.view import View
    from elastic_etcd.etcd.client import Client

_EPILOG = f"""\
Times are UTC, of the machine on which something happened. Events that only show as they happen
(nodes that come and go, the phases of a round) have the time of this one.

examples:
  elastic-etcd events resnet-7 --etcd etcd1:2379
  elastic-etcd events resnet-7 --follow --json | jq 'select(.name | endswith("FAILED"))'
  elastic-etcd events --all --follow            also of jobs that begin meanwhile, until Ctrl-C

{query.CODES}"""


def parser() -> options.Parser:
    """The command line of `elastic-etcd events JOB`."""
    text = "Shows what a job went through, an event a line."
    every = "of each job under --prefix, by their times"
    as_json = "a JSON object a line, as torch's"
    made = query.parser("events", text, _EPILOG, every=every, as_json=as_json)
    made.add_argument(
        "--follow", action="store_true", help="go on until the job is over, with --all for ever"
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Print a job's events; gives the exit code."""
    return query.run(parser, argv, _events, _events_of_all)


async def _events(job: query.Job, args: Namespace) -> None:
    printer = _Printer(as_json=args.json)
    before = await job.view()
    printer.print(past(job.name, before))

    def follow(seen: Snapshot) -> bool | None:
        nonlocal before
        view = view_of(seen, job.keys, Everything())
        printer.print(news(job.name, before, view, time.time_ns() // 10**6))
        printer.print(past(job.name, view))
        before = view
        return True if _is_over(view) else None

    if args.follow and not _is_over(before):
        await query.while_read(first(job.client, job.ranges, follow))


async def _events_of_all(client: Client, args: Namespace) -> None:
    before = await query.all_views(client, args)
    printer = _Printer(as_json=args.json, widest=max(map(len, before), default=1))
    printer.print(_by_time(before))

    def follow(seen: Snapshot) -> None:
        nonlocal before
        after = query.views_of(seen, args.prefix)
        for job, view in after.items():
            was = before.get(job) or view_of(Snapshot(0, {}), Keys(job), Everything())
            printer.print(news(job, was, view, time.time_ns() // 10**6))
            printer.print(past(job, view))
        before = after

    if args.follow:
        await query.while_read(first(client, (query.everything(args),), follow))


def _by_time(views: Mapping[str, View]) -> list[Event]:
    """All jobs' histories as one; each one's events stay in their order."""
    timed = []
    for job, view in views.items():
        at = 0
        for event in past(job, view):
            at = max(at, event.timestamp)
            timed.append((at, event))
    return [event for _, event in sorted(timed, key=itemgetter(0))]


def _is_over(view: View) -> bool:
    return view.outcome is not None and not view.members


class _Printer:
    """Prints each event once, and once more when more is known of it."""

    def __init__(self, *, as_json: bool, widest: int = 0) -> None:
        self._as_json = as_json
        self._widest = widest  # characters of the jobs' names; 0: they are left out
        self._known: set[str] = set()

    def print(self, events: Iterable[Event]) -> None:
        for event in events:
            line = event.json() if self._as_json else in_one_line(event.line(self._widest))
            if line not in self._known:
                self._known.add(line)
                print(line, flush=True)
