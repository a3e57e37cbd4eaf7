"""`elastic-etcd top`: a job as it is now, or all with --all, on a screen that follows it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import termios
import tty
from contextlib import contextmanager, suppress
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from elastic_etcd.cli import query, status, tables, write_requests
from elastic_etcd.cli.live.jobs import Jobs
from elastic_etcd.times import LOOK_PERIOD

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from elastic_etcd.cli import parsers
    from elastic_etcd.etcd.client import Client

_EVENTS = 10  # lines of the history
_ONCE = 10.0  # seconds at most, until it is printed once
_KEYS = "up/down: a node   d: drain it   u: undrain it   q: quit"
_QUIT, _QUITS = "q: quit", ("q", "Q", "\x03")
_UP, _DOWN = ("k", "\x1b[A", "\x1bOA"), ("j", "\x1b[B", "\x1bOB")
_PAUSE = 0.1  # seconds between two frames, at least
_FRAME = 1.0  # seconds between two frames, where nothing happens
_KEY = re.compile(r"\x1b[\[O][A-Z]|.", re.DOTALL)
# What a terminal is told: another screen without a cursor, its upper left, and the way back.
_ENTER, _HOME, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[H", "\x1b[?25h\x1b[?1049l"
_END_OF_LINE, _END_OF_SCREEN = "\x1b[K", "\x1b[J"
_EPILOG = f"""\
keys: {_KEYS}. Draining asks first.

Nodes say how fast they are as long as somebody views the job, which takes the right to write
JOB/watched; all else is only read. Without a terminal, on one that is dumb (TERM), or with --once
or --json, the job is printed once. With --all there is a line for each job, those that go on
first, and q: quit.

examples:
  elastic-etcd top resnet-7 --etcd etcd1:2379
  elastic-etcd top resnet-7 --json | jq '.nodes[] | [.node, .state, .pace]'

