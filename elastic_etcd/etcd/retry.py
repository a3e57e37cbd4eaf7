"""How attempts are repeated: jittered, growing to a second, until a deadline."""

import math
import random
import time

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from elastic_etcd.etcd.faults import Unanswered

jitter = random.Random()  # noqa: S311  (spreads load, keeps no secret)

# The first repetition comes at once, at another endpoint; a thousand agents spread over a second.
_wait = wait_random_exponential(multiplier=0.1, max=1)


def now() -> float:
    """The local monotonic clock, in seconds."""
    return time.monotonic()


def retrying(deadline: float = math.inf) -> AsyncRetrying:
    """Attempts for as long as they end with Unanswered; the last one's is raised."""

    def over(_: RetryCallState) -> bool:
        return now() >= deadline

    def wait(state: RetryCallState) -> float:
        return min(_wait(state), max(0.0, deadline - now()))

    return AsyncRetrying(
        retry=retry_if_exception_type(Unanswered), stop=over, wait=wait, reraise=True
    )


def growing(patience: float, state: RetryCallState) -> float:
    """How long this attempt may take: longer after each failure, up to eight times as long.

    A server that is slow because a thousand clients ask must not be asked again by all of them
    for what it is about to answer.
    """
    return float(patience * 2 ** min(state.attempt_number - 1, 3))


def start_over(state: RetryCallState) -> None:
    """Something was achieved: the next failure is a first one again."""
    state.attempt_number = 1
