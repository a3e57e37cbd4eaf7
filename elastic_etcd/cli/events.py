"""`elastic-etcd events`: a job's history, or that of each with --all, and its news as they come.

They are made of a job's keys, in the form of torch.distributed.elastic.events. An event has torch's
name if torch has one; the names of all others begin with `elastic_etcd.`.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from itertools import zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, Struct
from msgspec.structs import replace

from elastic_etcd.agent.goodput import total
from elastic_etcd.cli import query
from elastic_etcd.cli.query import in_one_line
from elastic_etcd.core.schema import Failure, History, Keys, Outcome, decode, seconds_of
from elastic_etcd.core.txn import Snapshot
from elastic_etcd.core.view import Everything, view_of
from elastic_etcd.etcd.mirror import first

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from elastic_etcd.cli import parsers
    from elastic_etcd.core.schema import Drain, Halt, Scale
    from elastic_etcd.core.view import View
    from elastic_etcd.etcd.client import Client

TORCHS = "torchelastic.worker.status."
OURS = "elastic_etcd."
BACKEND = "etcd-v3"
_REQUESTS = ("drain", "stop", "scale")
_EPILOG = f"""\
Times are UTC, of the machine on which something happened. Events that only show as they happen
(nodes that come and go, the phases of a round) have the time of this one.

examples:
  elastic-etcd events resnet-7 --etcd etcd1:2379
  elastic-etcd events resnet-7 --follow --json | jq 'select(.name | endswith("FAILED"))'
  elastic-etcd events --all --follow            also of jobs that begin meanwhile, until Ctrl-C

{query.CODES}"""


def parser() -> parsers.Parser:
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
    return query.with_etcd(parser, argv, _events)


async def _events(client: Client, args: Namespace) -> None:
    before = await query.views(client, args)
    widest = max(map(len, before), default=1) if args.all else 0
    printer = _Printer(as_json=args.json, widest=widest)
    told = _by_time(before)
    printer.print(told)
    if not (told or args.follow or args.all):
        query.note(f"nothing has happened to job {args.job} yet")

    def is_over() -> bool:
        return not args.all and all(v.outcome and not v.members for v in before.values())

    def follow(seen: Snapshot) -> bool | None:
        nonlocal before
        after = query.views_of(seen, args)
        for job, view in after.items():
            was = before.get(job) or view_of(Snapshot(0, {}), Keys(job), Everything())
            printer.print(news(job, was, view, time.time_ns() // 10**6))
            printer.print(past(job, view))
        before = after
        return is_over() or None

    if args.follow and not is_over():
        following = first(client, (query.keys_of(args),), follow)
        await query.while_read(query.while_silence_is_told(client, args, following))


def _by_time(views: Mapping[str, View]) -> list[Event]:
    """All jobs' histories as one; each one's events stay in their order."""
    timed: list[tuple[int, Event]] = []
    for job, view in views.items():
        timed += _timed(job, view)
    return [event for _, event in sorted(timed, key=itemgetter(0))]


def _timed(job: str, view: View) -> Iterator[tuple[int, Event]]:
    """A job's events with the times by which they are sorted: those of worlds stay in order."""
    at = 0
    for event in past(job, view):
        if event.name.removeprefix(OURS) in _REQUESTS:
            yield event.timestamp, event
        else:
            at = max(at, event.timestamp)
            yield at, event


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


# --- an event -----------------------------------------------------------------------------


class Event(Struct, frozen=True):
    """An event of a job."""

    name: str
    source: str
    timestamp: int  # in milliseconds since 1970; 0: nobody knows
    metadata: dict[str, Any]
    text: str  # for people to read

    def json(self) -> str:
        """As torch's Event.serialize, in one line."""
        fields = {name: getattr(self, name) for name in ("name", "source", "timestamp", "metadata")}
        return json.dumps(fields)

    def line(self, widest: int = 0) -> str:
        """For people to read; with the job's name, in so many columns, if they are not 0."""
        name = self.name.removeprefix(TORCHS).removeprefix(OURS)
        job = f"  {self.metadata['run_id']:{widest}}" if widest else ""
        return f"{self.time or '-':24}{job}  {name:14}  {self.text}"

    @property
    def time(self) -> str:
        """Its time in UTC, "" where nobody knows it."""
        if not 0 < self.timestamp < _LATEST:
            return ""
        at = datetime.fromtimestamp(self.timestamp / 1e3, UTC)
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


