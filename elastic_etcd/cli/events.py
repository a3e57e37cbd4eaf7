"""`elastic-etcd events JOB`: what a job went through, and what happens now."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from elastic_etcd.agent.events import news, past
from elastic_etcd.cli import look
from elastic_etcd.cli.look import in_one_line
from elastic_etcd.core.view import Everything, view_of
from elastic_etcd.etcd.mirror import first

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence

    from elastic_etcd.agent.events import Event
    from elastic_etcd.cli import options
    from elastic_etcd.core.txn import Snapshot
    from elastic_etcd.core.view import View

_EPILOG = f"""\
Times are UTC, of the machine on which something happened; what only shows as it happens (who comes
and goes, the phases of a round) has the time of this one.

examples:
  elastic-etcd events resnet-7 --etcd etcd1:2379
  elastic-etcd events resnet-7 --follow --json | jq 'select(.name | endswith("FAILED"))'

{look.CODES}"""


def parser() -> options.Parser:
    """The command line of `elastic-etcd events JOB`."""
    made = look.parser("events", "Shows what a job went through, an event a line.", _EPILOG)
    made.add_argument("--json", action="store_true", help="a JSON object a line, as torch's")
    made.add_argument("--follow", action="store_true", help="go on until the job is over")
    return made


def main(argv: Sequence[str]) -> int:
    """Print a job's events; gives the exit code."""
    return look.run(parser, argv, _events)


async def _events(job: look.Job, args: Namespace) -> None:
    told = _Told(as_json=args.json)
    before = await job.view()
    told.tell(past(job.name, before))

    def follow(seen: Snapshot) -> bool | None:
        nonlocal before
        view = view_of(seen, job.keys, Everything())
        told.tell(news(job.name, before, view, time.time_ns() // 10**6))
        told.tell(past(job.name, view))
        before = view
        return True if _is_over(view) else None

    if args.follow and not _is_over(before):
        await first(job.client, job.ranges, follow)


def _is_over(view: View) -> bool:
    return view.outcome is not None and not view.members


class _Told:
    """Prints each event once, and once more when more is known of it."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._known: set[str] = set()

    def tell(self, events: Iterable[Event]) -> None:
        for event in events:
            line = event.json() if self._as_json else in_one_line(event.line())
            if line not in self._known:
                self._known.add(line)
                print(line, flush=True)
