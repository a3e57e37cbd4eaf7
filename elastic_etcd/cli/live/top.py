"""`elastic-etcd top`: a job as it is now, or all with --all, on a screen that follows it."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from elastic_etcd.cli import control, query, status
from elastic_etcd.cli.live import terminal
from elastic_etcd.cli.live.jobs import Jobs
from elastic_etcd.cli.live.viewers import Leases, Looker, pace_as_json, paces
from elastic_etcd.cli.options import shown
from elastic_etcd.core.schema import Pace, unhexed
from elastic_etcd.core.view import Everything, view_of
from elastic_etcd.errors import ElasticEtcdError, EtcdError
from elastic_etcd.etcd.mirror import Mirror
from elastic_etcd.times import LOOK_PERIOD

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from elastic_etcd.cli import options
    from elastic_etcd.core.schema import Keys
    from elastic_etcd.core.txn import Snapshot
    from elastic_etcd.etcd.client import Client, TimeToLive

_EVENTS = 10  # lines of the history
_ONCE = 10.0  # seconds at most, until it is printed once
_MOST_ASKED = 64  # where it is printed once
_KEYS = "up/down: a node   d: drain it   u: undrain it   q: quit"
_QUIT, _QUITS = "q: quit", ("q", "Q", "\x03")
_UP, _DOWN = ("k", "\x1b[A", "\x1bOA"), ("j", "\x1b[B", "\x1bOB")
_EPILOG = f"""\
keys: {_KEYS}. Draining asks first.

Nodes say how fast they are as long as somebody looks, which takes the right to write JOB/watched;
all else is only read. "lease" is how long a node's lease still is, of how long: it is renewed each
third of that, and without that the node is lost at 0. Without a terminal, or with --once or --json,
the job is printed once. With --all there is a line for each job, and q: quit.

examples:
  elastic-etcd top resnet-7 --etcd etcd1:2379
  elastic-etcd top resnet-7 --json | jq '.nodes[] | [.node, .state, .pace]'

