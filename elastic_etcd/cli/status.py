"""`elastic-etcd status`: a job's state and its history, or with --all a line for each job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from elastic_etcd.cli import query
from elastic_etcd.core import requests, suspects
from elastic_etcd.core.lifecycle import Outdated
from elastic_etcd.core.rules import Local, awaited
from elastic_etcd.core.schema import History, Phase, decode, hexed, plain
from elastic_etcd.protocol.messages import UNCOUNTED

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator, Sequence

    from rich.table import Table

    from elastic_etcd.cli import parsers
    from elastic_etcd.core.schema import Limits, Member, Participant, Spec
    from elastic_etcd.core.view import View
    from elastic_etcd.etcd.client import Client

_HISTORY = 8  # generations shown; --json has all
_SHORT = ("job", "state", "phase", "generation", "reason", "restarts", "limits", "world_size")
_EPILOG = f"""\
A job is forming until a world of it trains, then training; deserted where it has no outcome, and no
node is there any more; at its end succeeded, failed or stopped.

examples:
  elastic-etcd status resnet-7 --etcd etcd1:2379
  elastic-etcd status --all --json | jq -r 'select(.state == "deserted").job'

{query.CODES}"""


def parser() -> parsers.Parser:
    """The command line of `elastic-etcd status JOB`."""
    text = "Shows a job's nodes, ranks, restarts, recent history and outcome."
    every = "each job under --prefix, in a line"
    return query.parser("status", text, _EPILOG, every=every)


def main(argv: Sequence[str]) -> int:
    """Print a job's state; gives the exit code."""
    return query.with_etcd(parser, argv, _show)


async def _show(client: Client, args: Namespace) -> None:
    views = await query.views(client, args)
    states = [describe(job, view) for job, view in views.items()]
    if args.json:
        for state in states:
            query.print_json(state, args)
    elif not args.all:
        _show_one(*states)
    elif states:
        query.console().print(jobs_table(map(in_short, states)))


def describe(job: str, view: View) -> dict[str, Any]:
    """The job as plain data, the shape of `--json`."""
    now = view.round
    phase = now.phase.value if now else "closed" if view.outcome else "setup"
    last = view.outcome.generation if view.outcome else view.ledger.generation
    history = [_entry(generation, text) for generation, text in view.history]
    for entry in history:
        if lines := query.newest_divergences(view, entry["generation"]):
            entry["divergences"] = list(lines)
    newest = history[-1] if history else {}
    return {
        "job": job,
        "state": _state(view),
        "revision": view.revision,
        "phase": phase,
        "generation": now.generation if now else last,
        "reason": now.reason if now else view.outcome.reason if view.outcome else "",
        "world_size": sum(p.nproc for p in view.world) if view.trains and view.members else 0,
        "restarts": now.restarts if now else newest.get("restarts", 0),  # without the ledger
        "limits": plain(_limits(view.spec, view)) if view.spec else None,
        "coordinator": view.coordinator.node if view.coordinator else None,
        "master": f"{now.master.addr}:{now.master.port}" if now and now.master else None,
        "nodes": list(_nodes(view)),
        "history": history,
        "suspects": list(_suspects(view)),
        "wanted": plain(view.wanted) if view.wanted else None,
        "outcome": plain(view.outcome) if view.outcome else None,
        "newer": view.newer,
        "malformed": list(view.malformed),
    }


def _state(view: View) -> str:
    """The job's state in a word."""
    if view.outcome:
        return view.outcome.state
    if not view.members:
        return "deserted"
    return "training" if view.trains else "forming"


def in_short(state: dict[str, Any]) -> dict[str, Any]:
    """Shorten what `describe` has given: without its lists."""
    short = {name: state[name] for name in _SHORT}
    nodes = [node["state"] for node in state["nodes"]]
    return short | {"nodes": {each: nodes.count(each) for each in sorted(set(nodes))}}


