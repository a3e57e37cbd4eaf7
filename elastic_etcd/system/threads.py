"""Work that may wait for a disk, a name server or the kernel, in threads beside the event loop.

They are daemons: the end of the program can't wait for one that never comes back. A few are kept
for the moments in which no other is to be had: the user, or the container, has all that it may.
"""

import asyncio
import contextlib
import errno
import functools
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")

_KEPT = 3


def start_thread(run: Callable[[], object], name: str) -> None:
    """Begin `run` in a thread of its own. Raises BlockingIOError if there is none to be had."""
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise BlockingIOError(errno.EAGAIN, str(error)) from None


async def in_thread(work: Callable[[], Result], timeout: float) -> Result:
    """The result of `work`, or its error; TimeoutError when it takes longer than `timeout` seconds.

    The thread of one that takes longer is left to itself.
    """
    async with asyncio.timeout(timeout):
        return await begin(work)


def begin(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """Begin `work` in a thread: in one of those kept, if no other is to be had."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def answer(settle: Callable[[], None]) -> None:
        if not future.done():
            settle()

    def run() -> None:
        settle: Callable[[], None]
        try:
            settle = partial(future.set_result, work())
        except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
            settle = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits any more
            loop.call_soon_threadsafe(answer, settle)

    kept = _kept()
    try:
        start_thread(run, "offloaded")
    except BlockingIOError:
        kept.put(run)
    return future


@functools.cache
def _kept() -> SimpleQueue[Callable[[], object]]:
    """The queue from which the kept threads take their work."""
    todo: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def serve() -> None:
        while True:
            todo.get()()

    for _ in range(_KEPT):
        start_thread(serve, "kept")
    return todo