{query.CODES}"""


def parser() -> options.Parser:
    """The command line of `elastic-etcd top`."""
    text = "Shows a job's nodes, their ranks and steps, and its last events, live."
    made = query.parser("top", text, _EPILOG, every="each job under --prefix, in a line")
    made.add_argument("--once", action="store_true", help="print it once")
    told = "print one JSON object, that of status and paces and leases; with --all, one a line"
    made.add_argument("--json", action="store_true", help=told)
    return made


def main(argv: Sequence[str]) -> int:
    """Show a job until somebody quits; gives the exit code."""
    return query.run(parser, argv, _top, _all_jobs)


def _is_once(args: Namespace) -> bool:
    return args.once or args.json or not (sys.stdin.isatty() and sys.stdout.isatty())


async def _top(job: query.Job, args: Namespace) -> None:
    once = _is_once(args)
    screen = Screen(job.name, once=once)
    seen = await job.read()
    screen.see(seen, job.keys)
    async with AsyncExitStack() as scope:
        changed = asyncio.Event()
        mirror = await scope.enter_async_context(Mirror(job.client, job.ranges, changed.set))
        looker = Looker(job.client, job.keys, job.timeout)
        scope.push_async_callback(looker.end)
        leases = Leases(job.client, screen.lefts)
        if not once:
            await _follow_job(
                screen, mirror, changed, looker, leases, control.Job(job.client, args)
            )
            return
        await looker.look(seen)
        await asyncio.sleep(
            min(2 * LOOK_PERIOD + len(screen.nodes) / 20, _ONCE) if looker.told else 0
        )
        if snapshot := mirror.snapshot():
            screen.see(snapshot, job.keys)
        screen.note = looker.note
        with suppress(EtcdError):
            await leases.ask([unhexed(node["lease"]) for node in screen.nodes[:_MOST_ASKED]])
        if args.json:
            print(json.dumps(screen.as_json(), indent=2))
        else:
            Console(highlight=False, width=query.width()).print(screen.render(1 << 20))


async def _all_jobs(client: Client, args: Namespace) -> None:
    async with Jobs(client, args.prefix, args.timeout) as known:
        if not _is_once(args):
            await _follow_all(known)
        elif args.json:
            for job in known.in_short():
                print(json.dumps(job))
        else:
            table = status.jobs_table(known.in_short())
            Console(highlight=False, width=query.width()).print(table)


async def _follow_all(known: Jobs) -> None:
    def draw(height: int) -> Group:
        found, room = known.in_short(), height - 3
        table = status.jobs_table(found[:room])
        return Group(_line(_of_all(known, len(found), room)), table, _line(_QUIT))

    async def press(key: str) -> bool:
        return key in _QUITS

    async def look_again() -> None:
        if known.keeper.done():
            known.keeper.result()

    await terminal.show(asyncio.Event(), draw, press, look_again)


def _of_all(known: Jobs, count: int, room: int) -> str:
    jobs = "1 job" if count == 1 else f"{count} jobs"
    some = f", {room} of them shown" if count > room else ""
    away = f"; no answer from etcd since {known.away['since']}" if known.away else ""
    return f"{jobs} under {known.prefix}{some}{away}"


async def _follow_job(
    screen: Screen,
    mirror: Mirror,
    changed: asyncio.Event,
    looker: Looker,
    leases: Leases,
    job: control.Job,
) -> None:
    mirror.failed.add_done_callback(lambda _: changed.set())

    async def look_again() -> None:
        if mirror.failed.done():
            mirror.failed.result()
        if snapshot := mirror.snapshot():
            await looker.look(snapshot)
            screen.see(snapshot, job.keys)
        screen.note = looker.note

    async def press(key: str) -> bool:
        return await screen.press(key, job)

    try:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(leases.follow(lambda: screen.visible), name="leases")
            await terminal.show(changed, screen.render, press, look_again)
            asking.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


class Screen:
    """What is shown, and which node is meant by the keys."""

    def __init__(self, job: str, *, once: bool) -> None:
        self.note = ""
        self.lefts: dict[int, TimeToLive] = {}
        self.visible: list[int] = []  # leases of the nodes that are shown
        self._once = once
        self._job = job
        self._state: dict[str, Any] = {}
        self._paces: dict[str, Pace] = {}  # by node
        self._chosen = 0
        self._asks = ("", "")  # what is to be done to which node, if the next key says so
        self._said = ""

    def see(self, snapshot: Snapshot, keys: Keys) -> None:
        """Take note of the job's new state."""
        view = view_of(snapshot, keys, Everything())
        self._state = status.describe(self._job, view)
        self._paces = paces(snapshot, keys, view)
        self._chosen = max(0, min(self._chosen, len(self.nodes) - 1))

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """As status has them."""
        nodes: list[dict[str, Any]] = self._state["nodes"]
        return nodes

    async def press(self, key: str, job: control.Job) -> bool:
        """Do what the key means; gives whether to quit."""
        (command, asked), self._asks = self._asks, ("", "")
        if command:
            self._said = await _steered(job, command, asked) if key == "y" else "nothing is done"
            return False
        self._chosen += (key in _DOWN) - (key in _UP)
        self._chosen = max(0, min(self._chosen, len(self.nodes) - 1))
        node = self.nodes[self._chosen]["node"] if self.nodes else ""
        drains = (self._state["wanted"] or {}).get("drains", ())
        drained = [drain["node"] for drain in drains if not drain["lease"]]
        if key == "d" and node:
            self._asks = "drain", node
        if key == "u" and drained:
            self._asks = "undrain", node if node in drained else drained[0]
        return key in _QUITS

    def as_json(self) -> dict[str, Any]:
        """That of status, with what is known of each node's pace and lease."""
        nodes = [
            node | {"pace": self._pace_of(node), "lease_left": self._left_of(node)}
            for node in self.nodes
        ]
        return self._state | {"nodes": nodes, "note": self.note}

    def _pace_of(self, node: dict[str, Any]) -> dict[str, Any] | None:
        pace = self._paces.get(node["node"])
        return pace_as_json(pace) if pace else None

    def _left_of(self, node: dict[str, Any]) -> dict[str, int] | None:
        left = self.lefts.get(unhexed(node["lease"]))
        if left is None or left.seconds < 0:
            return None
        return {"seconds": left.seconds, "granted": left.granted}

    def render(self, height: int) -> Group:
        """As many lines as there is room for: the head's, then the nodes', then the events'."""
        head = [*status.summary(self._state), *filter(None, [self.note])]
        foot = self._foot()
        head = head[: max(1, height - len(foot) - 3)]
        room = height - len(head) - len(foot) - 2
        events = status.events(self._state)[-_EVENTS:]
        rows = max(1, min(len(self.nodes), room - min(len(events), 3) - 1))
        shown_events = events[-max(0, room - rows - 1) :] if room > rows + 1 else []
        nodes = self._table(rows) if self.nodes else _line("  no node is there")
        return Group(*map(_line, head), nodes, *map(_line, ["", *shown_events, *foot]))

    def _foot(self) -> list[str]:
        if self._once:
            return []
        if self._asks[0]:
            return [f"{' '.join(self._asks)}? y: yes, any other key: no"]
        return [self._said, _KEYS] if self._said else [_KEYS]

    def _table(self, rows: int) -> Table:
        table = Table(box=None, pad_edge=False, expand=False)
        for name in ("", "node", "state", "ranks", "step", "steps/s", "doing", "lease", "why"):
            justify: Literal["right", "left"] = "right" if name.startswith("step") else "left"
            # Only these give way where there is no room.
            table.add_column(name, justify=justify, no_wrap=name not in ("node", "why"))
        first = max(0, min(self._chosen - rows + 1, len(self.nodes) - rows))
        shown_rows = list(enumerate(self.nodes))[first : first + rows]
        self.visible = [unhexed(node["lease"]) for _, node in shown_rows]
        for number, node in shown_rows:
            pace, left = self._paces.get(node["node"]), self._left_of(node)
            cells = [
                ">" if number == self._chosen and not self._once else "",
                node["node"],
                node["state"],
                status.span(node["ranks"]),
                str(pace.step) if pace else "-",
                f"{pace.per_second:.2f}" if pace else "-",
                str(pace.doing) if pace else "-",
                f"{left['seconds']}/{left['granted']} s" if left else "-",
                node["why"],
            ]
            table.add_row(*map(_line, cells))
        if len(self.nodes) > rows:
            table.caption = f"{rows} of {len(self.nodes)} nodes"
        return table


def _line(text: str) -> Text:
    return Text(shown(text), no_wrap=True, overflow="ellipsis")


async def _steered(job: control.Job, command: str, node: str) -> str:
    """What came of it, in a line."""
    try:
        return str((await control.ask(job, command, node))["told"])
    except ElasticEtcdError as error:
        return f"error: {error}"
