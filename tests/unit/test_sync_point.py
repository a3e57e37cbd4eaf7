"""All ranks stop at the same check: threads as ranks, a real store, interleavings by chance."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from elastic_etcd import ElasticState
from elastic_etcd.train import sync_point
from elastic_etcd.train.sync_point import SyncPoint, WorldBroken

Connect = Callable[[], Store]


@pytest.fixture(scope="module")
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="module")
def clients(server: TCPStore) -> list[TCPStore]:
    """One connection for each rank; each costs torch a look-up of the server's name."""
    timeout = timedelta(seconds=20)
    return [TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout) for _ in range(4)]


@pytest.fixture
def connects(clients: list[TCPStore], request: pytest.FixtureRequest) -> list[Connect]:
    """Each rank's way to this test's part of the store."""
    return [partial(PrefixStore, request.node.name, client) for client in clients]


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Rank(threading.Thread):
    """A training loop: each step is a collective with all, which some of them leave ahead."""

    def __init__(self, point: SyncPoint, steps: threading.Barrier, chance: random.Random) -> None:
        super().__init__()
        self.point, self.steps, self.chance = point, steps, chance
        self.stopped_at = 0

    def run(self) -> None:
        while True:
            self.steps.wait(20)
            for _ in range(self.chance.randrange(300)):
                pass
            if self.point.check():
                self.stopped_at = self.point.steps
                return


@pytest.mark.parametrize("seed", range(60))
def test_all_ranks_stop_at_the_same_check(
    seed: int, connects: list[Connect], switching: Iterator[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_point, "SYNC_PATIENCE", 20)  # so many threads switch on a busy machine
    chance = random.Random(seed)
    world = chance.randrange(1, 5)
    steps = threading.Barrier(world)
    ranks = [
        Rank(SyncPoint(r, world, connects[r]), steps, random.Random(chance.random()))
        for r in range(world)
    ]
    for rank in chance.sample(ranks, world):
        rank.start()
    while ranks[0].point.steps < chance.randrange(20):
        pass
    for rank in chance.sample(ranks, world):
        rank.point.stop()
        rank.point.stop()  # told twice
        for _ in range(chance.randrange(3000)):
            pass
    for rank in ranks:
        rank.join(20)
        rank.point.join()
    assert len({rank.stopped_at for rank in ranks}) == 1
    assert ranks[0].stopped_at > 0


@pytest.mark.parametrize("ahead", [(0, 0, 0), (3, 2, 3), (1, 0, 0), (7, 9, 8)])
def test_loops_that_run_ahead_of_each_other(
    ahead: tuple[int, ...], connects: list[Connect]
) -> None:
    """Without collectives that hold them together, and none of them at a check meanwhile."""
    points = [SyncPoint(r, len(ahead), connects[r]) for r in range(len(ahead))]
    for point, checks in zip(points, ahead, strict=True):
        assert not any(point.check() for _ in range(checks))
    for point in points:
        point.stop()
    for point in points:
        point.join()
        while not point.check():
            pass
    assert [point.steps for point in points] == [max(ahead) + 1] * len(ahead)


class Watched(SyncPoint):
    """Lets the loop run, as far as it gets, whenever the thread has read how far it came."""

    loop: threading.Thread | None = None

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "steps" and threading.current_thread().name == "elastic_etcd sync point":
            self.loop = threading.Thread(target=self.run_on, name="loop")
            self.loop.start()
            while super().__getattribute__("steps") < value + 1:
                pass
            self.loop.join(0.05)  # it is held now, or there is nothing to hold it
        return value

    def run_on(self) -> None:
        while self.steps < 5 and not self.check():
            pass


def test_a_loop_is_held_before_it_is_asked_where_it_is(connects: list[Connect]) -> None:
    point = Watched(0, 1, connects[0])
    point.stop()
    point.join()
    assert point.loop
    point.loop.join()
    assert point.steps == 1


def test_a_rank_that_was_not_told_makes_it_a_broken_world(
    connects: list[Connect], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_point, "SYNC_PATIENCE", 0.01)
    told, _ = points = [SyncPoint(r, 2, connects[r]) for r in range(2)]
    told.stop()
    with pytest.raises(WorldBroken, match="could not agree where to stop"):
        told.check()
    assert not points[1].check()


def test_a_loop_that_waits_for_the_rank_that_was_not_told_is_freed(
    connects: list[Connect], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere than at a check: in a collective with it."""
    monkeypatch.setattr(sync_point, "SYNC_PATIENCE", 0.01)
    lost: list[str] = []
    told = SyncPoint(0, 2, connects[0], lost.append)
    told.stop()
    told.join()
    assert len(lost) == 1
    assert "could not agree where to stop" in lost[0]


def test_an_interrupt_frees_a_loop_that_is_held(connects: list[Connect]) -> None:
    held = SyncPoint(0, 2, connects[0])
    held.stop()
    threading.Timer(0.01, held.interrupt, ["n2 is lost"]).start()
    with pytest.raises(WorldBroken, match="n2 is lost"):
        held.check()
    connects[1]().set("elastic_etcd/sync_point/target", "1")
    held.join()
    with pytest.raises(WorldBroken, match="n2 is lost"):
        held.check()


def test_what_a_broken_world_has_computed_is_not_committed(connects: list[Connect]) -> None:
    state = ElasticState(step=1)
    state.commit()
    state.step = 2
    point = SyncPoint(0, 2, connects[0])
    sync_point.install(point)
    try:
        sync_point.current().raise_if_broken()
        point.interrupt("n2 is lost")
        with pytest.raises(WorldBroken, match="n2 is lost"):
            state.commit()
    finally:
        sync_point.install(None)
    state.restore()
    assert state.step == 1


def test_without_a_world_there_is_nothing_to_stop_for(connects: list[Connect]) -> None:
    assert not sync_point.current().check()
    alone = SyncPoint(0, 1, connects[0])
    sync_point.install(alone)
    try:
        assert not sync_point.current().check()
        alone.stop()
        assert sync_point.current().check()
    finally:
        sync_point.install(None)
    assert not sync_point.current().check()