{query.CODES}"""


def parser() -> parsers.Parser:
    """The command line of `elastic-etcd top`."""
    text = "Shows a job's nodes, their ranks and steps, and its last events, live."
    every = "each job under --prefix, in a line"
    as_json = "print one JSON object, that of status and paces; with --all, one a line"
    made = query.parser("top", text, _EPILOG, every=every, as_json=as_json)
    made.add_argument("--once", action="store_true", help="print it once")
    return made


def main(argv: Sequence[str]) -> int:
    """Show a job until somebody quits; gives the exit code."""
    return query.with_etcd(parser, argv, _show)


async def _show(client: Client, args: Namespace) -> None:
    if args.job:
        await query.Job(client, args).read()  # if there is none, it says so
    async with Jobs(client, args.prefix, args.timeout, args.job or "") as known:
        if args.all:
            await _all_jobs(known, args)
        else:
            async with known.viewed(args.job):
                await _one_job(known, write_requests.SteeredJob(client, args), args)


def _is_once(args: Namespace) -> bool:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return args.once or args.json or is_dumb or not is_terminal


async def _all_jobs(known: Jobs, args: Namespace) -> None:
    def draw(width: int, height: int) -> list[str]:
        found, room = known.in_short(), height - 3
        jobs = "1 job" if len(found) == 1 else f"{len(found)} jobs"
        some = f", {room} of them shown" if len(found) > room else ""
        head = f"{jobs} under {known.prefix}{some}"
        return [head, *_away(known), *status.jobs_table(found[:room], width), _QUIT]

    async def press(key: str) -> bool:
        return key in _QUITS

    if not _is_once(args):
        await _run_screen(known, draw, press)
    elif args.json:
        for job in known.in_short():
            query.print_json(job, args)
    else:
        query.say(status.jobs_table(known.in_short(), tables.width()))


def _away(known: Jobs) -> list[str]:
    return [f"no answer from etcd since {known.away['since']}"] if known.away else []


async def _one_job(known: Jobs, job: write_requests.SteeredJob, args: Namespace) -> None:
    screen = Screen(known, job, once=_is_once(args))
    if not _is_once(args):
        await _run_screen(known, screen.render, screen.press)
        return
    if screen.nodes:  # they are about to say how fast they are
        await asyncio.sleep(min(2 * LOOK_PERIOD + len(screen.nodes) / 20, _ONCE))
    screen.look()
    if args.json:
        query.print_json(screen.state, args)
    else:
        query.say(screen.render(tables.width(), 1 << 20))


class Screen:
    """The screen of one job, and the node that keys are about."""

    def __init__(self, known: Jobs, job: write_requests.SteeredJob, *, once: bool) -> None:
        self._once = once
        self._known, self._job = known, job
        self.state: dict[str, Any] = {"nodes": []}
        self._chosen = 0
        self._asks = ("", "")  # what is to be done to which node, if the next key says so
        self._message = ""
        self.look()

    def look(self) -> None:
        """Take note of the job's new state, if it is not forgotten."""
        if job := self._known.known(self._job.name):
            self.state = job.state
        self._chosen = max(0, min(self._chosen, len(self.nodes) - 1))

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The nodes, as status has them."""
        nodes: list[dict[str, Any]] = self.state["nodes"]
        return nodes

    async def press(self, key: str) -> bool:
        """Do what the key means; gives whether to quit."""
        (command, asked), self._asks = self._asks, ("", "")
        if command:
            self._message = "nothing is done"
            if key == "y":
                self._message = await write_requests.ask(self._job, command, asked)
            return False
        self._chosen += (key in _DOWN) - (key in _UP)
        self._chosen = max(0, min(self._chosen, len(self.nodes) - 1))
        node = self.nodes[self._chosen]["node"] if self.nodes else ""
        drains = (self.state["wanted"] or {}).get("drains", ())
        drained = [drain["node"] for drain in drains if not drain["lease"]]
        if key == "d" and node:
            self._asks = "drain", node
        if key == "u" and drained:
            self._asks = "undrain", node if node in drained else drained[0]
        return key in _QUITS

    def render(self, width: int, height: int) -> list[str]:
        """Draw the lines that there is room for: the head's, then the nodes', then the events'."""
        self.look()
        lines = [*self.state["summary"], *_away(self._known)]
        head = [part for line in lines for part in wrap(line, width, subsequent_indent="    ")]
        foot = self._foot()
        head = head[: max(1, height - len(foot) - 3)]
        room = height - len(head) - len(foot) - 2
        told = self.state["events"][-_EVENTS:]
        rows = max(1, min(len(self.nodes), room - min(len(told), 3) - 1))
        shown_events = told[-max(0, room - rows - 1) :] if room > rows + 1 else []
        nodes = self._table(rows, width) if self.nodes else ["  no node is there"]
        return [*head, *nodes, "", *shown_events, *foot]

    def _foot(self) -> list[str]:
        if self._once:
            return []
        if self._asks[0]:
            return [f"{' '.join(self._asks)}? y: yes, any other key: no"]
        return [self._message, _KEYS] if self._message else [_KEYS]

    def _table(self, rows: int, width: int) -> list[str]:
        first = max(0, min(self._chosen - rows + 1, len(self.nodes) - rows))
        shown = self.nodes[first : first + rows]
        heads = ("node", "state", "ranks", "step", "steps/s", "doing", "why")
        found = [self._row(node) for node in shown]
        lines = tables.table(heads, found, width - len("> "), soft=(6,), right=(3, 4))
        chosen = None if self._once else self._chosen - first + 1
        lines = [f"{'>' if at == chosen else ' '} {line}" for at, line in enumerate(lines)]
        more = [f"  {rows} of {len(self.nodes)} nodes"] if len(self.nodes) > rows else []
        return [*lines, *more]

    def _row(self, node: dict[str, Any]) -> tuple[str, ...]:
        pace = node["pace"]
        return (
            node["node"],
            node["state"],
            status.span(node["ranks"]),
            str(pace["step"]) if pace else "-",
            f"{pace['per_second']:.2f}" if pace else "-",
            pace["doing"] if pace else "-",
            node["why"],
        )


# --- the terminal -------------------------------------------------------------------------


async def _run_screen(
    known: Jobs,
    draw: Callable[[int, int], list[str]],
    press: Callable[[str], Awaitable[bool]],
) -> None:
    """Draw a screen again and again, until `press` ends it."""
    pressed: asyncio.Queue[str] = asyncio.Queue()
    changed = asyncio.Event()
    with _keys_of(pressed, changed), _signals(pressed, changed):
        while True:
            if known.keeper.done():
                known.keeper.result()
            width, height = shutil.get_terminal_size()
            lines = (tables.cut(query.in_one_line(line), width) for line in draw(width, height))
            text = "\n".join(f"{line}{_END_OF_LINE}" for line in lines)
            print(f"{_HOME}{text}{_END_OF_SCREEN}", end="", flush=True)
            await asyncio.sleep(_PAUSE)
            with suppress(TimeoutError):
                async with asyncio.timeout(_FRAME):
                    await changed.wait()
            changed.clear()
            while not pressed.empty():
                key = pressed.get_nowait()
                if key in signal.Signals.__members__:
                    raise SystemExit(128 + signal.Signals[key])
                if await press(key):
                    return


@contextmanager
def _keys_of(pressed: asyncio.Queue[str], changed: asyncio.Event) -> Iterator[None]:
    """Another screen, whose keys are put into the queue as the terminal sends them."""
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
    print(_ENTER, end="", flush=True)
    try:
        yield
    finally:
        print(_LEAVE, end="", flush=True)
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@contextmanager
def _signals(pressed: asyncio.Queue[str], changed: asyncio.Event) -> Iterator[None]:
    """Quit on a signal that ends this, so that the terminal is as it was; it can't be stopped."""
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
