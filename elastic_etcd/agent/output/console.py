"""The agent's own stdout and stderr. Writing to them never blocks the event loop.

A terminal that nobody reads must not hold up a lease. What does not fit waits in a buffer, and
while the buffer is full the workers' pipes are not read (back-pressure). A file, which can't say
"not now", is written by a thread.
"""

import asyncio
import contextlib
import logging
import os
import select
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elastic_etcd.agent.output.writer import DiskFile, Writer

_FULL = 1 << 20
_ROOM = 1 << 18
# A pipe takes a write of up to PIPE_BUF bytes whole or not at all, so that the lines of two agents
# on one pipe stay whole.
_PIECE = select.PIPE_BUF
_PIECES = 64
# What a terminal that can't be opened again surely has room for once it polls writable.
_CAUTIOUS = 256


@dataclass(frozen=True)
class _Output:
    """A descriptor of our own, and how to write to it: at most `piece` bytes at a time."""

    fd: int
    piece: int
    may_block: bool = False  # O_NONBLOCK can't be set on it: poll before each write
    is_file: bool = False  # which never says "not now"

    def write(self, data: memoryview) -> int:
        if self.may_block and not _writable(self.fd):
            raise BlockingIOError
        return os.write(self.fd, data)


class Console(Protocol):
    """One output of the agent. Writing never blocks and never fails; `close` is bounded in time."""

    @property
    def full(self) -> bool:
        """Whether writers should stop reading what they would write; see `when_room`."""

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` once, when there is room again."""

    def write(self, data: bytes) -> None:
        """Take whole lines of a worker; no other writer's lines on this console break them up."""

    def say(self, data: bytes) -> None:
        """Take whole lines of the agent, from any thread. They are never dropped."""

    async def close(self, timeout: float) -> None:
        """Write out what waits, for at most `timeout` seconds in which nothing moves."""


class FileConsole:
    """A console that leads to a file, or to /dev/null."""

    def __init__(self, output: "_Output", name: str, writer: Writer) -> None:
        self._writer = writer
        # A full disk is not told: the lines that would tell it lead there, too.
        self._file = DiskFile(writer, name, lambda: output.fd, lambda _: None)

    @property
    def full(self) -> bool:
        return self._file.full

    def when_room(self, resume: Callable[[], None]) -> None:
        self._file.when_room(resume)

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def say(self, data: bytes) -> None:
        self._file.keep(data)

    async def close(self, timeout: float) -> None:
        self._file.close()
        await self._writer.written(timeout)


class PipeConsole:
    """A console that leads to a pipe, a terminal, a socket, or nowhere (None).

    A reader that went away (EPIPE, a closed terminal) turns it into a sink: training goes on.
    """

    def __init__(self, output: "_Output | None") -> None:
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lock = threading.RLock()  # of the buffer and the output
        self._buffer = bytearray()
        self._waiting = False
        self._resume: list[Callable[[], None]] = []
        self._drained: asyncio.Event | None = None

    @property
    def full(self) -> bool:
        return len(self._buffer) >= _FULL

    def when_room(self, resume: Callable[[], None]) -> None:
        self._resume.append(resume)

    def write(self, data: bytes) -> None:
        if self._output is None:
            return
        with self._lock:
            self._buffer += data
        if not self._waiting:
            self._pump()

    def say(self, data: bytes) -> None:
        if threading.get_ident() == self._thread:
            self.write(data)
            return
        with self._lock, contextlib.suppress(OSError):  # the loop meets the same error
            if self._output is not None:
                self._buffer += data
                self._write_pieces(self._output)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._pump)

    async def close(self, timeout: float) -> None:
        """Write out what waits, for at most `timeout` seconds, and let go of the descriptor."""
        if self._buffer:
            self._drained = asyncio.Event()
            try:
                await asyncio.wait_for(self._drained.wait(), timeout)
            except TimeoutError:
                self._drained = None
        self._let_go()

    def _pump(self) -> None:
        if self._output is None:
            return
        try:
            with self._lock:
                self._write_pieces(self._output)
        except BlockingIOError:
            pass
        except OSError:
            self._let_go()
        self._wait_for_output(on=bool(self._buffer))
        if len(self._buffer) <= _ROOM:
            self._tell_room()

    def _write_pieces(self, output: "_Output") -> None:
        for _ in range(_PIECES):
            if not self._buffer:
                break
            self._write_piece(output)

    def _write_piece(self, output: "_Output") -> None:
        end = len(self._buffer)
        if end > output.piece:
            end = self._buffer.rfind(b"\n", 0, output.piece) + 1 or output.piece
        with memoryview(self._buffer) as whole, whole[:end] as piece:
            written = output.write(piece)
        del self._buffer[:written]

    def _wait_for_output(self, *, on: bool) -> None:
        if on == self._waiting or self._output is None:
            return
        if on:
            self._loop.add_writer(self._output.fd, self._pump)
        else:
            self._loop.remove_writer(self._output.fd)
        self._waiting = on

    def _tell_room(self) -> None:
        resume, self._resume = self._resume, []
        for call in resume:
            call()
        if not self._buffer and self._drained is not None:
            self._drained.set()

    def _let_go(self) -> None:
        self._wait_for_output(on=False)
        with self._lock:
            self._buffer.clear()
            if self._output is not None:
                os.close(self._output.fd)
                self._output = None
        self._tell_room()


class ConsoleHandler(logging.Handler):
    """Sends the agent's own log lines through a console, in order with the workers' lines."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record and its line end."""
        self._console.say(self.format(record).encode(errors="replace") + b"\n")


def open_consoles(writer: Writer) -> tuple[Console, Console]:
    """(stdout, stderr); one and the same when both lead to the same place, as after `2>&1`.

    Files are written by `writer`.
    """
    out = open_console(1, writer)
    try:
        same = os.path.sameopenfile(1, 2)
    except OSError:
        same = False
    return out, out if same else open_console(2, writer)


def open_console(number: int, writer: Writer) -> Console:
    """The console on descriptor `number`, which itself is left as it is."""
    output = _open_output(number)
    if output is not None and output.is_file:
        return FileConsole(output, "stdout" if number == 1 else "stderr", writer)
    return PipeConsole(output)


def _open_output(number: int) -> _Output | None:
    try:
        mode = os.fstat(number).st_mode
        own = os.dup(number)
    except OSError:  # the agent was started with this descriptor closed
        return None
    if stat.S_ISSOCK(mode):  # can't be opened again
        return _Output(own, _PIECE, may_block=True)
    if not (stat.S_ISFIFO(mode) or os.isatty(own)):  # a file or /dev/null
        return _Output(own, _FULL, is_file=True)
    # O_NONBLOCK belongs to the open file, which the agent shares with its shell; opening it once
    # more gives one of our own.
    try:
        again = os.open(f"/proc/self/fd/{own}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # another user's terminal, or a pipe without a reader
        return _Output(own, _CAUTIOUS, may_block=True)
    os.close(own)
    return _Output(again, _PIECE)


def _writable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))