_LATEST = 253402300800000  # the year 10000


def event(
    state: str,
    text: str,
    *,
    job: str,
    at: str | int = "",
    node: str | None = None,
    failure: Failure | None = None,
    restarts: int = 0,
    seconds: float | None = None,
    total: float = 0.0,
    **more: Any,
) -> Event:
    """An event of `job`: torch's of that state, or one of ours.

    at: when, as ISO 8601 or in milliseconds. seconds: how long it took. failure: the worker whose
    event it is. total: how long the job has lasted. more: what torch's metadata have no name for.
    """
    name = (TORCHS if state.isupper() else OURS) + state
    if failure:  # torch has made tuples of these
        more = {"local_rank": [failure.local_rank], "exit_code": [failure.code]} | more
        more["worker_pid"] = [failure.pid]
    metadata = {
        "run_id": job,
        "global_rank": failure.rank if failure else None,
        "group_rank": None,
        "worker_id": str(failure.pid) if failure else None,
        "role": None,
        "hostname": failure.node if failure else node,
        "state": state,
        "total_run_time": int(total),
        "rdzv_backend": BACKEND,
        "raw_error": (failure.message or None) if failure else None,
        "metadata": json.dumps({name: value for name, value in more.items() if value is not None}),
        "agent_restarts": restarts,
        "duration_ms": None if seconds is None else round(1e3 * seconds, 3),
    }
    source = "WORKER" if failure else "AGENT"
    timestamp = at if isinstance(at, int) else round(1e3 * max(0.0, seconds_of(at) or 0.0))
    return Event(name, source, timestamp, metadata, text)


# --- from a job's keys --------------------------------------------------------------------


def lines(job: str, view: View) -> list[str]:
    """A job's history in short lines, for who shows the end of it beside other things."""
    return [f"{query.when(each.time) or '-':20} {each.text}" for each in _by_time({job: view})]


def past(job: str, view: View) -> Iterator[Event]:
    """All events of which a job's keys tell, in order."""
    ended = None  # the world before
    for generation, value in view.history:
        try:
            entry = decode(History, value)
        except ValueError as error:
            text = f"generation {generation}: unreadable: {error}"
            yield event("malformed", text, job=job, generation=generation)
        else:
            if not entry.divergences:
                lines = query.newest_divergences(view, generation) or UNSET
                entry = replace(entry, divergences=lines)
            yield from _of_world(job, entry, ended)
            ended = seconds_of(entry.ended_at)
    if view.outcome and all(entry.outcome != view.outcome for entry in query.worlds(view)):
        yield _of_outcome(job, view.outcome, 0.0)
    yield from _of_wanted(job, view)


