"""`elastic-etcd wait`: until a job is over or trains; the exit code says which, for scripts."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from elastic_etcd.cli import query, status
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
A job that nobody has begun yet is waited for, too, and so is a deserted one, since agents that are
started again go on with it: a note says so. At the end status' first lines are printed.

A job that is over is not waited for, and its agents are in etcd some seconds after their start: an
outcome is the former run's until then. Where an id is used again, forget the job first.

examples:
  elastic-etcd wait resnet-7 --etcd etcd1:2379 && ./evaluate.sh
  timeout 600 elastic-etcd wait resnet-7 --for training
  elastic-etcd forget resnet-7; sbatch job.sh && elastic-etcd wait resnet-7      # once more

exit codes:
  0 it has succeeded; with --for training: or it trains     1 it has failed     2 wrong usage
  3 it was stopped     5 etcd unreachable at the start, or denied     130 ended by Ctrl-C
"""


def parser() -> parsers.Parser:
    """The command line of `elastic-etcd wait JOB`."""
    made = query.parser("wait", "Waits for the end of a job.", _EPILOG, "JOB")
    choices = ("end", "training")
    text = "until the job is over, or until a world of it trains (default: end)"
    made.add_argument("--for", dest="until", choices=choices, default="end", help=text)
    return made


def main(argv: Sequence[str]) -> int:
    """Wait; gives the exit code."""
    return query.with_etcd(parser, argv, _wait)


async def _wait(client: Client, args: Namespace) -> int:
    job = query.Job(client, args)
    known = job.view_of(await client.range(*job.ranges, timeout=args.timeout))
    if not query.is_known(known):
        query.note(f"{client.endpoint} has no job at {job.keys.root} yet")
    elif known.outcome:
        former = "if agents were just started for another run, this is the former one's end"
        query.note(f"job {job.name} was over before: {former}")

    deserted = False

    def found(seen: Snapshot) -> View | None:
        nonlocal deserted
        view = job.view_of(seen)
        state, before = status.state_of(view), deserted
        deserted = state == "deserted" and query.is_known(view)
        if deserted and not before:
            query.note(f"job {job.name} is deserted: it goes on if agents are started again")
        trains = args.until == "training" and state == "training"
        return view if view.outcome or trains else None

    waiting = first(client, job.ranges, found)
    view = await query.while_silence_is_told(client, args, waiting)
    told = status.describe(job.name, view)
    with suppress(BrokenPipeError):  # as after `| head`
        if args.json:
            query.print_json(told, args)
        else:
            query.say(islice(status.summary(told), _HEAD))
    return _CODES.get(told["state"], 3)
