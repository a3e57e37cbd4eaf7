"""What may wait for a disk or a name server, in threads: the event loop renews the lease.

A disk may stand still for minutes (a network file system whose server fails over, a journal that is
stuck), and whoever writes to it then waits in the kernel, where nothing wakes him up. These threads
are daemons for that reason: the end of the agent can't wait for one that never comes back.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

FULL = 1 << 20  # bytes that wait: from here on the workers' pipes are not read for the moment
LOST = 1 << 22  # from here on what workers write is dropped
_ROOM = 1 << 18
STILL = 1.0  # seconds in which nothing was written: the disk stands still

log = logging.getLogger(__name__)


class Writer:
    """Does what is `put`, one after the other, in a thread of its own. `put` never waits.

    While it is `full`, whoever can wait should; when the disk stands still it is not full, so that
    nobody waits for it. A job must deal with its own errors.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()
        self._size = 0
        self._moved = monotonic()  # when the oldest job became that
        self._thread: threading.Thread | None = None
        self._waiting: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look: asyncio.TimerHandle | None = None
        self._ended = False

    @property
    def still(self) -> bool:
        """Whether something waits that nothing was done about for a second."""
        return bool(self._jobs) and monotonic() - self._moved >= STILL

    @property
    def full(self) -> bool:
        """Whether writers should stop reading what they would write; see `when_room`."""
        return self._size >= FULL and not self.still

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
                self._moved = monotonic()
            self._jobs.append((job, size))
            self._size += size
            self._lock.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
                self._thread.start()

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` once, from the event loop, when there is room or the disk stands still."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._waiting.append(resume)
            self._loop = loop
        self._look_later()

    async def close(self, patience: float) -> None:
        """Wait like `written`; then take nothing more, and let the thread end as soon as it can."""
        await self.written(patience)
        if self._look is not None:
            self._look.cancel()
            self._look = None
        with self._lock:
            self._ended = True
            self._lock.notify()

    async def written(self, patience: float) -> bool:
        """Wait until all that was put is done; False if nothing moves for `patience` seconds."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop = done.get_loop()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_set, done)

        if not self._jobs:
            return True
        self.put(tell)
        while not done.done():
            left = patience - (monotonic() - self._moved)
            if left <= 0:
                return False
            await asyncio.wait({done}, timeout=left)
        return True

    def _look_later(self) -> None:
        """Look again whether the disk stands still; its own thread can't tell."""
        if not self.full:
            self._tell_room()
        elif self._look is None:
            self._look = asyncio.get_running_loop().call_later(STILL, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._look_later()

    def _tell_room(self) -> None:
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
                self._moved = monotonic()
                tell = self._loop if self._waiting and self._size <= _ROOM else None
            if tell is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    tell.call_soon_threadsafe(self._tell_room)


class DiskFile:
    """A file that the thread of a Writer appends to, in the order of the calls.

    `open` gives its descriptor, which is then this file's; `failed` is told what goes wrong. Both
    run in that thread. Where bytes were dropped because the disk stood still, the file says so.
    """

    def __init__(
        self,
        writer: Writer,
        name: str,
        open_file: Callable[[], int],
        failed: Callable[[OSError], None],
    ) -> None:
        self._writer = writer
        self._name = name
        self._open_file = open_file
        self._failed = failed
        self._fd = -1
        self._counting = threading.Lock()
        self._dropped = 0
        self._dropping = False
        self._line_ended = True
        writer.put(self._open)

    @property
    def full(self) -> bool:
        """As Writer.full."""
        return self._writer.full

    def when_room(self, resume: Callable[[], None]) -> None:
        """As Writer.when_room."""
        self._writer.when_room(resume)

    def write(self, data: bytes) -> None:
        """Append `data`, or count it as dropped."""
        with self._counting:
            if not (self._dropping or self._writer.lost):
                self.keep(data)
                return
            self._dropped += len(data)
            if self._dropping:
                return
            self._dropping = True
            # It is done when all is written that had been put before, so the disk goes on.
            self._writer.put(self._tell_dropped)
        text = "the disk of %s stands still: what workers write is dropped until it goes on"
        log.warning(text, self._name)

    def keep(self, data: bytes) -> None:
        """Append `data` whatever waits: it is never dropped."""
        self._writer.put(lambda: self._append(data), len(data))

    def close(self) -> None:
        """Close it, when all is written."""
        self._writer.put(self._close)

    # --- in the writer's thread

    def _open(self) -> None:
        try:
            self._fd = self._open_file()
        except OSError as error:
            self._failed(error)

    def _append(self, data: bytes) -> None:
        if self._fd < 0 or not data:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._failed(error)
        self._line_ended = data.endswith(b"\n")

    def _tell_dropped(self) -> None:
        with self._counting:
            self._dropping = False
            dropped, self._dropped = self._dropped, 0
        head = b"" if self._line_ended else b"\n"
        self._append(head + b"... %d bytes dropped: the disk stood still\n" % dropped)
        text = "%d bytes of the workers' output dropped, which %s misses: its disk stood still"
        log.warning(text, dropped, self._name)

    def _close(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)
        except OSError as error:  # which only closing shows (NFS)
            self._failed(error)


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