def jobs_table(jobs: Iterable[dict[str, Any]]) -> Table:
    """A row for each of these, as `in_short` gives them."""
    from rich.table import Table  # noqa: PLC0415 - not loaded for --json
    from rich.text import Text  # noqa: PLC0415 - as above

    table = Table(box=None, pad_edge=False)
    for name in ("job", "state", "nodes", "ranks", "restarts", "because"):
        number = name in ("ranks", "restarts")
        justify: Literal["right", "left"] = "right" if number else "left"
        # Only these give way where there is no room.
        table.add_column(name, justify=justify, no_wrap=name not in ("job", "nodes", "because"))
    for short in jobs:
        nodes = ", ".join(f"{count} {state}" for state, count in short["nodes"].items())
        limits = short["limits"]
        used = _used(short["restarts"], limits) if limits else "-"
        cells = (short["state"], nodes or "-", str(short["world_size"]), used, short["reason"])
        shown_cells = map(query.in_one_line, (short["job"], *cells))
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in shown_cells))
    return table


def _limits(spec: Spec, view: View) -> Limits:
    return requests.scaled(view, spec.run, spec.limits)


def _suspects(view: View) -> Iterator[dict[str, Any]]:
    """Each suspect with the reason why it is left out, "" if it is not, as the world began."""
    now = view.round
    known = now.suspects if now and now.phase is Phase.FINAL else view.ledger.suspects
    after = view.spec.limits.suspect_after if view.spec else 0
    for suspect in known:
        yield plain(suspect) | {"why": suspects.why_left_out(known, suspect.node, after)}


def _nodes(view: View) -> Iterator[dict[str, Any]]:
    """The world's participants, then all other members."""
    is_final = view.round is not None and view.round.phase is Phase.FINAL
    members = {member.lease: member for member in view.members}
    for p in view.world if is_final else ():
        member = members.pop(p.lease, None)
        state = "gone" if member is None else "leaving" if member.leaving else "training"
        ranks = list(range(p.first_rank, p.first_rank + p.nproc))
        yield _node(p, member, state) | {"group_rank": p.group_rank, "ranks": ranks}
    for member in members.values():
        state = "leaving" if member.leaving else "spare" if is_final else "waiting"
        why = "" if member.leaving else _why(view, member)
        yield _node(member, member, state, why)


def _why(view: View, member: Member) -> str:
    """Why a member does not train; "" where its job's keys do not say."""
    now = view.round
    if now is None or view.spec is None:
        return ""
    if member.lease not in {ack.lease for ack in view.acks}:
        return "not ready yet"
    if now.phase is not Phase.FINAL:
        return "ready"
    return awaited(view, now, Local(now.run, member.lease), _limits(view.spec, view))


def _node(
    known: Member | Participant, member: Member | None, state: str, why: str = ""
) -> dict[str, Any]:
    return {
        "node": known.node,
        "lease": hexed(known.lease),
        "state": state,
        "why": why,
        "address": member.address if member else None,
        "nproc": known.nproc,
        "group_rank": None,
        "ranks": [],
    }


def _entry(generation: int, text: str) -> dict[str, Any]:
    try:
        return plain(decode(History, text))
    except ValueError as error:
        return {"generation": generation, "ended": f"unreadable: {error}"}


def _show_one(state: dict[str, Any]) -> None:
    from rich.table import Table  # noqa: PLC0415 - not loaded for --json
    from rich.text import Text  # noqa: PLC0415 - as above

    for line in summary(state):
        print(query.in_one_line(line))
    if state["nodes"]:
        table = Table("node", "state", "group rank", "ranks", "workers", "address", box=None)
        for node in state["nodes"]:
            group_rank = "-" if node["group_rank"] is None else str(node["group_rank"])
            cells = (node["state"], group_rank, span(node["ranks"]), str(node["nproc"]))
            row = (node["node"], *cells, node["address"] or "-")
            # Names may look like markup.
            table.add_row(*(Text(query.in_one_line(cell)) for cell in row))
        query.console().print(table)
    for line in _reasons(state):
        print(query.in_one_line(line))
    for entry in state["history"][-_HISTORY:]:
        for line in _lines_of(entry):
            print(query.in_one_line(line))


def _reasons(state: dict[str, Any]) -> Iterator[str]:
    """The reasons why nodes do not train, those that are not there among them."""
    for node in state["nodes"]:
        if node["why"]:
            yield f"{node['node']}: {node['why']}"
    there = {node["node"] for node in state["nodes"]}
    yield from (s["why"] for s in state["suspects"] if s["why"] and s["node"] not in there)


