"""What ranks agree on before a commit: a broken world, or ranks that are apart, never commit."""

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_etcd.errors import UsageError
from elastic_etcd.train import sync_point
from elastic_etcd.train.data.sampler import ElasticSampler
from elastic_etcd.train.data.shards import Tail
from elastic_etcd.train.state.elastic_state import ElasticState
from elastic_etcd.train.state.steps import CommitInterval
from elastic_etcd.train.sync_point import SyncPoint, WorldBroken, WorldChanged
from tests.support.forked import Child, commit_alone, group, ranks
from tests.support.states import commits, logged


def made(rank: int = 0, size: int = 1, tail: Tail = "drop") -> ElasticState:
    """A state that has committed step 1, in a world of ee.run's."""
    sync_point.install(SyncPoint(rank, size, dict))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = ElasticSampler(100, tail=tail)
    state = ElasticState(model=model, optimizer=optimizer, sampler=sampler, step=0)
    state.sync()
    state.step = 1
    state.commit()
    return state


def ways_to_commit(rank: int, folder: Path) -> Any:
    """A peer dies in step 2, whose error each of these scripts catches."""
    found: Any = None
    with suppress(RuntimeError), group(rank, 3, folder):  # whose last barrier fails
        state = made(rank, 3)
        state.step = 2
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with suppress(Exception):  # a loop that leaves out a bad batch
            dist.all_reduce(torch.ones(1))
        told = []
        for call in (state.commit, state._leave, state.check):
            with suppress(Exception):
                try:
                    call()
                except WorldBroken as error:
                    told.append(error)
        sync_point.install(None)
        with pytest.raises(RuntimeError) as raised:  # without ee.run it is the error itself
            state.commit()
        state.restore()
        found = state.step, [str(e) for e in told], told[0].__cause__, raised.value
    return found


def test_t3_a_world_whose_error_was_caught_commits_nothing(tmp_path: Path) -> None:
    children = [Child(ways_to_commit, rank, tmp_path) for rank in range(3)]
    for rank, child in enumerate(children):
        found = child.result()
        if rank == 1:
            assert found is None
            continue
        at, told, cause, raised = found
        assert at == 1
        assert len(told) == 3
        assert len(set(told)) == 1
        assert told[0].startswith("a collective has failed, here or on another rank, so nothing is")
        assert "gloo" in told[0]
        for error in (cause, raised):
            assert isinstance(error, RuntimeError)
            assert "gloo" in str(error)


def with_one_rank_s_error(rank: int) -> tuple[int, int, list[str]]:
    """Rank 0 meets an error of its own; what it does about it commits nothing, and waits for none.

    Then both go on, as if rank 1 had left out the same batch.
    """
    told = logged()
    state = made(rank, 2)
    state.step = 2
    if rank == 0:
        with suppress(ValueError):
            try:
                int("a bad sample")
            finally:
                state.commit()
        try:
            int("a bad sample")
        except ValueError:
            state.commit()
    before = commits(state)
    state.commit()
    return before, commits(state), told()


def test_t3_a_commit_for_an_error_that_others_may_not_have_met(tmp_path: Path) -> None:
    one, other = ranks(2, tmp_path, with_one_rank_s_error)
    assert one[:2] == other[:2] == (1, 2)
    assert [line.split(": ")[1] for line in one[2]] == [
        "commit() while ValueError is handled commits nothing"
    ] * 2
    assert not other[2]


def within(error: BaseException, call: Callable[[], object]) -> None:
    try:
        raise error
    except type(error):
        call()


@pytest.fixture
def alone() -> Any:
    yield made()
    sync_point.install(None)


@pytest.mark.parametrize("error", [StopIteration(), GeneratorExit(), WorldChanged()])
def test_t3_what_all_ranks_handle_at_the_same_step_may_commit(
    error: BaseException, alone: ElasticState
) -> None:
    alone.step = 2
    within(error, alone.commit)
    alone.restore()
    assert alone.step == 2


def test_t3_a_training_within_an_except_commits(alone: ElasticState) -> None:
    """As one does that falls back to something else when this can't be had."""

    def train() -> None:
        for alone.step in range(2, 5):
            alone.check()
            alone.commit()

    within(ImportError("no module named apex"), train)
    alone.restore()
    assert alone.step == 4


