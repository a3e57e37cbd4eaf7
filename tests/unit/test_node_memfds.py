"""One snapshot per node: each rank gets what it has committed, whoever's memory that is in."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import elastic_etcd.train.agent_channel
from elastic_etcd.system.limits import Free
from elastic_etcd.train.state import snapshot_memfds, snapshot_store
from elastic_etcd.train.state.elastic_state import ElasticState
from elastic_etcd.train.state.snapshot_bytes import TensorSlice
from elastic_etcd.train.state.snapshot_format import Draft, Version
from elastic_etcd.train.state.snapshot_memfds import HEADER, StateSnapshot
from elastic_etcd.train.state.snapshot_store import Snapshots
from tests.support.channels import Job
from tests.support.forked import Child, ranks
from tests.support.states import Node, Partner, at_once, newest, opened, received

WORDS = 300_000


@pytest.fixture
def node() -> Node:
    return Node(4)


def values(count: int, variant: int = 0) -> torch.Tensor:
    """Of one commit; another variant has the same words in another order."""
    made = torch.arange(WORDS + 1000 * count)
    made[0] = count
    made[[3, 5]] = made[[5, 3]] if variant == 1 else made[[3, 5]]
    made[-1] += variant // 2
    return made


def draft(count: int, variant: int = 0, batched: Any = at_once) -> Draft:
    return Draft(Version(0, count, 1), {}, {"a": values(count, variant)}, batched)


def is_it(snapshot: StateSnapshot | None, count: int, variant: int = 0) -> bool:
    if snapshot is None or snapshot.header.version != Version(0, count, 1):
        return False
    _, tensors = snapshot.load()
    return bool(torch.equal(tensors["a"][0], values(count, variant)))


def size_of(count: int) -> int:
    return draft(count).size


class Stopped(Exception):
    """In the middle of a copy."""


def stopping(pieces: Iterator[TensorSlice]) -> Iterator[list[TensorSlice]]:
    for start, piece in islice(pieces, 1):
        yield [(start, piece[: len(piece) // 2])]
    raise Stopped


class Story:
    """What the ranks of a node do one after the other; each has what it has committed."""

    def __init__(self, ranks: int) -> None:
        self.node = Node(ranks)
        self.ranks = self.node.ranks()
        self.kept: list[list[tuple[int, int]]] = [[] for _ in self.ranks]  # number, variant
        self.unaware: set[int] = set()  # ranks whose last commit another has damaged

    def tell(self, what: str, number: int) -> None:
        rank, kept = self.ranks[number], self.kept[number]
        count = kept[-1][0] if kept else 0
        match what:
            case "commit" | "swap" | "alter":
                variant = {"commit": 0, "swap": 1, "alter": 2 + 2 * number}[what]
                rank.write(draft(count + 1, variant))
                kept.append((count + 1, variant))
                self.unaware.discard(number)
            case "stop":  # in the middle of a commit
                with pytest.raises(Stopped):
                    rank.write(draft(count + 1, batched=stopping))
            case "begin":  # a new process in its place
                self.ranks[number] = self.node.rank(number)
            case "take":  # the snapshot of the rank before
                other = self.ranks[number - 1].newest()
                if other and other.header.version.counter > count and rank.take(other.header):
                    kept.append(self.kept[number - 1][-1])
            case "take again":
                assert rank.take(newest(rank).header) is not None
            case "damage":
                newest(rank).body[0] ^= 1
                sharing = [n for n, each in enumerate(self.kept) if each[-1:] == kept[-1:]]
                self.unaware |= {*sharing} - {number}
                kept.pop()
            case "next world":
                rank.begin_anew()
            case "is gone":  # with a world of fewer ranks
                self.unaware.add(number)

    def check(self) -> None:
        for number, (rank, kept) in enumerate(zip(self.ranks, self.kept, strict=True)):
            if number not in self.unaware:
                found = rank.newest_intact()
                assert is_it(found, *kept[-1]) if kept else found is None

    def takes(self, snapshots: int) -> bool:
        size = size_of(max(kept[-1][0] for kept in self.kept if kept))
        return (snapshots - 0.1) * size < self.node.memory() <= (snapshots + 0.02) * size


STORIES: dict[str, tuple[str, int | None]] = {  # and how many snapshots the memory then holds
    "ranks with the same values have one": ("commit 0123 " * 5 + "begin 0123", 2),
    "words that changed places have memory of their own": ("commit 01 swap 2 commit 3 " * 3, 4),
    "so has a word that differs": ("commit 01 alter 2 commit 3 " * 3 + "begin 0123", 4),
    "it is given back when all are alike again": (
        "commit 01 alter 2 commit 3 " * 3 + "next-world 0123 " + "commit 0123 " * 2,
        2,
    ),
    "who is ahead clears nothing that others need": ("commit 1 commit 0000 commit 1", None),
    "an older one that a rank goes back to is cleared by nobody": (
        "commit 01 commit 01 damage 0 commit 11",
        None,
    ),
    "a rank that comes later takes what others have": (
        "commit 0 take 1 commit 00 take-again 1",
        None,
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_each_rank_has_what_it_committed(name: str) -> None:
    told, snapshots = STORIES[name]
    story, words = Story(4), told.split()
    for what, numbers in zip(words[::2], words[1::2], strict=True):
        for number in numbers:
            story.tell(what.replace("-", " "), int(number))
            story.check()
    assert snapshots is None or story.takes(snapshots)


def test_fewer_ranks_need_no_more_than_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(4)
    for number in range(4):
        story.tell("commit", number)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for _ in range(3):
        for number in (0, 1):
            story.tell("commit", number)
    assert is_it(story.ranks[0].newest_intact(), 4)
    assert story.takes(2)


OPERATIONS = st.sampled_from(
    ("commit", "commit", "commit", "swap", "alter", "stop", "begin", "take")
)


@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 2)), max_size=25))
def test_each_rank_has_what_it_committed_whatever_happens(operations: list[Any]) -> None:
    story = Story(3)
    for what, number in operations:
        story.tell(what, number)
        story.check()


def test_what_is_not_whole_is_offered_to_nobody(node: Node) -> None:
    rank = node.rank(0)
    for count in (1, 2):
        rank.write(draft(count))
    damaged = newest(rank)
    damaged.body[0] ^= 1
    assert rank.inventory(trusted=True).newest == damaged.header
    found = rank.inventory(trusted=False).newest
    assert found
    assert found.version == Version(0, 1, 1)


def test_what_is_damaged_is_taken_by_nobody(node: Node) -> None:
    first, late, *_ = node.ranks()
    first.write(draft(1))
    damaged = newest(first)
    damaged.body[9] ^= 1
    assert late.take(damaged.header) is None
    assert late.newest() is None


def test_what_is_received_is_the_node_s(node: Node) -> None:
    first, late, *_ = node.ranks()
    source = Node(1)
    (other,) = source.ranks()
    other.write(draft(1))
    sent = newest(other)
    with first.receiving(sent.header.size) as target:
        target.body(sent.header.size).copy_(sent.body)
        target.set(sent.header)
    assert is_it(first.newest_intact(), 1)
    assert is_it(late.take(sent.header), 1)
    assert node.memory() <= 1.02 * size_of(1)


def test_only_what_grows_is_asked_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = node.ranks()
    monkeypatch.setattr(snapshot_store, "free_memory", lambda: Free(2 * size_of(9), "nothing more"))
    ranks[0].write(draft(9))
    monkeypatch.setattr(snapshot_store, "free_memory", lambda: Free(size_of(9), "nothing more"))
    for count in (9, 10):
        for rank in ranks[count == 9 :]:
            rank.write(Draft(Version(0, count, 1), {}, {"a": values(9)}, at_once))
    monkeypatch.setattr(snapshot_store, "free_memory", lambda: Free(0, "nothing more"))
    for rank in ranks:
        rank.write(Draft(Version(0, 11, 1), {}, {"a": values(9)}, at_once))


def commit_and(fds: list[Any], sign: int, parent: Any) -> Any:
    """Commit, as rank 0, and have a signal in the middle of the copy."""

    def signalled(pieces: Iterator[TensorSlice]) -> Iterator[list[TensorSlice]]:
        pieces = iter(list(pieces))
        yield [next(pieces)]
        parent.send("copying")
        os.kill(os.getpid(), sign)
        yield list(pieces)

    held = opened(fds)
    held.write(draft(4, batched=signalled))
    return is_it(held.newest_intact(), 4)


def signalled_in_its_copy(node: Node, sign: int) -> tuple[Snapshots, Partner]:
    """Another rank of the node, after three commits of both, and the one that has a signal."""
    one, other, *_ = node.ranks()
    for count in (1, 2, 3):
        one.write(draft(count))
        other.write(draft(count))
    child = Partner(commit_and, node.passed_on(), sign)
    child.wait()
    return other, child


def test_a_rank_that_is_killed_in_its_copy_leaves_nothing_that_is_taken_for_whole(
    node: Node,
) -> None:
    other, child = signalled_in_its_copy(node, signal.SIGKILL)
    assert child.result() is None
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
    other, child = signalled_in_its_copy(node, signal.SIGSTOP)
    for count in (4, 5):
        other.write(draft(count))
        assert is_it(other.newest_intact(), count)
    assert "takes memory of its own" in caplog.text
    assert child.process.pid
    os.kill(child.process.pid, signal.SIGCONT)
    assert child.result() is True
    assert is_it(other.newest_intact(), 5)
    assert is_it(node.rank(0).newest_intact(), 4)


def receive(fds: list[Any], parent: Any) -> bool:
    held = opened(fds, 2)
    with held.receiving(size_of(3)) as target:
        parent.send("")
        parent.poll(60)
        return target in held.own


def test_who_receives_into_memory_of_its_own_keeps_nobody_from_the_node_s(node: Node) -> None:
    one, other, *_ = node.ranks()
    one.write(draft(1))
    other.write(draft(2))
    child = Partner(receive, node.passed_on(2))
    child.wait()
    for memfd in one.shared:
        with memfd.locked() as locked:
            assert locked
    child.here.send("")
    assert child.result() is True


def grow(fds: list[Any], parent: Any) -> bool:
    held = opened(fds)
    with held.growing() as locked:
        parent.send("")
        parent.poll(60)
    return locked is True


def test_t16_one_rank_at_a_time_asks_for_memory_and_takes_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all of them find the same memory free."""
    rank, checked = node.rank(1), threading.Event()
    monkeypatch.setattr(snapshot_store, "_check_memory", lambda *_: checked.set())
    child = Partner(grow, node.passed_on())
    child.wait()
    writer = threading.Thread(target=rank.write, args=(draft(1),))
    writer.start()
    assert not checked.wait(0.5)
    child.here.send("")
    assert child.result() is True
    writer.join()
    assert checked.is_set()
    assert is_it(rank.newest_intact(), 1)


