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
from elastic_etcd.train import boundary
from elastic_etcd.train.boundary import Boundary, WorldBroken

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

    def __init__(self, edge: Boundary, steps: threading.Barrier, chance: random.Random) -> None:
        super().__init__()
        self.edge, self.steps, self.chance = edge, steps, chance
        self.stopped_at = 0

    def run(self) -> None:
        while True:
            self.steps.wait(20)
            for _ in range(self.chance.randrange(300)):
                pass
            if self.edge.check():
                self.stopped_at = self.edge.came
                return


@pytest.mark.parametrize("seed", range(60))
def test_all_ranks_stop_at_the_same_check(
    seed: int, connects: list[Connect], switching: Iterator[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "PATIENCE", 20)  # so many threads switch on a busy machine
    chance = random.Random(seed)
    world = chance.randrange(1, 5)
    steps = threading.Barrier(world)
    ranks = [
        Rank(Boundary(r, world, connects[r]), steps, random.Random(chance.random()))
        for r in range(world)
    ]
    for rank in chance.sample(ranks, world):
        rank.start()
    while ranks[0].edge.came < chance.randrange(20):
        pass
    for rank in chance.sample(ranks, world):
        rank.edge.stop()
        rank.edge.stop()  # told twice
        for _ in range(chance.randrange(3000)):
            pass
    for rank in ranks:
        rank.join(20)
        rank.edge.join()
    assert len({rank.stopped_at for rank in ranks}) == 1
    assert ranks[0].stopped_at > 0


@pytest.mark.parametrize("ahead", [(0, 0, 0), (3, 2, 3), (1, 0, 0), (7, 9, 8)])
def test_loops_that_run_ahead_of_each_other(
    ahead: tuple[int, ...], connects: list[Connect]
) -> None:
    """Without collectives that hold them together, and none of them at a check meanwhile."""
    edges = [Boundary(r, len(ahead), connects[r]) for r in range(len(ahead))]
    for edge, checks in zip(edges, ahead, strict=True):
        assert not any(edge.check() for _ in range(checks))
    for edge in edges:
        edge.stop()
    for edge in edges:
        edge.join()
        while not edge.check():
            pass
    assert [edge.came for edge in edges] == [max(ahead) + 1] * len(ahead)


class Watched(Boundary):
    """Lets the loop run, as far as it gets, whenever the thread has read how far it came."""

    loop: threading.Thread | None = None

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "came" and threading.current_thread().name == "elastic_etcd boundary":
            self.loop = threading.Thread(target=self.run_on, name="loop")
            self.loop.start()
            while super().__getattribute__("came") < value + 1:
                pass
            self.loop.join(0.05)  # it is held now, or there is nothing to hold it
        return value

    def run_on(self) -> None:
        while self.came < 5 and not self.check():
            pass


def test_a_loop_is_held_before_it_is_asked_where_it_is(connects: list[Connect]) -> None:
    edge = Watched(0, 1, connects[0])
    edge.stop()
    edge.join()
    assert edge.loop
    edge.loop.join()
    assert edge.came == 1


def test_a_rank_that_was_not_told_makes_it_a_broken_world(
    connects: list[Connect], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "PATIENCE", 0.01)
    told, _ = edges = [Boundary(r, 2, connects[r]) for r in range(2)]
    told.stop()
    with pytest.raises(WorldBroken, match="could not agree where to stop"):
        told.check()
    assert not edges[1].check()


def test_a_loop_that_waits_for_the_rank_that_was_not_told_is_freed(
    connects: list[Connect], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere than at a check: in a collective with it."""
    monkeypatch.setattr(boundary, "PATIENCE", 0.01)
    lost: list[str] = []
    told = Boundary(0, 2, connects[0], lost.append)
    told.stop()
    told.join()
    assert len(lost) == 1
    assert "could not agree where to stop" in lost[0]


def test_an_interrupt_frees_a_loop_that_is_held(connects: list[Connect]) -> None:
    held = Boundary(0, 2, connects[0])
    held.stop()
    threading.Timer(0.01, held.interrupt, ["n2 is lost"]).start()
    with pytest.raises(WorldBroken, match="n2 is lost"):
        held.check()
    connects[1]().set("elastic_etcd/boundary/target", "1")
    held.join()
    with pytest.raises(WorldBroken, match="n2 is lost"):
        held.check()


def test_what_a_broken_world_has_computed_is_not_committed(connects: list[Connect]) -> None:
    state = ElasticState(step=1)
    state.commit()
    state.step = 2
    edge = Boundary(0, 2, connects[0])
    boundary.begin(edge)
    try:
        boundary.intact()
        edge.interrupt("n2 is lost")
        with pytest.raises(WorldBroken, match="n2 is lost"):
            state.commit()
    finally:
        boundary.begin(None)
    state.restore()
    assert state.step == 1


def test_without_a_world_there_is_nothing_to_stop_for(connects: list[Connect]) -> None:
    assert not boundary.check()
    alone = Boundary(0, 1, connects[0])
    boundary.begin(alone)
    try:
        assert not boundary.check()
        alone.stop()
        assert boundary.check()
    finally:
        boundary.begin(None)
    assert not boundary.check()
