"""How attempts are repeated: after a pause with jitter, until a deadline.

This is the only module that knows tenacity.
"""

import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type

from elastic_etcd.etcd.faults import Unanswered

Result = TypeVar("Result")

jitter = random.Random()  # noqa: S311  (spreads load, keeps no secret)


def now() -> float:
    """The local monotonic clock, in seconds."""
    return time.monotonic()


def short_pause(number: int) -> float:
    """Seconds to wait after attempt `number`, which begins with 1.

    The first repetition comes at once, at another endpoint; a thousand agents spread over a
    second.
    """
    return jitter.uniform(0.0, min(0.1 * 2.0 ** min(number - 1, 4), 1.0))


class Attempts:
    """Attempts at one piece of work, until one succeeds.

    An attempt that ends with an exception of `on` is repeated after `pause(number)` seconds.
    From `deadline` on, by `now`, its exception is raised instead. Any other exception is raised
    at once.
    """

    def __init__(
        self,
        deadline: float = math.inf,
        *,
        on: tuple[type[Exception], ...] = (Unanswered,),
        pause: Callable[[int], float] = short_pause,
    ) -> None:
        self.deadline = deadline
        self._pause = pause
        self._number = 0
        self._retrying = AsyncRetrying(
            retry=retry_if_exception_type(on),
            stop=lambda _: now() >= deadline,
            wait=lambda _: self._wait(),
            reraise=True,
        )

    async def run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """The result of the first attempt at `work` that succeeds."""

        async def attempt() -> Result:
            self._number += 1
            return await work()

        return await self._retrying(attempt)

    def start_over(self) -> None:
        """Count the attempt under way as the first, because it has achieved something."""
        self._number = 1

    def growing(self, patience: float) -> float:
        """How long the attempt under way may take: up to eight times `patience`.

        It grows with each failure. A server that is slow because a thousand clients ask must
        not be asked again by all of them for what it is about to answer.
        """
        return patience * 2.0 ** min(self._number - 1, 3)

    def _wait(self) -> float:
        return min(self._pause(self._number), max(0.0, self.deadline - now()))
