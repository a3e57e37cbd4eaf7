"""`elastic-etcd timeline`: a trace for Perfetto of all that each node did in each second."""

from __future__ import annotations

import json
import time
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elastic_etcd.cli import query
from elastic_etcd.cli.report import is_current, worlds
from elastic_etcd.core.ranks import natural
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


class Span(NamedTuple):
    """A time in which a node does one thing."""

    node: str
    doing: str
    begin: float  # seconds since 1970
    end: float
    world: str  # its generation, and why it began


class Saved(NamedTuple):
    """The last commit of a world."""

    node: str
    at: float


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
    spans = [
        span._replace(node=f"{job}/{span.node}") if args.all else span
        for job, view in views.items()
        for span in of_history(view, time.time())
    ]
    if not spans and args.all:
        raise ElasticEtcdError(f"no job under {args.prefix} has had a world yet")
    if not spans:
        raise ElasticEtcdError(f"job {args.job} has had no world yet")
    if args.json:
        print(trace(spans))
        return
    try:
        args.out.write_text(trace(spans))
    except OSError as error:
        raise UsageError(f"--out {args.out}: {error.strerror}") from error
    print(query.in_one_line(f"{args.out}: {len({span.node for span in spans})} nodes"))


# --- what each node did -------------------------------------------------------------------


def of_history(view: View, now: float) -> Iterator[Span | Saved]:
    """Give the spans of the newest run's worlds, those that nobody measured from begin to end.

    The coordinators' clocks say when worlds began, and `now` where the one that trains has come.
    """
    for entry in worlds(view):
        began = query.seconds_of(entry.began_at)
        if began is None:
            continue
        world = f"generation {entry.generation}: {entry.began or ''}"
        for node in entry.nodes or ():
            yield from _of_world(entry, node, began, world, _end(view, entry, now))


def _end(view: View, entry: History, now: float) -> float | None:
    """When a world has ended, as far as is known."""
    if is_current(view, entry):
        return now if view.members else None
    return query.seconds_of(entry.ended_at)


def _of_world(
    entry: History, node: str, began: float, world: str, ended: float | None
) -> Iterator[Span | Saved]:
    spent = entry.spent or None
    if spent is None or spent.unknown:
        if ended is not None and ended > began:
            yield Span(node, "unknown" if entry.ended else "training", began, ended, world)
        return
    yield Span(node, "waiting", began - spent.rendezvous, began, world)
    at = began
    for doing, seconds in (
        ("starting", spent.start + spent.first_step),
        ("training", max(0.0, spent.trained - spent.again)),
        ("trained again", spent.again),
        ("waiting", spent.detect),
        ("hang", spent.hang),
        ("stopping", spent.stop),
    ):
        if doing == "trained again" and seconds:
            yield Saved(node, at)
        if seconds:
            yield Span(node, doing, at, at + seconds, world)
        at += seconds


# --- as a trace ---------------------------------------------------------------------------


def trace(spans: Sequence[Span | Saved]) -> str:
    """Chrome's trace format: a process for each node."""
    names = sorted({span.node for span in spans}, key=lambda name: natural(name[:500]))
    nodes = {name: number for number, name in enumerate(names)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": node}}
        for node, pid in nodes.items()
    ]
    for span in spans:
        at = {"pid": nodes[span.node], "tid": 0}
        if isinstance(span, Saved):
            events.append({"ph": "i", "name": "saved", "s": "p", "ts": _micro(span.at), **at})
        else:
            took = _micro(span.end) - _micro(span.begin)
            args = {"args": {"world": span.world}}
            of = {"ts": _micro(span.begin), "dur": took, "name": span.doing, **args}
            events.append({"ph": "X", "cat": "world", **of, **at})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
