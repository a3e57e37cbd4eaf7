"""torch's file timers: by when a worker will be done with something, or else is to be ended.

A FileTimerClient of torch.distributed.elastic.timer writes them into a named pipe, a JSON object a
line. Nothing of that is trusted, since workers run their user's code.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from select import PIPE_BUF
from typing import Annotated, NamedTuple

from msgspec import Meta, MsgspecError, Struct, json

from elastic_etcd.agent.directories import LOOK, leads_to
from elastic_etcd.agent.timer import Timer
from elastic_etcd.errors import UsageError
from elastic_etcd.system.threads import in_thread

_PIPE = 1 << 20  # bytes that nobody has read: torch's client fails where there is no room
_PART = 1 << 16  # bytes that are read in one turn of the event loop
_MOST = 1024  # timers

log = logging.getLogger(__name__)


class FileTimerRequest(Struct, frozen=True):
    """A line: process `pid` sets the timer `scope_id`, or lets go of it by a time below 0.

    `expiration_time` is in seconds since 1970. Without a `signal` above 0 nothing is ended.
    """

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    scope_id: str
    expiration_time: float
    signal: Annotated[int, Meta(ge=-64, le=64)]


class _Timer(NamedTuple):
    end: float  # by the loop's clock
    seconds: float
    session: int
    request: FileTimerRequest


class FileTimers:
    """The pipe at `path`, from now until `close`. Raises UsageError.

    `expired(session, request, seconds)` is called of each timer that was not let go of within the
    `seconds` that it was set for, if its process still runs, in this session.
    """

    def __init__(self, path: str, expired: Callable[[int, FileTimerRequest, float], None]) -> None:
        self.path = path
        self._expired = expired
        self._timers: dict[tuple[int, str], _Timer] = {}
        self._rest = b""  # of a line that is not whole yet
        self._warned = False
        self._until_first = Timer()
        self._loop = asyncio.get_running_loop()
        self._fd = _open_pipe(path)
        self._loop.add_reader(self._fd, self._read_pipe)

    def forget(self, session: int) -> None:
        """Drop the timers of a worker that has ended, and of what it has started."""
        self._timers = {key: t for key, t in self._timers.items() if t.session != session}

    async def renew(self) -> None:
        """Make the pipe anew if somebody has removed it. Raises OSError and UsageError."""
        if await in_thread(partial(leads_to, self.path, self._fd), LOOK):
            return
        fd = await in_thread(partial(_open_pipe, self.path), LOOK)
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = fd
        self._loop.add_reader(fd, self._read_pipe)

    def close(self) -> None:
        """Remove the pipe."""
        self._until_first.cancel()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        with contextlib.suppress(OSError):
            Path(self.path).unlink()

    def _read_pipe(self) -> bool:
        """A part of what is there, if anything is; of a line that is too long the beginning."""
        try:
            *lines, rest = (self._rest + os.read(self._fd, _PART)).split(b"\n")
        except BlockingIOError:
            return False
        self._rest = rest[: PIPE_BUF + 1]
        for line in lines:
            self._take_line(line)
        self._await_first()
        return True

    def _take_line(self, line: bytes) -> None:
        try:
            self._set(request_of(line))
        except (MsgspecError, ValueError, RecursionError) as error:
            level = logging.DEBUG if self._warned else logging.WARNING
            log.log(level, "TORCHELASTIC_TIMER_FILE: ignored %r: %s", line[:200], error)
            self._warned = True

    def _set(self, request: FileTimerRequest) -> None:
        key = request.pid, request.scope_id
        self._timers.pop(key, None)
        if request.expiration_time < 0:
            return
        if len(self._timers) >= _MOST:
            raise ValueError(f"there are {_MOST} timers already")
        session = _session(request.pid)
        if session is None:
            raise ValueError("there is no such process")
        seconds = request.expiration_time - time.time()
        self._timers[key] = _Timer(self._loop.time() + seconds, seconds, session, request)

    def _await_first(self) -> None:
        self._until_first.cancel()
        if self._timers:
            first = min(timer.end for timer in self._timers.values())
            self._until_first.start(first - self._loop.time(), self._on_end)

    def _on_end(self) -> None:
        for _ in range(_PIPE // _PART):  # one that stood still has not heard what was let go of
            if not self._read_pipe():
                break
        now = self._loop.time()
        for timer in sorted(self._timers.values(), key=lambda timer: timer.end):
            pid, scope = timer.request.pid, timer.request.scope_id
            if timer.end <= now:
                del self._timers[pid, scope]
                if _session(pid) == timer.session:
                    self._expired(timer.session, timer.request, timer.seconds)
        self._await_first()


def _open_pipe(path: str) -> int:
    """Make it and open it. Raises UsageError."""
    try:
        _remove_former(path)
        os.mkfifo(path, 0o600)
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # it has a writer, and so never ends
    except OSError as error:
        raise UsageError(
            f"TORCHELASTIC_TIMER_FILE={path}: there can be no pipe: {error.strerror}.\n"
            "Name a file that is not there, where this user may write, or unset it."
        ) from error
    with contextlib.suppress(OSError):  # this user has too many large ones
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE)
    return fd


def _remove_former(path: str) -> None:
    """A dead agent's: a pipe that nobody reads. Raises OSError."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.ENXIO and Path(path).is_fifo():
            Path(path).unlink()


def request_of(line: bytes) -> FileTimerRequest:
    """The request in a line. Raises ValueError, RecursionError or MsgspecError."""
    if len(line) > PIPE_BUF:
        raise ValueError("too long")
    return json.decode(line, type=FileTimerRequest)


def _session(pid: int) -> int | None:
    """None of a process that is gone; 0 of one whose session is of another namespace."""
    try:
        return os.getsid(pid)
    except OSError:
        return None
