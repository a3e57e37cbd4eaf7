"""`elastic-etcd wait`: until a job is over or trains; the exit code says which, for scripts."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING

from elastic_etcd.cli import flag_values, query, status
from elastic_etcd.errors import NotInTime
from elastic_etcd.etcd.mirror import first

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from elastic_etcd.cli import parsers
    from elastic_etcd.core.txn import Snapshot
    from elastic_etcd.core.view import View
    from elastic_etcd.etcd.client import Client

_HEAD = 3  # lines of status: what it does, why, and the last words
_CODES = {"succeeded": 0, "training": 0, "failed": 1}  # others: 3
_EPILOG = """\
A job that nobody has begun yet is waited for, too. At the end status' first lines are printed.

examples:
  elastic-etcd wait resnet-7 --etcd etcd1:2379 && ./evaluate.sh
  elastic-etcd wait resnet-7 --for training --within 600

exit codes:
  0 it has succeeded; with --for training: or it trains     1 it has failed     2 wrong usage
  3 it was stopped     4 not within --within     5 etcd unreachable at the start, or denied
  130 ended by Ctrl-C
"""


def parser() -> parsers.Parser:
    """The command line of `elastic-etcd wait JOB`."""
    made = query.parser("wait", "Waits for the end of a job.", _EPILOG, "JOB")
    choices = ("end", "training")
    made.add_argument("--for", dest="until", choices=choices, default="end", help="(default: end)")
    seconds = flag_values.seconds
    made.add_argument("--within", type=seconds, metavar="SECONDS", help="(default: for ever)")
    return made


def main(argv: Sequence[str]) -> int:
    """Wait; gives the exit code."""
    return query.with_etcd(parser, argv, _wait)


async def _wait(client: Client, args: Namespace) -> int:
    job = query.Job(client, args)
    newest = job.view_of(await client.range(*job.ranges, timeout=args.timeout))
    if not query.is_known(newest):
        query.note(f"{client.endpoint} has no job at {job.keys.root} yet")

    def found(seen: Snapshot) -> View | None:
        nonlocal newest
        newest = job.view_of(seen)
        trains = args.until == "training" and status.state_of(newest) == "training"
        return newest if newest.outcome or trains else None

    try:
        async with asyncio.timeout(args.within):
            await query.while_silence_is_told(client, args, first(client, job.ranges, found))
    except TimeoutError:
        state = f"is {status.state_of(newest)}" if query.is_known(newest) else "has not begun"
        raise NotInTime(f"after {args.within:g} s job {job.name} {state}") from None
    told = status.describe(job.name, newest)
    if args.json:
        query.print_json(told, args)
    else:
        query.say(islice(status.summary(told), _HEAD))
    return _CODES.get(told["state"], 3)