def test_t3_a_finally_in_a_world_that_is_known_to_be_broken(alone: ElasticState) -> None:
    sync_point.current().interrupt("a peer is gone")
    with pytest.raises(WorldBroken, match="a peer is gone"):
        within(RuntimeError("a collective"), alone.commit)
    sync_point.install(None)
    alone.restore()
    assert alone.step == 1


def step(state: ElasticState) -> None:
    state.model(torch.ones(2)).sum().backward()
    state.optimizer.step()


def with_a_step_left_out(rank: int, tail: Tail) -> Any:
    """Rank 1 has no memory for the step of its optimizer, and leaves it out."""
    state = made(rank, 2, tail)
    for number in range(3):
        if rank == 0 or number != 1:
            step(state)
    told = ""
    try:
        state.commit()
    except WorldBroken as error:
        told = str(error)
    return commits(state), told


def test_t3_a_rank_that_has_left_out_a_step(tmp_path: Path) -> None:
    one, other = ranks(2, tmp_path, with_a_step_left_out, "drop")
    assert one == other
    assert one[0] == 1
    assert (
        "rank 1 is at commit 1 after 2 steps of its optimizers, others at commit 1 after 3"
        in (one[1])
    )


def test_t3_with_an_uneven_tail_some_ranks_step_once_more(tmp_path: Path) -> None:
    assert ranks(2, tmp_path, with_a_step_left_out, "uneven") == [(2, "")] * 2


def with_a_commit_of_one(rank: int) -> str:
    state = made(rank, 2)
    sync_point.install(None)
    if rank == 0:
        commit_alone(state)
    with pytest.raises(UsageError) as raised:
        state.commit()
    return str(raised.value)


def test_t3_ranks_that_have_committed_unlike_often(tmp_path: Path) -> None:
    one, other = ranks(2, tmp_path, with_a_commit_of_one)
    assert one == other
    assert "rank 1 is at commit 1 after 0 steps of its optimizers, others at commit 2" in one


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.mark.parametrize(
    ("a_step", "cost", "expected"),
    [
        (0.1, 0.004, [1, 1, 2, 4, 4, 4]),  # 1 % of the time
        (0.01, 0.004, [1, 1, 2, 4, 8, 16, 32, 40, 40]),
        (0.1, 10.0, [1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 299, 299]),  # 30 s
        (45.0, 1.0, [1, 1, 1]),
    ],
)
def test_t14_so_often_as_costs_one_percent_or_each_30_s(
    a_step: float,
    cost: float,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "elastic_etcd")
    clock = Clock(monkeypatch)
    interval, found = CommitInterval(), []
    for _ in expected:
        found.append(interval.steps)
        clock.now += interval.steps * a_step * 1.0001
        times = interval.times(interval.steps)
        interval.take([times, [times[0], 10**9, times[2]]], asked=0.0)  # a rank that has waited
        interval.tell()
        clock.now += cost
        interval.committed(cost)
    assert found == expected
    (line,) = caplog.messages
    steps = f"{expected[-1]} steps" if expected[-1] > 1 else "step"
    assert line.startswith(f"state.steps() commits each {steps}, which is about each ")
    interval.begin()
    assert interval.steps == 1


def with_clocks_of_their_own(rank: int) -> list[int]:
    """Rank 1's commits take three times as long as rank 0's."""
    real = CommitInterval.committed

    def committed(self: CommitInterval, seconds: float) -> None:
        real(self, min(seconds, 0) + 0.001 * (1 + 2 * rank))  # whatever it took

    CommitInterval.committed = committed  # type: ignore[method-assign]
    state, found = made(rank, 2), []
    for _ in range(5):
        found.append(state._loops.interval.steps)
        for _ in range(found[-1]):
            time.sleep(0.02)
            state.commit(every=found[-1])
    return found


def test_t14_ranks_agree_on_it(tmp_path: Path) -> None:
    one, other = ranks(2, tmp_path, with_clocks_of_their_own)
    assert one == other
    assert one[0] == 1
    assert one[-1] > 4  # that rank 0 alone would choose