def _used(restarts: int, limits: dict[str, Any]) -> str:
    most = limits["max_restarts"]
    return str(restarts) if most >= UNCOUNTED else f"{restarts} of {most}"


def summary(state: dict[str, Any]) -> Iterator[str]:
    """The job in some lines."""
    phase = f" ({state['phase']})" if state["state"] == "forming" else ""
    yield f"job {state['job']}: {state['state']}{phase}, generation {state['generation']}"
    if state["reason"]:
        yield f"  because {state['reason']}"
    if limits := state["limits"]:
        yield f"  {_sizes(limits)} nodes, {_used(state['restarts'], limits)} restarts used"
    else:
        yield f"  {state['restarts']} restarts used"
    if state["coordinator"] or state["master"]:
        yield f"  coordinator {state['coordinator'] or '-'}, master {state['master'] or '-'}"
    yield from _steered(state)
    if state["outcome"]:
        outcome = state["outcome"]
        yield f"  {outcome['state']} at {outcome['at']}: {outcome['reason']}"
    if state["newer"]:
        yield f"  {Outdated(state['newer']).reason}"
    yield from (f"  unreadable: {line}" for line in state["malformed"])


def _steered(state: dict[str, Any]) -> Iterator[str]:
    """The requests to the job that are not done yet."""
    asked = state["wanted"] or {"drains": (), "stop": None, "scale": None}
    for drain in asked["drains"]:
        if not drain["lease"]:
            yield f"  {drain['node']} is drained{_asked(drain)}"
    scale = asked["scale"]
    if scale and state["limits"] and _sizes(scale) == _sizes(state["limits"]):
        yield f"  it is scaled from {scale['instead_of']}{_asked(scale)}"
    if asked["stop"] and not state["outcome"]:
        yield f"  it is to stop{_asked(asked['stop'])}"


def _asked(by: dict[str, Any]) -> str:
    """The user who has asked for it, and the time."""
    return "".join(f" {word} {by[word]}" for word in ("by", "at") if by[word])


def _sizes(limits: dict[str, Any]) -> str:
    """The numbers of nodes that may train."""
    if limits["sizes"]:
        *some, last = map(str, limits["sizes"])
        return f"{', '.join(some)} or {last}" if some else last
    step = f" (multiples of {limits['multiple_of']})" if limits["multiple_of"] > 1 else ""
    return f"{limits['min_nodes']} to {limits['max_nodes']}{step}"


def _lines_of(entry: dict[str, Any]) -> Iterator[str]:
    """A world in a line, and one for each hang, straggler and divergence in it."""
    nodes = ", ".join(entry.get("nodes", ()))
    world = f" world of {entry['world_size']} on {nodes}" if "world_size" in entry else ""
    began = f" began at {entry['began_at']}: {entry.get('began')};" if "began_at" in entry else ""
    ended = f" ended: {entry['ended']}" if "ended" in entry else " goes on"
    yield f"generation {entry['generation']}:{world}{began}{ended}"
    # The hang that has ended the world is in the first line.
    yield from (f"  hung: {text}" for text in entry.get("hangs", ()) if text != entry.get("ended"))
    yield from (f"  {text}" for text in entry.get("stragglers", ()))
    yield from (f"  {text}" for text in entry.get("divergences", ()))


def events(state: dict[str, Any]) -> list[str]:
    """The job's history, a short line for each world and for the end."""
    lines, ended = [], None
    for entry in state["history"]:
        began = query.seconds_of(entry.get("began_at"))
        why = entry.get("began", "")
        if ended is not None and began is not None:
            why += f" ({max(0.0, began - ended):.1f} s)"  # without any world
        ended = query.seconds_of(entry.get("ended_at"))
        at = entry.get("began_at", "")[11:19]
        lines.append(f"{at} generation {entry['generation']}: {why}")
    if outcome := state["outcome"]:
        lines.append(f"{outcome['at'][11:19]} {outcome['state']}: {outcome['reason']}")
    return lines


def span(ranks: list[int]) -> str:
    """`0-7`, of ranks that follow one another."""
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
