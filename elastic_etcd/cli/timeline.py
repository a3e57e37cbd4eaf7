"""`elastic-etcd timeline`: a trace for Perfetto of all that each node did in each second."""

from __future__ import annotations

import json
import time
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_etcd.cli import query
from elastic_etcd.cli.report import is_current, worlds
from elastic_etcd.core.ranks import natural
from elastic_etcd.core.schema import seconds_of
from elastic_etcd.core.words import counted
from elastic_etcd.errors import ElasticEtcdError, UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from elastic_etcd.cli import parsers
    from elastic_etcd.core.schema import History
    from elastic_etcd.core.view import View
    from elastic_etcd.etcd.client import Client

_EPILOG = f"""\
The times are those of report: all nodes of a world are shown with the times that its coordinator's
node has measured.

examples:
  elastic-etcd timeline resnet-7 --etcd etcd1:2379 --out resnet-7.json
  elastic-etcd timeline --all --out all.json           # their nodes as JOB/NODE

Open the file in ui.perfetto.dev or chrome://tracing.

{query.CODES}"""


def parser() -> parsers.Parser:
    """The command line of `elastic-etcd timeline JOB`."""
    text = "Writes what each node did in the newest run, as Chrome's trace."
    arguments = "JOB | --all  --out FILE | --json"
    every = "each job under --prefix, in one trace"
    as_json = "print what --out FILE would have written"
    made = query.parser("timeline", text, _EPILOG, arguments, every=every, as_json=as_json)
    made.add_argument("--out", type=Path, metavar="FILE", help="the file to write")
    made.checks.append(_out_or_json)
    return made


def _out_or_json(args: Namespace) -> None:
    if bool(args.out) == args.json:
        raise ArgumentTypeError("where to? Give either --out FILE or --json")


def main(argv: Sequence[str]) -> int:
    """Write the file; gives the exit code."""
    return query.with_etcd(parser, argv, _write_timeline)


async def _write_timeline(client: Client, args: Namespace) -> None:
    views = await query.views(client, args)
    events = [
        (f"{job}/{node}" if args.all else node, event)
        for job, view in views.items()
        for node, event in of_history(view, time.time())
    ]
    if not events and args.all:
        raise ElasticEtcdError(f"no job under {args.prefix} has had a world yet")
    if not events:
        raise ElasticEtcdError(f"job {args.job} has had no world yet")
    if args.json:
        print(trace(events))
        return
    try:
        args.out.write_text(trace(events))
    except OSError as error:
        raise UsageError(f"--out {args.out}: {error.strerror}") from error
    print(query.in_one_line(f"{args.out}: {counted(len({node for node, _ in events}), 'node')}"))


def trace(events: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Chrome's trace format, of events with the node of each: a process for each node."""
    names = sorted({node for node, _ in events}, key=lambda name: natural(name[:500]))
    pids = {node: pid for pid, node in enumerate(names)}
    processes = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": node}}
        for node, pid in pids.items()
    ]
    of_nodes = [event | {"pid": pids[node], "tid": 0} for node, event in events]
    return json.dumps({"traceEvents": [*processes, *of_nodes], "displayTimeUnit": "ms"})


def of_history(view: View, now: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give each node's events in the newest run; a world that nobody measured is one span.

    The coordinators' clocks say when worlds began, and `now` where the one that trains has come.
    """
    for entry in worlds(view):
        began = seconds_of(entry.began_at)
        if began is None:
            continue
        events = list(_of_world(entry, began, _end(view, entry, now)))
        yield from ((node, event) for node in entry.nodes or () for event in events)


def _end(view: View, entry: History, now: float) -> float | None:
    """When a world has ended, as far as is known."""
    if is_current(view, entry):
        return now if view.members else None
    return seconds_of(entry.ended_at)


def _of_world(entry: History, began: float, ended: float | None) -> Iterator[dict[str, Any]]:
    """A world's events, which are the same on each of its nodes."""
    world = {"world": f"generation {entry.generation}: {entry.began or ''}"}

    def span(doing: str, begin: float, end: float) -> dict[str, Any]:
        ts = _micro(begin)
        of = {"ts": ts, "dur": _micro(end) - ts, "name": doing, "args": world}
        return {"ph": "X", "cat": "world"} | of

    spent = entry.spent or None
    if spent is None or spent.unknown:
        if ended is not None and ended > began:
            yield span("unknown" if entry.ended else "training", began, ended)
        return
    yield span("waiting", began - spent.rendezvous, began)
    at = began
    for doing, seconds in (
        ("starting", spent.start + spent.first_step),
        ("training", max(0.0, spent.trained - spent.again)),
        ("trained again", spent.again),
        ("waiting", spent.detect),
        ("hang", spent.hang),
        ("stopping", spent.stop),
    ):
        if doing == "trained again" and seconds:  # since the last commit
            yield {"ph": "i", "name": "saved", "s": "p", "ts": _micro(at)}
        if seconds:
            yield span(doing, at, at + seconds)
        at += seconds


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
