"""`elastic-etcd timeline`: what each node did in each second, as a trace to look at in Perfetto."""

from __future__ import annotations

import json
import re
import time
from argparse import ArgumentTypeError
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elastic_etcd.cli import query
from elastic_etcd.cli.report import worlds
from elastic_etcd.core.schema import Phase, Spent
from elastic_etcd.errors import ElasticEtcdError, UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from elastic_etcd.cli import options
    from elastic_etcd.core.schema import History
    from elastic_etcd.core.view import View
    from elastic_etcd.etcd.client import Client

_EPILOG = f"""\
The times are those of report: what the coordinator's node has measured is shown for all nodes of a
world.

examples:
  elastic-etcd timeline resnet-7 --etcd etcd1:2379 --out resnet-7.json
  elastic-etcd timeline --all --out all.json           # their nodes as JOB/NODE

Open the file in ui.perfetto.dev or chrome://tracing.

{query.CODES}"""


class Span(NamedTuple):
    """What a node does from one second to another, both since 1970."""

    node: str
    doing: str
    begin: float
    end: float
    told: str  # of which world


class Saved(NamedTuple):
    """The last commit of a world."""

    node: str
    at: float


def parser() -> options.Parser:
    """The command line of `elastic-etcd timeline JOB`."""
    text = "Writes what each node did in the newest run, as Chrome's trace."
    arguments = "JOB | --all  --out FILE | --json"
    every = "each job under --prefix, in one trace"
    made = query.parser("timeline", text, _EPILOG, arguments, every=every)
    made.add_argument("--out", type=Path, metavar="FILE", help="the file to write")
    made.add_argument(
        "--json", action="store_true", help="print what --out FILE would have written"
    )
    one_or_all = made.get_default("check")

    def check(args: Namespace) -> None:
        one_or_all(args)
        if bool(args.out) == args.json:
            raise ArgumentTypeError("where to? Give either --out FILE or --json")

    made.set_defaults(check=check)
    return made


def main(argv: Sequence[str]) -> int:
    """Write the file; gives the exit code."""
    return query.run(parser, argv, _timeline, _timelines)


async def _timeline(job: query.Job, args: Namespace) -> None:
    spans = list(of_history(await job.view(), time.time()))
    if not spans:
        raise ElasticEtcdError(f"job {job.name} has had no world yet")
    _write_timeline(spans, args)


async def _timelines(client: Client, args: Namespace) -> None:
    views = await query.all_views(client, args)
    spans = [
        span._replace(node=f"{job}/{span.node}")
        for job, view in views.items()
        for span in of_history(view, time.time())
    ]
    if not spans:
        raise ElasticEtcdError(f"no job under {args.prefix} has had a world yet")
    _write_timeline(spans, args)


def _write_timeline(spans: Sequence[Span | Saved], args: Namespace) -> None:
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
    """By the worlds of the newest run. Of those that nobody measured only begin and end are known.

    The coordinators' clocks say when worlds began, and `now` where the one that trains has come.
    """
    for entry in worlds(view):
        began = _seconds(entry.began_at)
        if began is None:
            continue
        told = f"generation {entry.generation}: {entry.began or ''}"
        for node in entry.nodes or ():
            yield from _of_world(entry, node, began, told, _end(view, entry, now))


def _end(view: View, entry: History, now: float) -> float | None:
    """When a world has ended, as far as is known."""
    current = view.round
    if current and (current.generation, current.phase) == (entry.generation, Phase.FINAL):
        return now if view.members else None
    return _seconds(entry.ended_at)


def _of_world(
    entry: History, node: str, began: float, told: str, ended: float | None
) -> Iterator[Span | Saved]:
    spent = entry.spent or None
    if spent is None or spent.unknown:
        if ended is not None and ended > began:
            yield Span(node, "unknown" if entry.ended else "training", began, ended, told)
        return
    yield Span(node, "waiting", began - spent.rendezvous, began, told)
    at = began
    for doing, seconds in _in_order(spent):
        if doing == "trained again" and seconds:
            yield Saved(node, at)
        if seconds:
            yield Span(node, doing, at, at + seconds, told)
        at += seconds


def _in_order(spent: Spent) -> Iterator[tuple[str, float]]:
    yield "starting", spent.start + spent.first_step
    yield "training", max(0.0, spent.trained - spent.again)
    yield "trained again", spent.again
    yield "waiting", spent.detect
    yield "hang", spent.hang
    yield "stopping", spent.stop


def _seconds(text: object) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None


# --- as a trace ---------------------------------------------------------------------------


def trace(spans: Sequence[Span | Saved]) -> str:
    """Chrome's trace format: a process for each node."""
    nodes = _nodes(spans)
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
            args = {"args": {"world": span.told}}
            of = {"ts": _micro(span.begin), "dur": took, "name": span.doing, **args}
            events.append({"ph": "X", "cat": "world", **of, **at})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)


def _nodes(spans: Sequence[Span | Saved]) -> dict[str, int]:
    """Each with a number, in the natural order of their names."""
    names = sorted({span.node for span in spans}, key=_naturally)
    return {name: number for number, name in enumerate(names)}


def _naturally(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", name)
    return [(int(part[:18]), "") if part.isdecimal() else (0, part) for part in parts]
