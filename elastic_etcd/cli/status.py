"""`elastic-etcd status`: a job's state and its history, or with --all a line for each job."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from elastic_etcd.cli import events, query, tables
from elastic_etcd.core import failure_policies, hangs, requests, words
from elastic_etcd.core.lifecycle import Outdated
from elastic_etcd.core.rules import Elapsed, Local, Wait, awaited, decide
from elastic_etcd.core.schema import (
    Failure,
    History,
    Limits,
    Phase,
    decode,
    hexed,
    plain,
    seconds_of,
)
from elastic_etcd.protocol.messages import UNCOUNTED
from elastic_etcd.system.sockets import address

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator, Sequence

    from elastic_etcd.cli import parsers
    from elastic_etcd.core.schema import Hang, Member, Participant
    from elastic_etcd.core.view import View
    from elastic_etcd.etcd.client import Client

_NARROW = 80  # columns below which a reason is worth more than numbers
_SAID = 40  # lines of what the worker has said that has ended the job
_EVENTS = 16  # lines of the history shown; `elastic-etcd events` has all
_SHORT = (
    *("job", "state", "since", "hangs_since", "why", "last_words", "phase", "generation", "reason"),
    *("restarts", "limits", "world_size"),
)
_GOES_ON = ("training", "forming")
_ORDER = {"training": 0, "forming": 0, "deserted": 1}
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
        for state in by_urgency(states):
            query.print_json(state, args)
    elif not args.all:
        ((job, view),) = views.items()
        query.say(_lines_of(describe(job, view), events.lines(job, view)))
    elif states:
        query.say(jobs_table(by_urgency(map(in_short, states)), tables.width()))


def describe(job: str, view: View) -> dict[str, Any]:
    """The job as plain data, the shape of `--json`."""
    now = view.round
    phase = now.phase.value if now else "closed" if view.outcome else "setup"
    last = view.outcome.generation if view.outcome else view.ledger.generation
    history = [_entry(generation, text) for generation, text in view.history]
    for entry in history:
        if lines := query.newest_divergences(view, entry["generation"]):
            entry["divergences"] = list(lines)
    run = next((known.run for known in (view.outcome, now, view.spec) if known), None)
    of_run = (entry for entry in reversed(history) if entry.get("run") == run)
    newest: dict[str, Any] = next(of_run, {})
    reason = view.outcome.reason if view.outcome else now.reason if now else ""
    failure = _failure(view, reason)
    return {
        "job": job,
        "state": state_of(view),
        "since": _since(view, newest),
        "hangs_since": _hangs_since(view),
        "hang_files": list(_hang_files(view)),
        "why": _why(view, reason),
        "last_words": _last_words(failure) if failure else "",
        "repeated": "" if view.outcome else failure_policies.repeated(view.ledger),
        "revision": view.revision,
        "phase": phase,
        "generation": now.generation if now else last,
        "reason": reason,
        "world_size": sum(p.nproc for p in view.world) if view.trains and view.members else 0,
        "restarts": view.restarts if now else newest.get("restarts", 0),  # without the ledger
        "limits": plain(requests.wanted_limits(view, view.spec)) if view.spec else None,
        "coordinator": view.coordinator.node if view.coordinator else None,
        "master": address(now.master.addr, now.master.port) if now and now.master else None,
        "nodes": list(_nodes(view)),
        "history": history,
        "suspects": list(_suspects(view)),
        "unfit": [{"node": u.node, "why": u.why, "at": u.at} for u in view.unfit],
        "wanted": plain(view.wanted) if view.wanted else None,
        "outcome": plain(view.outcome) if view.outcome else None,
        "newer": view.newer,
        "malformed": list(view.malformed),
    }


def state_of(view: View) -> str:
    """The job's state in a word."""
    if view.outcome:
        return view.outcome.state
    if not view.members:
        return "deserted"
    return "training" if view.trains else "forming"


def _since(view: View, newest: dict[str, Any]) -> str | None:
    """When the job came into its state, as far as its keys tell."""
    if view.outcome:
        return view.outcome.at or None
    goes_on = view.trains and view.trains == newest.get("generation")
    return newest.get("began_at" if goes_on and view.members else "ended_at")


def hanging(view: View) -> Hang | None:
    """The line about its workers, if some are there that hang."""
    return hangs.that_lasts(view) if view.members and not view.outcome else None


