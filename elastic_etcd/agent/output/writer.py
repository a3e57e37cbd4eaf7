"""The only way out for what an agent writes: log files, and its own stdout and stderr.

A disk may stand still for minutes (a network file system whose server fails over, a journal that is
stuck), and nobody may read a terminal or a pipe. A write then waits in the kernel, where nothing
wakes it up, while the event loop has a lease to renew. So threads write, what waits for them is
bounded, and what is dropped is counted. They are daemons: the end of the agent can't wait for a
write that never comes back.
"""

import asyncio
import contextlib
import logging
import math
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from elastic_etcd.agent.inbox import Timer

FULL = 1 << 20  # bytes that wait: from here on the workers' pipes are not read for the moment
LOST = 1 << 22  # from here on what workers write is dropped
_ROOM = 1 << 18
STILL = 1.0  # seconds in which nothing was written: the disk stands still

log = logging.getLogger(__name__)


class OutputWriter:
    """Does what is `put`, one after the other, in a thread of its own. `put` never waits.

    While it is `full`, whoever can wait should. Nobody waits for a disk that stands still, but a
    terminal or pipe that nobody reads is waited for (`patient`). A job deals with its own errors.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.moved = monotonic()  # when something was last written, or could be
        self.patient = patient
        self._lock = threading.Condition()
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()
        self._size = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[Callable[[], None]] = []  # for room
        self._look = Timer()
        self._ended = False
        # Now, as there may be none to be had when there is something to write.
        threading.Thread(target=self._run, name="writer", daemon=True).start()

    @property
    def full(self) -> bool:
        """Whether what leads here should not be read; see `when_room`."""
        if self._size < FULL:
            return False
        return self.patient or monotonic() - self.moved < STILL

    @property
    def lost(self) -> bool:
        """Whether so much waits that what can be spared must be."""
        return self._size >= LOST

    def put(self, job: Callable[[], object], size: int = 0) -> None:
        """Do `job` after all others, which has `size` bytes to write. From any thread."""
        with self._lock:
            if self._ended:
                return
            if not self._jobs:
                self.moved = monotonic()
            self._jobs.append((job, size))
            self._size += size
            self._lock.notify()

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` once, from the event loop, when it is not full any more."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._waiting.append(resume)
        self._tell_room()

    async def close(self, patience: float) -> None:
        """Wait like `written`; then take nothing more, and let the thread end as soon as it can."""
        await self.written(patience)
        self._look.cancel()
        with self._lock:
            self._ended = True
            self._lock.notify()

    async def written(self, patience: float) -> bool:
        """Wait until all that was put is done; False if nothing moves for `patience` seconds.

        They begin with this call: a reader that has paused before may go on.
        """
        if not self._jobs:
            return True
        began = monotonic()
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        self.put(lambda: _call_soon(loop, done.set))
        while not done.is_set():
            left = patience - (monotonic() - max(began, self.moved))
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), left)
        return True

    def _tell_room(self) -> None:
        """Resume those that wait, if there is room, or else when the disk stands still."""
        if self.full:
            if not self.patient:
                self._look.start(self.moved + STILL - monotonic(), self._tell_room)
            return
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._jobs:
                    if self._ended:
                        return
                    self._lock.wait()
                job, size = self._jobs[0]
            job()
            with self._lock:
                self._jobs.popleft()
                self._size -= size
                self.moved = monotonic()
                loop = self._loop if self._waiting and self._size <= _ROOM else None
            if loop:
                _call_soon(loop, self._tell_room)


class Output:
    """A file, pipe, socket or terminal, to which the thread of a writer appends.

    `open_file` gives its descriptor, which is then this output's; `failed` is told what goes wrong.
    Both run in that thread. After an error it is tried again with the next bytes. The output itself
    says where bytes were dropped.
    """

    def __init__(
        self,
        writer: OutputWriter,
        name: str,
        open_file: Callable[[], int],
        failed: Callable[[OSError], None] = lambda _: None,
    ) -> None:
        self.writer = writer
        self._name = name
        self._open_file = open_file
        self._failed = failed
        self._fd = -1
        self._open_again = 0.0  # when, at the soonest, if it is not open
        self._longest = LOST
        self._counting = threading.Lock()
        self._dropped = 0
        self._dropping = False
        self._line_ended = True
        writer.put(self._open)

    def write(self, data: bytes) -> None:
        """Append what a worker has written, or count it as dropped."""
        with self._counting:
            if not (self._dropping or self.writer.lost):
                self.say(data)
                return
            self._dropped += len(data)
            if self._dropping:
                return
            self._dropping = True
            # It is done when all is written that had been put before, so the output goes on.
            self.writer.put(self._tell_dropped)
        where = f"nobody reads {self._name}"
        if not self.writer.patient:
            where = f"the disk of {self._name} stands still"
        log.warning("%s: what workers write is dropped until it goes on", where)

    def say(self, data: bytes) -> None:
        """Append what the agent itself has to say: it is never dropped. From any thread."""
        if data:
            self.writer.put(lambda: self._append(data), len(data))

    def close(self) -> None:
        """Close it, when all is written."""
        self.writer.put(self._close)

    # --- in the writer's thread

    def _open(self) -> None:
        try:
            self._fd = self._open_file()
            # A pipe takes a write of up to PIPE_BUF bytes whole or not at all, so that the lines of
            # two agents on one pipe stay whole.
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                self._longest = select.PIPE_BUF
        except OSError as error:
            self._open_again = monotonic() + STILL
            self._failed(error)

    def _append(self, data: bytes) -> None:
        if self._fd < 0 and monotonic() >= self._open_again:
            self._open()
        begin = 0
        try:
            while begin < len(data) and self._fd >= 0:
                begin += self._write_some(data, begin)
                self.writer.moved = monotonic()
        except OSError as error:
            self._failed(error)
        self._line_ended = data.endswith(b"\n")

    def _write_some(self, data: bytes, begin: int) -> int:
        """Write what can be written at once, if possible whole lines; gives how many bytes."""
        end = begin + self._longest
        if end < len(data):
            end = data.rfind(b"\n", begin, end) + 1 or end
        try:
            return os.write(self._fd, memoryview(data)[begin:end])
        except BlockingIOError:  # somebody who shares it with this agent has set O_NONBLOCK
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            poll.poll()
            return 0

    def _tell_dropped(self) -> None:
        with self._counting:
            self._dropping = False
            dropped, self._dropped = self._dropped, 0
        here, there = "the disk stood still", "its disk stood still"
        if self.writer.patient:
            here = there = "nobody read it"
        head = "" if self._line_ended else "\n"
        self._append(f"{head}... {dropped} bytes dropped: {here}\n".encode())
        text = "%d bytes of the workers' output dropped, which %s misses: %s"
        log.warning(text, dropped, self._name, there)

    def _close(self) -> None:
        self._open_again = math.inf
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)
        except OSError as error:  # which only closing shows (NFS)
            self._failed(error)


def open_consoles() -> tuple[Output, Output]:
    """This process's (stdout, stderr); one and the same if they lead to one place, as `2>&1`."""
    try:
        same = os.path.sameopenfile(1, 2)
    except OSError:  # one of them is closed
        same = False
    out = open_console(1)
    return out, out if same else open_console(2)


def open_console(number: int) -> Output:
    """The output to which descriptor `number` leads, which may be closed and is left as it is."""
    fd, mode = -1, 0
    with contextlib.suppress(OSError):
        fd = os.dup(number)
        mode = os.fstat(fd).st_mode
    patient = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)
    name = "stdout" if number == 1 else "stderr"
    return Output(OutputWriter(patient=patient), name, lambda: fd)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """From a thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)
