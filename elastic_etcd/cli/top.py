"""`elastic-etcd top JOB`: a job as it is now, on a screen that follows it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import termios
import tty
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic_etcd.cli import look, status, steer
from elastic_etcd.cli.options import shown
from elastic_etcd.core.schema import Pace, Watched, decode, encode
from elastic_etcd.core.txn import Put, Txn
from elastic_etcd.core.view import Everything, View, view_of
from elastic_etcd.errors import ElasticEtcdError, EtcdDenied, EtcdError
from elastic_etcd.etcd.mirror import Mirror
from elastic_etcd.etcd.retry import now
from elastic_etcd.etcd.session import Session

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from elastic_etcd.cli import options
    from elastic_etcd.core.schema import Keys
    from elastic_etcd.core.txn import Snapshot
    from elastic_etcd.etcd.client import Client

_EVENTS = 10  # lines of the history
_TTL = 10  # seconds; so long nodes go on to say how fast they are, when this was killed
_PERIOD = 2.0
_ONCE = 10.0  # seconds at most, until it is printed once
_WIDE = 240  # columns where there is no terminal
_PAUSE = 0.1  # seconds between two frames, at least
_FRAME = 1.0  # seconds between two frames, where nothing happens
_KEYS = "up/down: a node   d: drain it   u: undrain it   q: quit"
_KEY = re.compile(r"\x1b[\[O][A-Z]|.", re.DOTALL)
_UP, _DOWN = ("k", "\x1b[A", "\x1bOA"), ("j", "\x1b[B", "\x1bOB")
_EPILOG = f"""\
keys: {_KEYS}. Draining asks first.

Nodes say how fast they are as long as somebody looks, which takes the right to write JOB/watched;
all else is only read. Without a terminal, or with --once, the job is printed once.

{look.CODES}"""


def parser() -> options.Parser:
    """The command line of `elastic-etcd top JOB`."""
    text = "Shows a job's nodes, their ranks and steps, and its last events, live."
    made = look.parser("top", text, _EPILOG)
    made.add_argument("--once", action="store_true", help="print it once")
    return made


def main(argv: Sequence[str]) -> int:
    """Show a job until somebody quits; gives the exit code."""
    return look.run(parser, argv, _top)


async def _top(job: look.Job, args: Namespace) -> None:
    once = args.once or not (sys.stdin.isatty() and sys.stdout.isatty())
    screen = Screen(job.name, once=once)
    seen = await job.read()
    screen.see(seen, job.keys)
    async with AsyncExitStack() as scope:
        changed = asyncio.Event()
        mirror = await scope.enter_async_context(Mirror(job.client, job.ranges, changed.set))
        looker = Looker(job.client, job.keys, job.timeout)
        scope.push_async_callback(looker.end)
        if not once:
            await _live(screen, mirror, changed, looker, steer.Job(job.client, args))
            return
        await looker.look(seen)
        await asyncio.sleep(min(2 * _PERIOD + len(screen.nodes) / 20, _ONCE) if looker.told else 0)
        if snapshot := mirror.snapshot():
            screen.see(snapshot, job.keys)
        screen.note = looker.note
        width = None if sys.stdout.isatty() else _WIDE
        Console(highlight=False, width=width).print(screen.render(1 << 20))


async def _live(
    screen: Screen, mirror: Mirror, changed: asyncio.Event, looker: Looker, job: steer.Job
) -> None:
    console = Console(highlight=False)
    pressed: asyncio.Queue[str] = asyncio.Queue()
    mirror.failed.add_done_callback(lambda _: changed.set())
    with (
        _keys_of(pressed, changed),
        _signals(pressed, changed),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            if mirror.failed.done():
                mirror.failed.result()
            if snapshot := mirror.snapshot():
                await looker.look(snapshot)
                screen.see(snapshot, job.keys)
            screen.note = looker.note
            live.update(screen.render(console.height), refresh=True)
            await asyncio.sleep(_PAUSE)
            with suppress(TimeoutError):
                async with asyncio.timeout(_FRAME):
                    await changed.wait()
            changed.clear()
            while not pressed.empty():
                key = pressed.get_nowait()
                if key in signal.Signals.__members__:
                    raise SystemExit(128 + signal.Signals[key])
                if await screen.press(key, job):
                    return


@contextmanager
def _keys_of(pressed: asyncio.Queue[str], changed: asyncio.Event) -> Iterator[None]:
    """Each key that is pressed, as the terminal sends it."""
    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        text = b""
        with suppress(OSError):  # the terminal has gone
            text = os.read(terminal, 1024)
        for key in _KEY.findall(text.decode(errors="replace")) or ["q"]:
            pressed.put_nowait(key)
        changed.set()

    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@contextmanager
def _signals(pressed: asyncio.Queue[str], changed: asyncio.Event) -> Iterator[None]:
    """Who ends this quits, so that the terminal is as it was; it can't be stopped."""
    loop, ends = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGHUP)

    def end(number: signal.Signals) -> None:
        pressed.put_nowait(number.name)
        changed.set()

    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    for number in ends:
        loop.add_signal_handler(number, end, number)
    try:
        yield
    finally:
        for number in ends:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGTSTP, before)