def commit_alike(fds: list[Any], rank: int, last: int) -> Any:
    held = opened(fds, rank)
    for count in range(1, last + 1):
        held.write(draft(count))
        if not is_it(held.newest_intact(), count):
            return count
    return "all"


def test_ranks_that_commit_at_the_same_time(node: Node) -> None:
    children = [Child(commit_alike, node.passed_on(rank), rank, 20) for rank in range(4)]
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
        for held, weights in zip(self.all, self.weights, strict=True):
            tensors = {"frozen": weights, "trained": torch.full((1000,), self.count)}
            held.write(Draft(Version(0, self.count, 1), {}, tensors, at_once))

    def kept(self, rank: int) -> bool:
        """Whether its newest snapshot is what it has."""
        found = newest(self.all[rank])
        assert found.header.version.counter == self.count
        return bool(torch.equal(found.load()[1]["frozen"][0], self.weights[rank]))


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
    sizes = received(lambda: time.sleep(0.3))  # a slow network: the others of this node wait
    state = ElasticState(data=torch.full((WORDS,), rank), epoch=0)
    stages = []

    def synced() -> None:
        sizes.clear()
        state.sync()
        memory = memory_of(state, first=rank % 2 == 0)
        stages.append((int(state.data.sum()), state.epoch, sum(sizes) > WORDS, memory))

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
