"""One snapshot per node: each rank gets what it has committed, whoever's memory that is in."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import elastic_etcd.train.agent_channel
from elastic_etcd.system.limits import Free
from elastic_etcd.train.state import free_memory, snapshot_memfds, snapshot_store
from elastic_etcd.train.state.elastic_state import ElasticState
from elastic_etcd.train.state.snapshot_bytes import TensorSlice
from elastic_etcd.train.state.snapshot_format import Draft, Version
from elastic_etcd.train.state.snapshot_memfds import HEADER, StateSnapshot
from elastic_etcd.train.state.snapshot_store import Snapshots
from tests.support.channels import Job
from tests.support.forked import Child, ranks

WORDS = 300_000


class Node:
    """The memory files of a node, which outlive its ranks."""

    def __init__(self, ranks: int) -> None:
        self.shared = [memfd(what) for what in ("node0", "node1", "lock")]
        self.own = [[memfd(f"{rank}.{half}") for half in (0, 1)] for rank in range(ranks)]

    def rank(self, rank: int) -> Snapshots:
        """As a process that has just begun has them."""
        return opened([os.dup(fd) for fd in (*self.own[rank], *self.shared)], rank)

    def ranks(self) -> list[Snapshots]:
        return [self.rank(rank) for rank in range(len(self.own))]

    def memory(self) -> int:
        """In bytes, without the first pages."""
        fds = [*self.shared, *(fd for own in self.own for fd in own)]
        return sum(max(0, os.fstat(fd).st_blocks * 512 - HEADER) for fd in fds)

    def close(self) -> None:
        for fd in (*self.shared, *(fd for own in self.own for fd in own)):
            os.close(fd)


def opened(fds: list[int], rank: int) -> Snapshots:
    return Snapshots(fds[:2], fds[2:], rank)


def memfd(name: str) -> int:
    fd = os.memfd_create(name)
    os.ftruncate(fd, HEADER)
    return fd


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(4)
    yield made
    made.close()


def values(count: int, variant: int = 0) -> torch.Tensor:
    """Of one commit; another variant has the same words in another order."""
    made = torch.arange(WORDS + 1000 * count)
    made[0] = count
    made[[3, 5]] = made[[5, 3]] if variant == 1 else made[[3, 5]]
    made[-1] += variant // 2
    return made


def at_once(pieces: Iterator[TensorSlice]) -> list[list[TensorSlice]]:
    return [list(pieces)]


def draft(count: int, variant: int = 0, batched: Any = at_once) -> Draft:
    return Draft(Version(0, count, 1), {}, {"a": values(count, variant)}, batched)


def is_it(snapshot: StateSnapshot | None, count: int, variant: int = 0) -> bool:
    if snapshot is None or snapshot.header.version != Version(0, count, 1):
        return False
    _, tensors = snapshot.load()
    return bool(torch.equal(tensors["a"][0], values(count, variant)))


def size_of(count: int) -> int:
    return draft(count).size


def test_ranks_with_the_same_values_have_one_snapshot(node: Node) -> None:
    ranks = node.ranks()
    for count in range(1, 6):
        for rank in ranks:
            rank.write(draft(count))
        assert all(is_it(rank.newest_intact(), count) for rank in ranks)
    assert node.memory() <= 2.02 * size_of(5)
    assert all(is_it(again.newest_intact(), 5) for again in node.ranks())


def test_what_is_not_whole_is_offered_to_nobody(node: Node) -> None:
    rank = node.rank(0)
    for count in (1, 2):
        rank.write(draft(count))
    newest = rank.newest()
    assert newest
    newest.body[0] ^= 1
    assert rank.inventory(trusted=True).newest == newest.header
    found = rank.inventory(trusted=False).newest
    assert found
    assert found.version == Version(0, 1, 1)


@pytest.mark.parametrize("variant", [1, 2], ids=["two words that changed places", "one word"])
def test_a_rank_whose_values_differ_has_memory_of_its_own(node: Node, variant: int) -> None:
    ranks = node.ranks()
    for count in range(1, 4):
        for number, rank in enumerate(ranks):
            rank.write(draft(count, variant if number == 2 else 0))
    for number, rank in enumerate(node.ranks()):
        assert is_it(rank.newest_intact(), 3, variant if number == 2 else 0)
    assert 3.9 * size_of(3) < node.memory() <= 4.02 * size_of(3)
    for rank in ranks:
        rank.begin_anew()
    for count in (4, 5):
        for rank in ranks:
            rank.write(draft(count))
    assert node.memory() <= 2.02 * size_of(5)


def test_who_is_ahead_clears_nothing_that_others_need(node: Node) -> None:
    ahead, behind, *_ = node.ranks()
    behind.write(draft(1))
    for count in range(1, 5):
        ahead.write(draft(count))
        assert is_it(behind.newest_intact(), 1)
        assert is_it(ahead.newest_intact(), count)
    behind.write(draft(2))
    assert is_it(behind.newest_intact(), 2)
    assert is_it(ahead.newest_intact(), 4)


def test_an_older_one_that_a_rank_goes_back_to_is_cleared_by_nobody(node: Node) -> None:
    back, ahead, *_ = node.ranks()
    for count in (1, 2):
        for rank in (back, ahead):
            rank.write(draft(count))
    newest = back.newest()
    assert newest
    newest.body[0] ^= 1
    assert is_it(back.newest_intact(), 1)
    for count in (3, 4):
        ahead.write(draft(count))
    assert is_it(back.newest_intact(), 1)


def test_fewer_ranks_need_no_more_than_they_hold(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = node.ranks()
    for rank in ranks:
        rank.write(draft(1))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for count in range(2, 5):
        for rank in ranks[:2]:
            rank.write(draft(count))
    assert all(is_it(rank.newest_intact(), 4) for rank in ranks[:2])
    assert node.memory() <= 2.02 * size_of(4)


def test_a_rank_that_comes_later_takes_what_the_others_have(node: Node) -> None:
    first, late, *_ = node.ranks()
    first.write(draft(1))
    header = first.newest().header  # type: ignore[union-attr]
    assert is_it(late.take(header), 1)
    first.write(draft(2))
    first.write(draft(3))
    assert is_it(late.newest_intact(), 1)
    assert late.take(header) is not None


def test_what_is_damaged_is_taken_by_nobody(node: Node) -> None:
    first, late, *_ = node.ranks()
    first.write(draft(1))
    newest = first.newest()
    assert newest is not None
    newest.body[9] ^= 1
    assert late.take(newest.header) is None
    assert late.newest() is None


def test_what_is_received_is_the_node_s(node: Node) -> None:
    first, late, *_ = node.ranks()
    source = Node(1)
    (other,) = source.ranks()
    other.write(draft(1))
    sent = other.newest()
    assert sent is not None
    with first.receiving(sent.header.size) as target:
        target.body(sent.header.size).copy_(sent.body)
        target.set(sent.header)
    assert is_it(first.newest_intact(), 1)
    assert is_it(late.take(sent.header), 1)
    assert node.memory() <= 1.02 * size_of(1)
    source.close()


def test_only_what_grows_is_asked_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = node.ranks()
    monkeypatch.setattr(free_memory, "free_memory", lambda: Free(2 * size_of(9), "nothing more"))
    ranks[0].write(draft(9))
    monkeypatch.setattr(free_memory, "free_memory", lambda: Free(size_of(9), "nothing more"))
    for count in (9, 10):
        for rank in ranks[count == 9 :]:
            rank.write(Draft(Version(0, count, 1), {}, {"a": values(9)}, at_once))
    monkeypatch.setattr(free_memory, "free_memory", lambda: Free(0, "nothing more"))
    for rank in ranks:
        rank.write(Draft(Version(0, 11, 1), {}, {"a": values(9)}, at_once))


class Stopped(Exception):
    """In the middle of a copy."""


def stopping(pieces: Iterator[TensorSlice]) -> Iterator[list[TensorSlice]]:
    for start, piece in islice(pieces, 1):
        yield [(start, piece[: len(piece) // 2])]
    raise Stopped


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("commit", "commit", "commit", "differ", "stop", "begin", "take")),
        st.integers(0, 2),
    ),
    max_size=25,
)


@given(OPERATIONS)
def test_each_rank_has_what_it_committed_whatever_happens(operations: list[Any]) -> None:
    node = Node(3)
    ranks = node.ranks()
    committed = [(0, 0)] * 3
    for what, number in operations:
        rank, (count, _) = ranks[number], committed[number]
        match what:
            case "commit" | "differ":
                variant = 1 + number if what == "differ" else 0
                rank.write(draft(count + 1, variant))
                committed[number] = count + 1, variant
            case "stop":
                with pytest.raises(Stopped):
                    rank.write(draft(count + 1, batched=stopping))
            case "begin":
                ranks[number] = node.rank(number)
            case "take":
                newest = ranks[number - 1].newest()
                if newest and newest.header.version.counter > count and rank.take(newest.header):
                    committed[number] = committed[number - 1]
        for each, last in zip(ranks, committed, strict=True):
            newest = each.newest_intact()
            assert newest is None if last == (0, 0) else is_it(newest, *last)
    node.close()


def passed_on(node: Node, rank: int) -> list[Any]:
    return [DupFd(fd) for fd in (*node.own[rank], *node.shared)]


def commit_and(fds: list[Any], rank: int, count: int, sign: int, said: Any) -> Any:
    """Commit, and have a signal in the middle of the copy."""

    def signalled(pieces: Iterator[TensorSlice]) -> Iterator[list[TensorSlice]]:
        pieces = iter(list(pieces))
        yield [next(pieces)]
        said.send("copying")
        os.kill(os.getpid(), sign)
        yield list(pieces)

    held = opened([fd.detach() for fd in fds], rank)
    held.write(draft(count, batched=signalled))
    return is_it(held.newest_intact(), count)


def test_a_rank_that_is_killed_in_its_copy_leaves_nothing_that_is_taken_for_whole(
    node: Node,
) -> None:
    heard, said = Pipe(duplex=False)
    one, other, *_ = node.ranks()
    for count in (1, 2, 3):
        one.write(draft(count))
        other.write(draft(count))
    child = Child(commit_and, passed_on(node, 0), 0, 4, signal.SIGKILL, said)
    assert child.result() is None
    assert heard.poll(60)
    assert is_it(node.rank(0).newest_intact(), 3)
    assert is_it(other.newest_intact(), 3)
    other.write(draft(4))
    assert is_it(other.newest_intact(), 4)
    assert is_it(node.rank(0).newest_intact(), 3)
    assert node.memory() <= 2.02 * size_of(4)


def test_a_rank_that_is_stopped_in_its_copy_does_not_keep_others_from_theirs(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot_memfds, "COPY_PATIENCE", 0.05)
    monkeypatch.setattr(snapshot_store, "COPY_PATIENCE", 0.05)
    monkeypatch.setattr(snapshot_store, "_TIMES", 0)
    heard, said = Pipe(duplex=False)
    one, other, *_ = node.ranks()
    for count in (1, 2, 3):
        one.write(draft(count))
        other.write(draft(count))
    child = Child(commit_and, passed_on(node, 0), 0, 4, signal.SIGSTOP, said)
    assert heard.poll(60)
    assert child.process.pid
    for count in (4, 5):
        other.write(draft(count))
        assert is_it(other.newest_intact(), count)
    assert "takes memory of its own" in caplog.text
    os.kill(child.process.pid, signal.SIGCONT)
    assert child.result() is True
    assert is_it(other.newest_intact(), 5)
    assert is_it(node.rank(0).newest_intact(), 4)


def receive(fds: list[Any], rank: int, said: Any, asked: Any) -> bool:
    held = opened([fd.detach() for fd in fds], rank)
    with held.receiving(size_of(3)) as target:
        said.send("")
        asked.poll(60)
        return target in held.own


def test_who_receives_into_memory_of_its_own_keeps_nobody_from_the_node_s(node: Node) -> None:
    heard, said = Pipe(duplex=False)
    asked, ask = Pipe(duplex=False)
    one, other, *_ = node.ranks()
    one.write(draft(1))
    other.write(draft(2))
    child = Child(receive, passed_on(node, 2), 2, said, asked)
    assert heard.poll(60)
    for memfd in one.shared:
        with memfd.locked() as locked:
            assert locked
    ask.send("")
    assert child.result() is True


def grow(fds: list[Any], rank: int, said: Any, asked: Any) -> bool:
    held = opened([fd.detach() for fd in fds], rank)
    with held.growing() as locked:
        said.send("")
        asked.poll(60)
    return locked is True


def test_t16_one_rank_at_a_time_asks_for_memory_and_takes_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all of them find the same memory free."""
    (heard, said), (asked, ask) = Pipe(duplex=False), Pipe(duplex=False)
    rank, checked = node.rank(1), threading.Event()
    monkeypatch.setattr(snapshot_store, "check_memory", lambda *_: checked.set())
    child = Child(grow, passed_on(node, 0), 0, said, asked)
    assert heard.poll(60)
    writer = threading.Thread(target=rank.write, args=(draft(1),))
    writer.start()
    assert not checked.wait(0.5)
    ask.send("")
    assert child.result() is True
    writer.join()
    assert checked.is_set()
    assert is_it(rank.newest_intact(), 1)