class Looker:
    """Tells the job that somebody looks, under a lease of its own."""

    def __init__(self, client: Client, keys: Keys, timeout: float) -> None:
        self.told = False
        self.refused = ""
        self._trouble = ""
        self._client, self._keys, self._timeout = client, keys, timeout
        self._session: Session | None = None
        self._scope = AsyncExitStack()

    async def look(self, seen: Snapshot) -> None:
        """Say so, if nobody does."""
        if self._keys.watched in seen.kvs:
            self.told, self.refused = True, ""
            return
        if self.refused:
            return
        try:
            if self._session is None or self._session.lost.done():
                session = Session(self._client, _TTL, timeout=self._timeout)
                self._session = await self._scope.enter_async_context(session)
            value = encode(Watched(_PERIOD, by=steer.user()))
            put = Put(self._keys.watched, value, self._session.lease)
            await self._client.txn(Txn((), (put,)), self._timeout)
            self.told = True
        except EtcdDenied as error:
            self.refused = f"steps are not shown: {error}"
        except EtcdError as error:
            self._trouble = f"etcd: {error}"
        else:
            self._trouble = ""

    @property
    def note(self) -> str:
        """What whoever looks had better know."""
        since = self._session.silent_since if self._session else None
        if since is not None:
            return f"no answer from etcd for {now() - since:.0f} s: this may be old"
        return self.refused or self._trouble

    async def end(self) -> None:
        """The key goes with its lease."""
        await self._scope.aclose()


class Screen:
    """What is shown, and which node is meant by the keys."""

    def __init__(self, job: str, *, once: bool) -> None:
        self.note = ""
        self._once = once
        self._job = job
        self._state: dict[str, Any] = {}
        self._paces: dict[str, Pace] = {}  # by node
        self._chosen = 0
        self._asks = ("", "")  # what is to be done to which node, if the next key says so
        self._said = ""

    def see(self, snapshot: Snapshot, keys: Keys) -> None:
        """The job is this from here on."""
        view = view_of(snapshot, keys, Everything())
        self._state = status.describe(self._job, view)
        self._paces = paces(snapshot, keys, view)
        self._chosen = max(0, min(self._chosen, len(self.nodes) - 1))

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """As status has them."""
        nodes: list[dict[str, Any]] = self._state["nodes"]
        return nodes

    async def press(self, key: str, job: steer.Job) -> bool:
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
        return key in ("q", "Q", "\x03")

    def render(self, height: int) -> Group:
        """As many lines as there is room for: the head's, then the nodes', then the events'."""
        head = [*status.summary(self._state), *filter(None, [self.note])]
        foot = self._foot()
        head = head[: max(1, height - len(foot) - 3)]
        room = height - len(head) - len(foot) - 2
        events = status.events(self._state)[-_EVENTS:]
        rows = max(1, min(len(self.nodes), room - min(len(events), 3) - 1))
        shown_events = events[-max(0, room - rows - 1) :] if room > rows + 1 else []
        return Group(*map(_line, head), self._table(rows), *map(_line, ["", *shown_events, *foot]))

    def _foot(self) -> list[str]:
        if self._once:
            return []
        if self._asks[0]:
            return [f"{' '.join(self._asks)}? y: yes, any other key: no"]
        return [self._said, _KEYS] if self._said else [_KEYS]

    def _table(self, rows: int) -> Table:
        table = Table(box=None, pad_edge=False, expand=False)
        for name in ("", "node", "state", "ranks", "step", "steps/s", "doing", "why"):
            justify: Literal["right", "left"] = "right" if name.startswith("step") else "left"
            table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
        first = max(0, min(self._chosen - rows + 1, len(self.nodes) - rows))
        for number, node in list(enumerate(self.nodes))[first : first + rows]:
            pace = self._paces.get(node["node"])
            cells = [
                ">" if number == self._chosen and not self._once else "",
                node["node"],
                node["state"],
                status.span(node["ranks"]),
                str(pace.step) if pace else "-",
                f"{pace.per_second:.2f}" if pace else "-",
                str(pace.doing) if pace else "-",
                node["why"],
            ]
            table.add_row(*(Text(shown(cell)) for cell in cells))
        if len(self.nodes) > rows:
            table.caption = f"{rows} of {len(self.nodes)} nodes"
        return table


def paces(snapshot: Snapshot, keys: Keys, view: View) -> dict[str, Pace]:
    """How fast the nodes are whose workers run, as far as they have said it."""
    found = {}
    for member in view.members:
        kv = snapshot.kvs.get(keys.pace(member.lease))
        try:
            pace = decode(Pace, kv.value, lease=member.lease) if kv else None
        except ValueError:
            continue
        if pace and pace.generation == view.trains:
            found[member.node] = pace
    return found


def _line(text: str) -> Text:
    return Text(shown(text), no_wrap=True, overflow="ellipsis")


async def _steered(job: steer.Job, command: str, node: str) -> str:
    """What came of it, in a line."""
    try:
        return str((await steer.ask(job, command, node))["told"])
    except ElasticEtcdError as error:
        return f"error: {error}"