def _of_world(job: str, entry: History, ended: float | None) -> Iterator[Event]:
    generation, spent = entry.generation, entry.spent or None
    common: dict[str, Any] = {"job": job, "restarts": entry.restarts or 0, "generation": generation}
    if isinstance(entry.began, str):
        nodes = entry.nodes or ()
        began = seconds_of(entry.began_at)
        later = f" {max(0.0, began - ended):.1f} s later" if began and ended else ""
        size = f" world of {entry.world_size or '?'} on {query.some_of(nodes)}" if nodes else ""
        world = f";{later}{size}" if later or size else ""
        yield event(
            "RENDEZVOUS",
            f"generation {generation}: {entry.began}{world}",
            at=entry.began_at or "",
            node=entry.coordinator or None,
            seconds=spent.rendezvous if spent else None,
            reason=entry.began,
            run=entry.run or None,
            nodes=nodes,
            group_world_size=len(nodes),
            world_size=entry.world_size or None,
            **common,
        )
    of_kind = (("hang", entry.hangs), ("straggler", entry.stragglers))
    for kind, told in (*of_kind, ("divergence", entry.divergences)):
        times = (entry.hung_at or ()) if kind == "hang" else ()
        for line, at in zip_longest(told or (), times[: len(told or ())], fillvalue=""):
            yield event(kind, f"generation {generation}: {line}", at=at, reason=line, **common)
    for failure in entry.failures or ():
        text = f"generation {generation}: {failure} after {failure.uptime:.1f} s{_said(failure)}"
        yield event("FAILED", text, at=failure.at, failure=failure, **common)
    if isinstance(entry.ended, str) and not entry.outcome:
        steps = f" (trained {spent.trained:.1f} s, {spent.steps} steps)" if spent else ""
        yield event(
            "STOPPED",
            f"generation {generation}: {entry.ended}{steps if spent and spent.steps else ''}",
            at=entry.ended_at or "",
            node=entry.coordinator or None,
            reason=entry.ended,
            **common,
        )
    if entry.outcome:
        yield _of_outcome(job, entry.outcome, total(entry.spent_until_now), common["restarts"])


OUTCOMES = {"succeeded": "SUCCEEDED", "failed": "FAILED"}


def _of_outcome(job: str, outcome: Outcome, lasted: float, restarts: int = 0) -> Event:
    return event(
        OUTCOMES.get(outcome.state, "TERMINATED"),
        f"the job {outcome.state}: {outcome.reason}{_said(outcome.failure, outcome.reason)}",
        job=job,
        at=outcome.at,
        total=lasted,
        restarts=restarts,
        reason=outcome.reason,
        run=outcome.run,
        generation=outcome.generation,
        exit_code=outcome.exit_code,
    )


def _said(failure: Failure | None, reason: str = "") -> str:
    """Its last words, unless they are in the reason."""
    words = failure.last_words if failure else ""
    return f": {words}" if words and words not in reason else ""


def _of_wanted(job: str, view: View) -> Iterator[Event]:
    if view.wanted is None:
        return
    for drain in view.wanted.drains:
        text = f"{drain.node} is drained{_by(drain)}"
        yield event("drain", text, job=job, at=drain.at, node=drain.node)
    if halt := view.wanted.stop:
        text = f"the job is to stop{_by(halt)}"
        yield event("stop", text, job=job, at=halt.at, run=halt.run)
    if scale := view.wanted.scale:
        text = f"the job is scaled to {scale.nnodes} nodes{_by(scale)}"
        yield event("scale", text, job=job, at=scale.at, run=scale.run, nnodes=scale.nnodes)


def _by(request: Drain | Halt | Scale) -> str:
    return f" by {request.by}" if request.by else ""


def news(job: str, before: View, after: View, now: int) -> Iterator[Event]:
    """Events that no key keeps, by two views one after the other; seen at `now`."""
    old, new = ({m.lease: m for m in view.members} for view in (before, after))
    for lease, member in new.items():
        was = old.get(lease)
        at: dict[str, Any] = {"job": job, "at": now, "node": member.node}
        if was is None:
            yield event("node.joined", f"{member.node} is there", **at)
        if member.leaving and not (was and was.leaving):
            yield event("node.leaving", f"{member.node} is leaving", **at)
    for lease, member in old.items():
        if lease not in new:
            text = f"{member.node} is gone"
            yield event("node.gone", text, job=job, at=now, node=member.node)
    was_round, current = before.round, after.round
    if current is None or current == was_round:
        return
    generation, phase = current.generation, current.phase.value
    if was_round is None or (generation, phase) != (was_round.generation, was_round.phase.value):
        text = f"generation {generation} is {phase}: {current.reason}"
    elif current.coordinator != was_round.coordinator:
        text = f"generation {generation}: {current.node} coordinates from here on"
    else:
        return
    which: dict[str, Any] = {"generation": generation, "phase": phase}
    yield event("round", text, job=job, at=now, node=current.node, **which)