def commit_alike(fds: list[Any], rank: int, last: int) -> Any:
    held = opened([fd.detach() for fd in fds], rank)
    for count in range(1, last + 1):
        held.write(draft(count))
        if not is_it(held.newest_intact(), count):
            return count
    return "all"


def test_ranks_that_commit_at_the_same_time(node: Node) -> None:
    children = [Child(commit_alike, passed_on(node, rank), rank, 20) for rank in range(4)]
    assert [child.result() for child in children] == ["all"] * 4
    assert all(is_it(rank.newest_intact(), 20) for rank in node.ranks())


FROZEN = 2 << 20  # words of four bytes: some whole chunks


class Ranks:
    """Commit one after the other."""

    def __init__(self, node: Node) -> None:
        self.all = node.ranks()
        self.weights = [torch.ones(FROZEN) for _ in self.all]
        self.count = 0

    def commit(self) -> None:
        self.count += 1
        for rank, held in enumerate(self.all):
            held.write(self._draft(rank))

    def _draft(self, rank: int) -> Draft:
        trained = torch.full((1000,), self.count)
        tensors = {"frozen": self.weights[rank], "trained": trained}
        return Draft(Version(0, self.count, 1), {}, tensors, at_once)

    def kept(self, rank: int) -> bool:
        """Whether its newest snapshot is what it has."""
        newest = self.all[rank].newest_intact()
        assert newest is not None
        assert newest.header.version.counter == self.count
        return bool(torch.equal(newest.load()[1]["frozen"][0], self.weights[rank]))


