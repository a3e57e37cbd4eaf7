"""How attempts are repeated, without an etcd."""

import pytest

from elastic_etcd.etcd.faults import TokenRefused, Unanswered
from elastic_etcd.etcd.retry import Attempts, now, short_pause


class Work:
    """Fails with each of `errors` in turn, then succeeds; knows how long each attempt had."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.paused: list[int] = []
        self.patience: list[float] = []
        self.good: set[int] = set()  # attempts that achieve something before they fail
        self.attempts = Attempts(pause=self.pause)

    def pause(self, number: int) -> float:
        self.paused.append(number)
        return 0.0

    async def __call__(self) -> str:
        self.patience.append(self.attempts.growing(1.0))
        if len(self.patience) in self.good:
            self.attempts.start_over()
        if self.errors:
            raise self.errors.pop(0)
        return "done"


async def test_an_attempt_is_repeated_until_one_succeeds() -> None:
    work = Work(Unanswered("a"), TokenRefused("b"), Unanswered("c"))
    assert await work.attempts.run(work) == "done"
    assert work.paused == [1, 2, 3]


async def test_patience_grows_up_to_eight_times() -> None:
    work = Work(*(Unanswered("") for _ in range(5)))
    await work.attempts.run(work)
    assert work.patience == [1, 2, 4, 8, 8, 8]


async def test_after_a_success_the_next_failure_is_a_first_one() -> None:
    work = Work(*(Unanswered("") for _ in range(4)))
    work.good = {3}
    await work.attempts.run(work)
    assert work.paused == [1, 2, 1, 2]
    assert work.patience == [1, 2, 4, 2, 4]


async def test_any_other_exception_is_raised_at_once() -> None:
    work = Work(Unanswered(""), ValueError("a fault"), Unanswered(""))
    with pytest.raises(ValueError, match="a fault"):
        await work.attempts.run(work)
    assert work.paused == [1]


async def test_from_the_deadline_on_the_last_error_is_raised() -> None:
    work = Work(Unanswered("first"), Unanswered("second"))
    with pytest.raises(Unanswered, match="first"):
        await Attempts(now()).run(work)


@pytest.mark.parametrize(("number", "longest"), [(1, 0.1), (2, 0.2), (4, 0.8), (5, 1), (5000, 1)])
def test_pauses_are_spread_over_a_second(number: int, longest: float) -> None:
    pauses = [short_pause(number) for _ in range(200)]
    assert min(pauses) >= 0
    assert longest / 2 < max(pauses) <= longest
