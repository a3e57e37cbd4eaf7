"""Sharded values where processes are killed or stopped: at any place in a commit and a change.

Each process is a node, whose pieces and copies go with it. What the others have afterwards is the
last commit that counts, bit for bit and alike on all, or `first` where no copy is left.
"""

import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import elastic_etcd
from elastic_etcd.errors import PiecesLost
from elastic_etcd.train.process_group import ProcessGroup
from elastic_etcd.train.state.elastic_state import ElasticState
from elastic_etcd.train.sync_point import WorldBroken
from tests.support.forked import Child
from tests.support.sharded_worlds import builder, is_same, train, whole

NODES = 4  # with two copies those of node n are on node n + 2
PATIENCE = 120.0
TRAIN = str(Path(elastic_etcd.__file__).with_name("train"))
# Files with many calls in which nothing is sent or written.
NOT_COUNTED = ("encoding.py", "codecs.py", "dtensors.py", "pieces.py")


COMMIT = (
    "Memfd.clear",
    "_write_half",  # its own pieces are half written
    "PieceStore._keep_copies",
    "exchange",
    "exchange:3",  # some of the messages have come
    "StateSnapshot.is_intact",
    "ElasticState._write_snapshot",  # the copies are there, the replicated half is not
    "Snapshots._hold",
    "CommitInterval.committed",
)
CHANGE = (
    "gather_inventories",
    "spread",
    "PieceStore._pieces_of",
    "gather_json",
    "transfers",
    "exchange",
    "ElasticState._load_snapshot",
    "CommitInterval.begin",  # all is loaded
)
RESTORE = ("PieceStore.own", "ElasticState._load_snapshot")


class Case(NamedTuple):
    """At which stage nodes are ended, and where each of them is then.

    That is a function, with the number of the call if it is not the first; or a part of the stage,
    from 0 to 1.
    """

    stage: str  # "commit", "change" or "restore"
    victims: Mapping[int, str | float]
    by: signal.Signals = signal.SIGKILL

    @property
    def loses_pieces(self) -> bool:
        """Whether both nodes that have a piece are gone."""
        return len(self.victims) > 1 and sum(self.victims) % 2 == 0


class Calls:
    """Counts what happens in the package, and ends this process at a given count."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.usual: dict[str, int] = {}  # at each stage

    @contextmanager
    def during(self, stage: str, case: Case | None, node: int) -> Iterator[None]:
        place = case.victims[node] if case else ""
        name, _, nth = place.partition(":") if isinstance(place, str) else ("", "", "1")
        last = -1
        if isinstance(place, float):
            last = 1 + int(place * self.usual.get(stage, 300))
        count, calls = 0, 0

        def look(frame: Any, event: str, _: object) -> None:
            nonlocal count, calls
            code = frame.f_code
            if not code.co_filename.startswith(TRAIN) or "<" in code.co_name:
                return
            count += not code.co_filename.endswith(NOT_COUNTED)
            calls += event == "call" and code.co_qualname == name
            if case and (count == last or calls == int(nth or 1)):
                self.end(f"{stage}: {event} in {code.co_qualname}", case.by)

        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(None)
            if case:  # where the other node's end was earlier, say
                self.end(f"{stage}: after all", case.by)
        self.usual[stage] = count

    def end(self, where: str, by: signal.Signals) -> None:
        with (self.folder / "places").open("a") as file:
            file.write(f"{where}\n")
        os.kill(os.getpid(), by)


@contextmanager
def world(
    generation: int, rank: int, size: int, port: int, lost: Path | None = None
) -> Iterator[None]:
    """A process group as ee.run has it; it is left by an error as one that is broken.

    lost: a file that is there when nodes are lost, in the place of an agent's word.
    """
    env = {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}", "GROUP_RANK": f"{rank}"}
    os.environ |= {"GROUP_RANK": f"{rank}", "ELASTIC_ETCD_GENERATION": f"{generation}"}
    group = ProcessGroup(generation, env)
    broken, ended = True, threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            if lost and lost.exists():
                group.interrupt("nodes are lost")

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        group.init("gloo", {})
        yield
        broken = False
        dist.barrier()
    finally:
        ended.set()
        thread.join()
        group.teardown(broken=broken)
        group.release()


def live(node: int, port: int, folder: Path, cases: Sequence[Case], begin: int) -> int:
    """A node's way through all cases from that one on, or to its end; how many worlds it saw."""
    seed = 3
    state = ElasticState(build=builder(seed), first=set_first, epoch=0)
    calls = Calls(folder)
    for number, case in enumerate(cases[begin:], begin):
        file = folder / f"{number}.pt"  # what may be found after the fault
        lost = folder / f"{number}.lost"
        with suppress(RuntimeError, WorldBroken), world(4 * number + 1, node, NODES, port, lost):
            own = case if node in case.victims else None
            with calls.during("change", own if case.stage == "change" else None, node):
                state.sync()
            possible = [torch.load(folder / "last.pt")] if number else []
            assert all(is_same(shown(state), each) for each in possible)
            train(state, node)
            with calls.during("commit", None, node):
                state.commit()
            found = [shown(state)]
            train(state, node)
            if case.stage == "commit":
                found.append(shown(state))
            if node == 0:
                torch.save(found, file)
            dist.barrier()
            with calls.during(case.stage, own if case.stage != "change" else None, node):
                if case.stage == "commit":
                    state.commit()
                elif case.stage == "restore":
                    state.restore()
            dist.barrier()
        state._end_world()
        if state._snapshots.version():
            state._rewind()
        go_on(state, node, 4 * number + 2, port, case, folder, file)
    return len(cases)