@pytest.mark.parametrize(
    ("who", "files"),  # who differs has memory of its own
    [([0], 8), ([2], 4), ([0, 1, 2, 3], 2)],
    ids=["first", "another", "all"],
)
def test_g9_what_changes_past_the_counter_is_seen_in_each_rank(
    node: Node, who: list[int], files: int
) -> None:
    ranks = Ranks(node)
    for _ in range(8):
        ranks.commit()
    for _ in range(3):
        for rank in who:
            ranks.weights[rank].data.add_(1)
        ranks.commit()
        assert all(map(ranks.kept, range(4)))
    assert (files - 1) * 4 * FROZEN < node.memory() < (files + 0.1) * 4 * FROZEN


def enter(path: str, rank: int, size: int) -> None:
    """This process is a worker of the agent at that path from now on."""
    os.environ |= {
        "ELASTIC_ETCD_SOCKET": path,
        "ELASTIC_ETCD_GENERATION": "0",
        "LOCAL_RANK": str(rank % size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": str(rank // size),
    }
    elastic_etcd.train.agent_channel._channel = None
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined] # as a worker
    Snapshots._opened = 0
    Snapshots._kept.clear()
    Snapshots._closed.clear()  # or the new agent would drop a name that another rank just opened


def memory_of(state: ElasticState, *, first: bool) -> int:
    """What this rank's snapshots take; those that the node shares with its first one."""
    own, shared = state._snapshots.own, state._snapshots.shared
    assert shared
    files = [*own, *(shared if first else [])]
    return sum(max(0, os.fstat(each.fd).st_blocks * 512 - HEADER) for each in files)