def _hangs_since(view: View) -> str | None:
    """The time from which on a worker has not ended its step; "" where nobody has told it."""
    hang = hanging(view)
    if hang is None:
        return None
    found = seconds_of(hang.at)
    return query.timestamp(found - hang.seconds) if found is not None else ""


def _hang_files(view: View) -> Iterator[dict[str, Any]]:
    """The files that say where they stand."""
    hang = hanging(view)
    for at in hangs.with_files(view, hang) if hang else ():
        yield {"node": at.node, "rank": at.rank, "file": at.step.file if at.step else ""}


def _why(view: View, reason: str) -> str:
    """Why the job is in its state, and for what it waits."""
    now = view.round
    if hang := hanging(view):
        return f"{hang.line}, as of {query.when(hang.at)}" if hang.at else hang.line
    if view.outcome or (view.trains and view.members):
        return reason
    if not view.members:
        return "no node is there any more, and nobody has said that it is over"
    if now is None or view.spec is None:
        return "nobody coordinates yet"
    acked = now.generation if now.coordinator in {ack.lease for ack in view.acks} else 0
    local = Local(now.run, now.coordinator, acked=acked)
    waits = decide(view, local, requests.wanted_limits(view, view.spec), Elapsed(0, 0))
    return f"{reason}; {waits.reason}" if isinstance(waits, Wait) else reason


def _failure(view: View, reason: str) -> Failure | None:
    """The worker that has ended the run, or the world before this one."""
    if view.outcome:
        return view.outcome.failure
    failures = (f for world in reversed(query.worlds(view)) for f in world.failures or ())
    return next((f for f in failures if str(f) in reason), None)


def _last_words(failure: Failure) -> str:
    if failure.code == -signal.SIGKILL and not failure.message and not failure.hang:
        return f"none; if {failure.node} ran out of memory, its dmesg says so"
    return failure.last_words


def in_short(state: dict[str, Any]) -> dict[str, Any]:
    """Shorten what `describe` has given: without its lists."""
    short = {name: state[name] for name in _SHORT}
    nodes = [node["state"] for node in state["nodes"]]
    return short | {"nodes": {each: nodes.count(each) for each in sorted(set(nodes))}}


