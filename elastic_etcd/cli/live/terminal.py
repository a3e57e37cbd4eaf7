"""A screen that is drawn again when something has changed, and the keys that are pressed at it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import termios
import tty
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from rich.console import RenderableType

_PAUSE = 0.1  # seconds between two frames, at least
_FRAME = 1.0  # seconds between two frames, where nothing happens
_KEY = re.compile(r"\x1b[\[O][A-Z]|.", re.DOTALL)


async def show(
    changed: asyncio.Event,
    draw: Callable[[int], RenderableType],
    press: Callable[[str], Awaitable[bool]],
    look_again: Callable[[], Awaitable[None]],
) -> None:
    """A screen that is drawn again when something has `changed`, until a key says that it ends."""
    console = Console(highlight=False)
    pressed: asyncio.Queue[str] = asyncio.Queue()
    with (
        _keys_of(pressed, changed),
        _signals(pressed, changed),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            await look_again()
            live.update(draw(console.height), refresh=True)
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
