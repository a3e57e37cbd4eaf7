"""Work that may wait for a disk, a name server or the kernel, in threads beside the event loop.

They are daemons: the end of the program can't wait for one that never comes back.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], timeout: float) -> Result:
    """The result of `work`, or its error; TimeoutError when it takes longer than `timeout` seconds.

    The thread of one that takes longer is left to itself.
    """
    async with asyncio.timeout(timeout):
        return await begin(work)


def begin(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """Begin `work` in a thread of its own, at once."""
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

    threading.Thread(target=run, name="offloaded", daemon=True).start()
    return future