def go_on(
    state: ElasticState, node: int, generation: int, port: int, case: Case, folder: Path, file: Path
) -> None:
    """The world of those that are left: it is checked, and committed."""
    left = [each for each in range(NODES) if each not in case.victims]
    rank, size = left.index(node), len(left)
    if case.loses_pieces:
        with pytest.raises(PiecesLost), world(generation, rank, size, port):
            state.sync()
        state._end_world()
        generation += 1
    with world(generation, rank, size, port):
        state.sync()
        found = shown(state)
        if case.loses_pieces:
            assert state.epoch == FIRST
        elif case.stage == "change":
            if (folder / "last.pt").exists():
                assert is_same(found, torch.load(folder / "last.pt"))
        else:
            assert any(is_same(found, each) for each in torch.load(file))
        state.commit()
        if rank == 0:
            torch.save(found, folder / "last.pt")
    state._end_world()
    state._rewind()


FIRST = 1000


def set_first(state: ElasticState) -> None:
    state.epoch = FIRST


def shown(state: ElasticState) -> dict[str, torch.Tensor]:
    """All that the state has, alike on all ranks; each one's epoch is in it."""
    epochs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(epochs, state.epoch)
    return whole(state) | {"epochs": torch.tensor(sorted({*epochs}))}


def run(cases: Sequence[Case], folder: Path) -> list[str]:
    """Let all nodes go through the cases, with others in the places of those that were ended.

    The places at which they were.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    nodes = [Child(live, node, port, folder, cases, 0) for node in range(NODES)]
    with ExitStack() as stack:
        stack.callback(end_all, nodes)
        for number, case in enumerate(cases):
            for node in case.victims:
                if case.by == signal.SIGSTOP:
                    wait_stopped(nodes[node])
                    nodes[node].process.kill()  # as an agent does, or a lease that ends
                others = [each for n, each in enumerate(nodes) if n not in case.victims]
                wait_killed(nodes[node], others)
                nodes[node] = Child(live, node, port, folder, cases, number + 1)
            (folder / f"{number}.lost").touch()
        assert [node.result(PATIENCE) for node in nodes] == [len(cases)] * NODES
        stack.pop_all()
    del store
    return (folder / "places").read_text().splitlines()


def wait_killed(node: Child, others: Sequence[Child]) -> None:
    ready = wait([each.results for each in (node, *others)], PATIENCE)
    if ready != [node.results]:  # another one has failed, and then all do
        said: list[Any] = []
        for each in others:
            with suppress(EOFError):
                said += each.results.recv() if each.results.poll(PATIENCE) else ["it hangs"]
        pytest.fail("\n".join(map(str, said)))
    assert node.result(0) is None


def end_all(nodes: Sequence[Child]) -> None:
    for node in nodes:
        with suppress(ValueError):  # it has ended
            node.end()


def wait_stopped(node: Child) -> None:
    deadline = time.monotonic() + PATIENCE
    stat = Path(f"/proc/{node.process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def drawn(seed: int, count: int) -> list[Case]:
    draws = random.Random(seed)
    found = []
    for _ in range(count):
        stage = draws.choice(["commit", "commit", "change", "restore"])
        number = draws.choice([1, 1, 1, 2]) if stage == "commit" else 1
        victims = {node: draws.random() for node in draws.sample(range(NODES), number)}
        by = draws.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        found.append(Case(stage, victims, by if number == 1 else signal.SIGKILL))
    return found


def at(stage: str, places: Sequence[str], node: int) -> list[Case]:
    """Each of the places, on one node after the other."""
    return [Case(stage, {(node + n) % NODES: place}) for n, place in enumerate(places)]


def check(cases: Sequence[Case], folder: Path) -> None:
    """All nodes ended where they were to."""
    wanted = [str(place).partition(":")[0] for case in cases for place in case.victims.values()]
    assert [line.rpartition(" ")[2] for line in run(cases, folder)] == wanted


def test_a_node_is_lost_in_a_commit_or_a_change(tmp_path: Path) -> None:
    check(
        [
            Case("commit", {0: "exchange:3"}),
            Case("change", {2: "PieceStore._pieces_of"}),
            Case("commit", {1: "ElasticState._write_snapshot"}, signal.SIGSTOP),
            Case("change", {3: "exchange"}),
        ],
        tmp_path,
    )


def test_two_nodes_are_lost_at_once(tmp_path: Path) -> None:
    run([Case("commit", {1: 0.3, 2: 0.7}), Case("commit", {1: 0.6, 3: 0.9})], tmp_path)


@pytest.mark.nightly(part="sharded")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("node", range(NODES))
def test_any_node_is_lost_at_each_stage(tmp_path: Path, node: int) -> None:
    stages = {"commit": COMMIT, "change": CHANGE, "restore": RESTORE}
    check([case for stage, places in stages.items() for case in at(stage, places, node)], tmp_path)


@pytest.mark.nightly(part="sharded")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_a_node_is_lost_at_any_of_many_places(tmp_path: Path, seed: int) -> None:
    print(*run(drawn(seed, 50), tmp_path), sep="\n")