def on_two_nodes(rank: int, paths: list[str]) -> Any:
    """Then the ranks of the second node are those of another one, which has nothing."""
    enter(paths[rank // 2], rank, 2)
    received: list[int] = []
    real = dist.recv

    def recv(tensor: torch.Tensor, *args: Any) -> Any:
        received.append(tensor.numel())
        time.sleep(0.3)  # a slow network: the others of this node wait for it
        return real(tensor, *args)

    dist.recv = recv
    state = ElasticState(data=torch.full((WORDS,), rank), epoch=0)
    stages = []

    def synced() -> None:
        received.clear()
        state.sync()
        memory = memory_of(state, first=rank % 2 == 0)
        stages.append((int(state.data.sum()), state.epoch, sum(received) > WORDS, memory))

    synced()
    for state.epoch in (1, 2, 3):
        state.commit()
        dist.barrier()  # as a step of training
    if rank > 1:
        del state
        gc.collect()
        enter(paths[2], rank, 2)
        state = ElasticState(data=torch.full((WORDS,), rank), epoch=0)
    synced()
    for state.epoch in (4, 5):
        state.data += state.epoch
        state.commit()
        dist.barrier()
    state.data += 1
    state.restore()
    synced()
    return stages


def test_one_rank_of_a_node_gets_it_and_the_others_take_it(tmp_path: Path) -> None:
    with Job() as one, Job() as other, Job() as third:
        found = ranks(4, tmp_path, on_two_nodes, [each.name for each in (one, other, third)])
    first, second, last = zip(*found, strict=True)
    assert [stage[:2] for stage in first] == [(0, 0)] * 4
    assert [stage[:2] for stage in second] == [(0, 3)] * 4
    assert [stage[:2] for stage in last] == [(9 * WORDS, 5)] * 4
    assert [stage[2] for stage in first] == [False, False, True, False]
    assert [stage[2] for stage in second] == [False, False, True, False]
    assert [stage[2] for stage in last] == [False] * 4
    size = 8 * WORDS
    for node_s in (last[:2], last[2:]):
        assert sum(stage[3] for stage in node_s) <= 2.05 * size
