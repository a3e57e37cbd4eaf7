"""`elastic-etcd status JOB`: what a job is doing and what it went through, read at one revision."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from elastic_etcd.cli import options
from elastic_etcd.cli.options import shown
from elastic_etcd.core.schema import History, Keys, decode, plain
from elastic_etcd.core.view import Everything, View, covered, view_of
from elastic_etcd.errors import ElasticEtcdError, UsageError
from elastic_etcd.etcd.client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_etcd.core.schema import Member
    from elastic_etcd.etcd.config import EtcdConfig

_HISTORY = 8  # generations shown; --json has all


def main(argv: Sequence[str]) -> int:
    """Print a job's state; gives 0, or 1 when etcd knows no such job."""
    parser = options.Parser(
        prog="elastic-etcd status",
        description="Shows a job's nodes, ranks, restarts, recent history and outcome.",
        epilog="exit codes: 0 shown, 1 no such job, 2 wrong usage, 5 etcd unreachable or denied",
    )
    parser.add_argument("job", metavar="JOB", type=options.job_id, help="the job's id")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    group = options.Group(parser, "etcd", os.environ)
    options.connection(group)
    group.flag("--timeout", type=options.seconds, default=5, metavar="SECONDS", help="(default: 5)")
    try:
        args = parser.parse_args(argv)
        config = options.etcd_of(args, os.environ)
        if config is None:
            raise UsageError("which etcd? Give --etcd HOST:2379, or set ETCDCTL_ENDPOINTS.")
        keys = Keys(f"{args.prefix}/{args.job}")
        view = asyncio.run(_look(config, keys, args.timeout))
    except ElasticEtcdError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return error.exit_code
    if not (view.round or view.outcome or view.members or view.history):
        print(f"error: {', '.join(config.endpoints)} has no job at {keys.root}", file=sys.stderr)
        return 1
    state = describe(args.job, view)
    if args.json:
        print(json.dumps(state, indent=2))
    else:
        _show(state)
    return 0


async def _look(config: EtcdConfig, keys: Keys, timeout: float) -> View:
    async with Client(config) as client:
        snapshot = await client.range(*covered(keys, Everything()), timeout=timeout)
    return view_of(snapshot, keys, Everything())


def describe(job: str, view: View) -> dict[str, Any]:
    """The job as plain data, the shape of `--json`."""
    now = view.round
    phase = now.phase.value if now else "closed" if view.outcome else "setup"
    last = view.outcome.generation if view.outcome else view.ledger.generation
    return {
        "job": job,
        "revision": view.revision,
        "phase": phase,
        "generation": now.generation if now else last,
        "reason": now.reason if now else view.outcome.reason if view.outcome else "",
        "restarts": now.restarts if now else _last_restarts(view),
        "min_nodes": view.spec.min_nodes if view.spec else None,
        "max_nodes": view.spec.max_nodes if view.spec else None,
        "coordinator": view.coordinator.node if view.coordinator else None,
        "master": f"{now.master.addr}:{now.master.port}" if now and now.master else None,
        "nodes": [*_participants(view), *_others(view)],
        "history": [_entry(generation, text) for generation, text in view.history],
        "outcome": plain(view.outcome) if view.outcome else None,
        "malformed": list(view.malformed),
    }


def _last_restarts(view: View) -> int:
    """Of the newest world: the ledger goes when the job ends."""
    return int(_entry(*view.history[-1]).get("restarts", 0)) if view.history else 0


def _participants(view: View) -> Iterator[dict[str, Any]]:
    members = {member.lease: member for member in view.members}
    first = 0
    for group_rank, p in enumerate(view.round.participants if view.round else ()):
        member = members.get(p.lease)
        state = "gone" if member is None else "leaving" if member.leaving else "training"
        ranks = list(range(first, first + p.nproc))
        first += p.nproc
        yield _node(p.node, member, state, p.nproc) | {"group_rank": group_rank, "ranks": ranks}


def _others(view: View) -> Iterator[dict[str, Any]]:
    taking_part = {p.lease for p in view.round.participants} if view.round else set()
    for member in view.members:
        if member.lease not in taking_part:
            spare = view.round is not None and view.round.phase in ("frozen", "final")
            state = "leaving" if member.leaving else "spare" if spare else "waiting"
            yield _node(member.node, member, state, member.nproc)


def _node(name: str, member: Member | None, state: str, nproc: int) -> dict[str, Any]:
    address = member.address if member else None
    return {
        "node": name,
        "state": state,
        "address": address,
        "nproc": nproc,
        "group_rank": None,
        "ranks": [],
    }


def _entry(generation: int, text: str) -> dict[str, Any]:
    try:
        return plain(decode(History, text))
    except ValueError as error:
        return {"generation": generation, "ended": f"unreadable: {error}"}


def _show(state: dict[str, Any]) -> None:
    from rich.console import Console  # noqa: PLC0415 - not loaded for --json
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    console = Console(highlight=False)
    for line in _summary(state):
        console.print(shown(line), markup=False, soft_wrap=True)
    if state["nodes"]:
        table = Table("node", "state", "group rank", "ranks", "workers", "address", box=None)
        for node in state["nodes"]:
            group_rank = "-" if node["group_rank"] is None else str(node["group_rank"])
            cells = (node["state"], group_rank, _span(node["ranks"]), str(node["nproc"]))
            row = (node["node"], *cells, node["address"] or "-")
            table.add_row(*(Text(shown(cell)) for cell in row))  # names may look like markup
        console.print(table)
    for entry in state["history"][-_HISTORY:]:
        console.print(shown(_line(entry)), markup=False, soft_wrap=True)


def _summary(state: dict[str, Any]) -> Iterator[str]:
    yield f"job {state['job']}: {state['phase']}, generation {state['generation']}"
    if state["reason"]:
        yield f"  because {state['reason']}"
    limits = f"{state['min_nodes']} to {state['max_nodes']} nodes, " if state["min_nodes"] else ""
    yield f"  {limits}{state['restarts']} restarts used"
    if state["coordinator"] or state["master"]:
        yield f"  coordinator {state['coordinator'] or '-'}, master {state['master'] or '-'}"
    if state["outcome"]:
        outcome = state["outcome"]
        yield f"  {outcome['state']} at {outcome['at']}: {outcome['reason']}"
    yield from (f"  unreadable: {line}" for line in state["malformed"])


def _line(entry: dict[str, Any]) -> str:
    nodes = ", ".join(entry.get("nodes", ()))
    world = f" world of {entry['world_size']} on {nodes}" if "world_size" in entry else ""
    began = f" began at {entry['began_at']}: {entry.get('began')};" if "began_at" in entry else ""
    ended = f" ended: {entry['ended']}" if "ended" in entry else " goes on"
    return f"generation {entry['generation']}:{world}{began}{ended}"


def _span(ranks: list[int]) -> str:
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