def by_urgency(jobs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """These jobs, as `in_short` gives them: those that go on, then the others, the newest first."""
    newest_first = sorted(jobs, key=lambda short: short["since"] or "", reverse=True)
    by_name = sorted(newest_first, key=lambda s: s["job"] if s["state"] in _GOES_ON else "")
    return sorted(by_name, key=lambda s: _ORDER.get(s["state"], 2))


def jobs_table(jobs: Iterable[dict[str, Any]], room: int) -> list[str]:
    """A row in so many characters for each of these, as `in_short` gives them."""
    rows = []
    for short in jobs:
        nodes = ", ".join(f"{count} {state}" for state, count in short["nodes"].items())
        used = _used(short["restarts"], short["limits"])
        why, words = short["why"], short["last_words"]
        why = why if words in why else f"{why}: {words}" if why else words
        state = short["state"] if short["hangs_since"] is None else "hangs"
        cells = (state, nodes or "-", str(short["world_size"]), used, why)
        rows.append((short["job"], *cells))
    heads = ("job", "state", "nodes", "ranks", "restarts", "because")
    if room < _NARROW:
        head, *others = ((*row[:3], row[5]) for row in (heads, *rows))
        return tables.table(head, others, room, soft=(3, 2))
    return tables.table(heads, rows, room, soft=(5, 2), right=(3, 4))


def _suspects(view: View) -> Iterator[dict[str, Any]]:
    """Each suspect with the reason why it is left out, "" if it is not, as the world began."""
    now = view.round
    past = now if now and now.phase is Phase.FINAL else view.ledger
    limits = view.spec.limits if view.spec else Limits(1, 1, suspect_after=0)
    for node, suspect in failure_policies.suspects(past, limits).items():
        yield plain(suspect) | {"why": failure_policies.why_left_out(past, node, limits)}


def _nodes(view: View) -> Iterator[dict[str, Any]]:
    """The world's participants, then all other members."""
    is_final = view.round is not None and view.round.phase is Phase.FINAL
    members = {member.lease: member for member in view.members}
    for p in view.world if is_final else ():
        member = members.pop(p.lease, None)
        state = "gone" if member is None else "leaving" if member.leaving else "training"
        ranks = list(range(p.first_rank, p.first_rank + p.nproc))
        place = {"group_rank": p.group_rank, "ranks": ranks}
        yield _node(p, member, state) | place
    for member in members.values():
        state = "leaving" if member.leaving else "spare" if is_final else "waiting"
        why = "" if member.leaving else _waits(view, member)
        yield _node(member, member, state, why)


def _waits(view: View, member: Member) -> str:
    """Why a member does not train; "" where its job's keys do not say."""
    now = view.round
    if now is None or view.spec is None:
        return ""
    if member.lease not in {ack.lease for ack in view.acks}:
        return "not ready yet"
    if now.phase is not Phase.FINAL:
        return "ready"
    return awaited(view, now, Local(now.run, member.lease), requests.wanted_limits(view, view.spec))


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


def _lines_of(state: dict[str, Any], told: Sequence[str]) -> Iterator[str]:
    """The job as it is shown, with the end of its history."""
    yield from summary(state)
    rows = []
    for node in state["nodes"]:
        group_rank = "-" if node["group_rank"] is None else str(node["group_rank"])
        cells = (node["state"], group_rank, span(node["ranks"]), str(node["nproc"]))
        rows.append((node["node"], *cells, node["address"] or "-"))
    heads = ("node", "state", "group rank", "ranks", "workers", "address")
    if rows:
        yield from tables.table(heads, rows, tables.width(), soft=(5,))
    yield from _reasons(state)
    yield from told[-_EVENTS:]
    failure = (state["outcome"] or {}).get("failure")
    if failure and (said := failure["message"].rstrip().splitlines()):
        yield f"rank {failure['rank']} on {failure['node']} said:"
        yield from (f"  {line}" for line in said[-_SAID:])


def _reasons(state: dict[str, Any]) -> Iterator[str]:
    """The reasons why nodes do not train, those that are not there among them."""
    for node in state["nodes"]:
        if node["why"] not in ("", "ready"):
            yield f"{node['node']}: {node['why']}"
    there = {node["node"] for node in state["nodes"]}
    yield from (s["why"] for s in state["suspects"] if s["why"] and s["node"] not in there)
    for each in state["unfit"]:
        if each["node"] not in there:
            yield f"{each['node']} was kept out at {query.when(each['at'])}: {each['why']}"


def _used(restarts: int, limits: dict[str, Any] | None) -> str:
    """How many, and of how many: not of a job that is over, nor where torchrun counts."""
    most = limits["max_restarts"] if limits else UNCOUNTED
    return str(restarts) if most >= UNCOUNTED else f"{restarts} of {most}"


def summary(state: dict[str, Any]) -> Iterator[str]:
    """The job in some lines: what it does, since when, and why."""
    since = f" since {query.when(state['since'])}" if state["since"] else ""
    if (hung := state["hangs_since"]) is not None:
        since += f", hangs since {hung}" if hung else ", hangs"
    yield f"job {state['job']}: {state['state']}{since}, generation {state['generation']}"
    if state["why"]:
        yield f"  because {state['why']}"
    for found in state["hang_files"][: words.NAMED]:
        yield f"  where rank {found['rank']} stands is in {found['file']} on {found['node']}"
    if state["last_words"]:
        yield f"  last words: {state['last_words']}"
    if state["repeated"]:
        yield f"  {state['repeated']}"
    used = _used(state["restarts"], state["limits"])
    line = f"{used} {'restart' if used == '1' else 'restarts'} used"
    if state["limits"]:
        sizes = _sizes(state["limits"])
        line = f"{sizes} {'node' if sizes == '1' else 'nodes'}, {line}"
    yield f"  {line}"
    if state["coordinator"] or state["master"]:
        yield f"  coordinator {state['coordinator'] or '-'}, master {state['master'] or '-'}"
    yield from _steered(state)
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
    if limits["min_nodes"] == limits["max_nodes"]:
        return str(limits["min_nodes"])
    step = f" (multiples of {limits['multiple_of']})" if limits["multiple_of"] > 1 else ""
    return f"{limits['min_nodes']} to {limits['max_nodes']}{step}"


def span(ranks: list[int]) -> str:
    """`0-7`, of ranks that follow one another."""
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
