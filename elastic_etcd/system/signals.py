"""Signals end the start of an agent, are taken by the agent then, and ignored at its end.

The exit code is decided by then, and no part of the end waits for long. asyncio's own handlers give
way to the default ones, which end the process: they can't be followed by "ignored" without a gap.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


@contextmanager
def ending_the_start(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """Until `taken`, each of these ends the process with 128 + its number, and a line in the log.

    They are ignored after this scope, so the process is to end then. SIGUSR1, which asks an agent
    for a record, has nothing to ask for, and what a starter ignores stays so. Main thread only.
    """
    if signal.SIGUSR1 not in numbers:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in {*numbers, signal.SIGUSR2}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_start)
    try:
        yield
    finally:
        _ignore()


@contextmanager
def taken(takers: Mapping[signal.Signals, Callable[[], object]]) -> Iterator[None]:
    """Each signal has its taker called in the event loop. Main thread only.

    The former handlers come back, but none that would end the start.
    """
    loop = asyncio.get_running_loop()
    former = {
        number: signal.signal(number, lambda *_, take=take: loop.call_soon_threadsafe(take))
        for number, take in takers.items()
    }
    # One that comes just before the loop sleeps, or to another thread, does not wake it otherwise.
    ours, woken = socket.socketpair()
    ours.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    loop.add_reader(ours, ours.recv, 4096)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_IGN if handler is _end_start else handler)
        signal.set_wakeup_fd(-1)
        loop.remove_reader(ours)
        ours.close()
        woken.close()


def _end_start(number: int, _frame: FrameType | None) -> None:
    _ignore()
    name = signal.Signals(number).name
    log.warning("%s: this node has not joined the job yet, and ends", name)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        sys.exit(128 + number)
    loop.call_soon_threadsafe(sys.exit, 128 + number)  # not amid a task


def _ignore() -> None:
    for number in signal.valid_signals():
        if signal.getsignal(number) is _end_start:
            signal.signal(number, signal.SIG_IGN)
