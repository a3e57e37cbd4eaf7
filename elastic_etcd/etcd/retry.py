"""How attempts are repeated: after a pause with jitter, until a deadline.

This is the only module that knows tenacity.
"""

import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type

from elastic_etcd.errors import EtcdDenied, EtcdError, EtcdRefused
from elastic_etcd.etcd.faults import TooLarge, Unanswered
from elastic_etcd.times import REFUSED_PAUSE

TOLD_AGAIN = 300.0

Result = TypeVar("Result")

log = logging.getLogger(__name__)

jitter = random.Random()  # noqa: S311  (spreads load, keeps no secret)


def now() -> float:
    """The local monotonic clock, in seconds."""
    return time.monotonic()


def boottime() -> float:
    """As `now`, on a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def short_pause(number: int) -> float:
    """Seconds to wait after attempt `number`, which begins with 1.

    The first repetition comes at once, at another endpoint; a thousand agents spread over a
    second.
    """
    return jitter.uniform(0.0, min(0.1 * 2.0 ** min(number - 1, 4), 1.0))


def refused_pause(number: int) -> float:
    """As `short_pause`, for what an administrator has to put right."""
    return min(2.0 ** min(number - 1, 3), REFUSED_PAUSE)


class Attempts:
    """Attempts at one piece of work, until one succeeds.

    An attempt that ends with Unanswered is repeated after `pause(number)` seconds.
    From `deadline` on, by `now`, its exception is raised instead. Any other exception is raised
    at once.
    """

    def __init__(
        self,
        deadline: float = math.inf,
        *,
        pause: Callable[[int], float] = short_pause,
    ) -> None:
        self.deadline = deadline
        self._number = 0
        self._retrying = AsyncRetrying(
            retry=retry_if_exception_type(Unanswered),
            stop=lambda _: now() >= deadline,
            wait=lambda _: min(pause(self._number), max(0.0, deadline - now())),
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


class Refusals:
    """Waits out what etcd refuses: a password, a permission, its space.

    Before the first success a refusal is raised: whoever starts something wrong is told at once.
    From then on it is told and waited for: an administrator can put it right, and no training ends
    by it. Each client has one, so that each cause is told once, and again after TOLD_AGAIN seconds.
    """

    def __init__(self) -> None:
        self._succeeded = False
        self._told: dict[str, float] = {}

    def succeeded(self) -> None:
        """Note a success: whatever is refused from here on was possible before."""
        self._succeeded = True

    async def wait_out(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """The result of `work`, repeated while it is refused.

        Raises EtcdError before a success, and TooLarge, which nobody puts right meanwhile.
        """

        async def ask() -> Result:
            try:
                return await work()
            except (EtcdDenied, EtcdRefused) as refusal:
                if not self._succeeded or isinstance(refusal, TooLarge):
                    raise
                self._tell_refusal(refusal)
                raise Unanswered(str(refusal)) from refusal

        return await Attempts(pause=refused_pause).run(ask)

    def _tell_refusal(self, refusal: EtcdError) -> None:
        cause = str(refusal).rpartition("\n")[2]  # what to do: the same for each key
        if now() - self._told.get(cause, -math.inf) > TOLD_AGAIN:
            self._told[cause] = now()
            log.warning("%s\nIt is tried again until that is done.", refusal)
