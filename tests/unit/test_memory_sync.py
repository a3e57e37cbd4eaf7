"""The newest checkpoint among nodes: all get it, whatever is damaged, lost or hostile."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from shutil import rmtree

import pytest
import torch.distributed as dist
from msgspec import json
from msgspec.structs import replace

from elastic_etcd.errors import MalformedState, UsageError
from elastic_etcd.train.checkpoint import latest_checkpoint as memory_sync
from elastic_etcd.train.checkpoint.checkpoint_folder import (
    MANIFEST,
    Checkpoint,
    describe,
    found_in,
    give_name,
    manifest_in,
)
from elastic_etcd.train.checkpoint.latest_checkpoint import (
    Node,
    Offer,
    Sender,
    latest_checkpoint,
    pull,
)
from elastic_etcd.train.checkpoint.memory_checkpoint import memory_checkpoint
from tests.support.disks import small_disk

LONG = 30.0  # seconds
COPIED = ".copied"
NEW, OLD = Checkpoint(120, 3), Checkpoint(110, 3)


def make(root: Path, checkpoint: Checkpoint, text: str = "weights") -> Path:
    folder = root / ".made"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "state.pt").write_text(text * 100)
    (folder / "empty").touch()
    return give_name(folder, describe(folder, checkpoint), root)


def spoil(path: Path) -> None:
    (path / "model" / "state.pt").write_text("Weights" * 100)


class Nodes:
    """Several nodes' memories, and their first workers as threads."""

    def __init__(self, folder: Path, size: int) -> None:
        self.memories = [folder / f"n{rank}" for rank in range(size)]
        for path in self.memories:
            path.mkdir()
        self.disk = folder / "disk"
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._generation = 0

    def env(self, rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "GROUP_RANK": str(rank),
            "GROUP_WORLD_SIZE": str(len(self.memories)),
            "ELASTIC_ETCD_GENERATION": str(self._generation),
        }

    def made(self, ranks: Sequence[int]) -> list[Node]:
        """As processes of their own, each of which calls for the first time."""
        self._generation += 1
        made = []
        for rank in ranks:
            memory_sync._calls.clear()
            node = Node(self.memories[rank], self.disk, self.env(rank))
            node._store = dist.PrefixStore(str(self._generation), node._store)
            made.append(node)
        return made

    def agree(self) -> list[Path | BaseException | None]:
        """What each node gets, or what it raises."""
        nodes = self.made(range(len(self.memories)))
        with ThreadPoolExecutor(len(nodes)) as threads:
            answers = [threads.submit(node.agree) for node in nodes]
            errors = [answer.exception(LONG) for answer in answers]
            return [e or a.result() for a, e in zip(answers, errors, strict=True)]

    def all_have(self, checkpoint: Checkpoint, text: str = "weights") -> None:
        """All agree on it, and have nothing else."""
        paths = [memory / checkpoint.name for memory in self.memories]
        assert self.agree() == paths
        for memory, path in zip(self.memories, paths, strict=True):
            assert [child.name for child in memory.iterdir()] == [checkpoint.name]
            assert (path / "model" / "state.pt").read_text() == text * 100
            assert (path / "empty").read_text() == ""


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path, 3)


def test_no_node_has_any(nodes: Nodes) -> None:
    assert nodes.agree() == [None] * 3


@pytest.mark.parametrize("holder", [0, 2])
def test_all_get_the_newest(nodes: Nodes, holder: int, caplog: pytest.LogCaptureFixture) -> None:
    for memory in nodes.memories[:2]:
        make(memory, OLD, "older")
    make(nodes.memories[holder], NEW)
    nodes.all_have(NEW)
    assert "goes on from step 120, of generation 3: 1 of 3 nodes had that" in caplog.text
    assert "copying a checkpoint" not in caplog.text  # that is for those that take long
    nodes.all_have(NEW)


def test_as_many_steps_of_a_later_world_are_newer(nodes: Nodes) -> None:
    make(nodes.memories[0], Checkpoint(120, 2), "older")
    make(nodes.memories[1], NEW)
    nodes.all_have(NEW)


def test_of_many_on_a_disk_the_newest_count(nodes: Nodes) -> None:
    nodes.disk.mkdir()
    for step in range(memory_sync._MOST_TRIED + 2):
        make(nodes.disk, Checkpoint(step, 3), "older")
    make(nodes.disk, NEW)
    assert nodes.agree() == [nodes.disk / NEW.name] * 3


def test_a_damaged_one_is_copied_from_who_has_it_whole(nodes: Nodes) -> None:
    for memory in nodes.memories:
        make(memory, NEW)
    for memory in nodes.memories[1:]:
        spoil(memory / NEW.name)
    nodes.all_have(NEW)


def test_where_all_are_damaged_it_is_the_next_newest(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    make(nodes.memories[1], OLD)
    spoil(make(nodes.memories[0], NEW))
    spoil(make(nodes.memories[2], NEW))
    nodes.all_have(OLD)
    assert "state.pt is damaged" in caplog.text
    assert "step-120-3 can't be copied from group rank 0" in caplog.text


def test_nobody_begins_anew_where_none_is_whole(nodes: Nodes) -> None:
    spoil(make(nodes.memories[0], NEW))
    for error in nodes.agree():
        assert isinstance(error, MalformedState)
        assert "no checkpoint could be had whole (step-120-3)" in str(error)


def test_a_disk_may_have_the_newest(nodes: Nodes) -> None:
    """One that all nodes see, and beside it what a killed worker has left there."""
    make(nodes.disk, NEW)
    make(nodes.memories[1], OLD)
    (nodes.disk / ".step-130-3.01234567").mkdir()
    (nodes.disk / ".git").mkdir()
    assert nodes.agree() == [nodes.disk / NEW.name] * 3
    assert sorted(path.name for path in nodes.disk.iterdir()) == [".git", NEW.name]


def test_a_disk_is_seen_by_one_node_only(nodes: Nodes, tmp_path: Path) -> None:
    make(tmp_path / "own", NEW)
    made = nodes.made(range(3))
    made[1]._disk = tmp_path / "own"
    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(node.agree) for node in made]
    own, *others = (answers[rank].result() for rank in (1, 0, 2))
    assert own == tmp_path / "own" / NEW.name
    assert others == [nodes.memories[rank] / NEW.name for rank in (0, 2)]


def test_the_other_workers_of_a_node_are_told(nodes: Nodes) -> None:
    made = nodes.made([0, 0])
    with ThreadPoolExecutor(1) as threads:
        for path in (nodes.memories[0] / NEW.name, None):
            answer = threads.submit(made[1].path_from_first)
            made[0].publish_path(path)
            assert answer.result(LONG) == path
            for node in made:
                node._store = dist.PrefixStore("again", node._store)


def test_who_does_not_call_is_named(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_sync, "_LOG_EVERY", 0.05)
    (first,) = nodes.made([0])
    with pytest.raises(UsageError, match=r"0\.1 s for group rank 1: it has to be called on every"):
        first._wait("offer/1", "group rank 1", 0.1)
    assert "ee.latest_checkpoint still waits for group rank 1" in caplog.text


def test_a_store_that_does_not_answer_is_given_up_in_time(nodes: Nodes) -> None:
    (node,) = nodes.made([0])
    assert node._store.timeout == timedelta(seconds=memory_sync.PATIENCE)


def test_no_room_for_the_newest_is_an_error_with_the_figures(nodes: Nodes) -> None:
    make(nodes.memories[0], NEW, "x" * 3000)
    from_there = "step-120-3, from 127.0.0.1, takes 0.29 MiB"
    with (
        small_disk(nodes.memories[1]),
        Sender("127.0.0.1", found_in(nodes.memories[0])) as sender,
        pytest.raises(UsageError, match=from_there),
    ):
        pull(sender.offer, NEW, nodes.memories[1] / COPIED)


# --- checkpoints that are spread over nodes ---


def make_parts(nodes: Nodes, copies: int = 2) -> None:
    """Each node has a file of its own, and those of the nodes before it."""
    names = [f"__{rank}.distcp" for rank in range(len(nodes.memories))]
    whole = []
    for rank, memory in enumerate(nodes.memories):
        folder = memory / ".made"
        folder.mkdir()
        for name in {names[rank - back] for back in range(copies)}:
            (folder / name).write_text(name * 100)
        described = describe(folder, NEW)
        whole += [file for file in described.files if file.name == names[rank]]
        made = replace(described, whole=whole)
        if rank == len(names) - 1:
            for other in nodes.memories[:-1]:
                path = other / NEW.name
                (path / MANIFEST).write_bytes(
                    json.encode(replace(manifest_in(path, NEW), whole=whole))
                )
        give_name(folder, made, memory)


def all_have_parts(nodes: Nodes) -> bool:
    paths = [memory / NEW.name for memory in nodes.memories]
    agreed = nodes.agree()
    if agreed != paths:
        assert all(isinstance(each, MalformedState) for each in agreed), agreed
        return False
    for path in paths:
        files = {file.name: file.read_text() for file in path.glob("__*")}
        assert files == {name: name * 100 for name in ("__0.distcp", "__1.distcp", "__2.distcp")}
        assert not manifest_in(path, NEW).is_part
    return True


@pytest.mark.parametrize("lost", [None, 0, 1, 2])
def test_each_node_gets_the_files_of_all(nodes: Nodes, lost: int | None) -> None:
    make_parts(nodes)
    if lost is not None:
        rmtree(nodes.memories[lost] / NEW.name)
    assert all_have_parts(nodes)
    assert all_have_parts(nodes)


def test_two_lost_nodes_of_three_leave_no_whole_checkpoint(nodes: Nodes) -> None:
    make_parts(nodes)
    for memory in nodes.memories[:2]:
        rmtree(memory / NEW.name)
    assert not all_have_parts(nodes)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("back", range(2))
def test_a_copy_counts_where_a_file_is_damaged(nodes: Nodes, rank: int, back: int) -> None:
    make_parts(nodes)
    name = f"__{(rank - back) % 3}.distcp"
    (nodes.memories[rank] / NEW.name / name).write_text("x" * len(name) * 100)
    assert all_have_parts(nodes)


def test_a_file_that_is_damaged_everywhere_is_not_loaded(nodes: Nodes) -> None:
    make_parts(nodes)
    for rank in (1, 2):
        (nodes.memories[rank] / NEW.name / "__1.distcp").write_text("x")
    assert not all_have_parts(nodes)


# --- hostile peers, and such as go ---


@contextmanager
def peer(say: Callable[[socket.socket], None]) -> Iterator[Offer]:
    """Somebody who has made an offer, and says something of his own."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            caller, _ = server.accept()
            with caller:
                caller.recv(100)
                say(caller)
                with suppress(OSError):  # it has hung up
                    caller.shutdown(socket.SHUT_WR)
                    while caller.recv(100):  # else what was said is lost with what was not read
                        pass

        thread = threading.Thread(target=answer)
        thread.start()
        yield Offer("127.0.0.1", server.getsockname()[1], "00" * 16, [NEW])
        thread.join()


def manifest(name: str = "a", size: int = 3, crc: int = 891568578, step: int = 120) -> bytes:
    files = [{"name": name, "size": size, "crc": crc}]
    data = json.encode({"step": step, "generation": 3, "files": files})
    return struct.pack(">I", len(data)) + data


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", ConnectionResetError),
        (b"\0\0", ConnectionResetError),
        (struct.pack(">I", 1 << 25), MalformedState),
        (struct.pack(">I", 4) + b"null", MalformedState),
        (manifest(name="../../evil") + b"abc", MalformedState),
        (manifest(name="/tmp/evil") + b"abc", MalformedState),
        (manifest(step=121) + b"abc", MalformedState),
        (manifest(size=1 << 60), UsageError),
        (manifest(size=4) + b"abc", ConnectionResetError),
        (manifest() + b"abd", MalformedState),
    ],
)
def test_what_a_peer_may_say(tmp_path: Path, said: bytes, error: type[Exception]) -> None:
    memory = tmp_path / "memory"
    make(memory, OLD)
    with peer(lambda caller: caller.sendall(said)) as offer, pytest.raises(error):
        pull(offer, NEW, memory / COPIED)
    assert [*found_in(memory)] == [OLD], "what it had stays"
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]


def test_the_peer_of_these_tests_is_believed_when_it_is_right(tmp_path: Path) -> None:
    with peer(lambda caller: caller.sendall(manifest() + b"abc")) as offer:
        assert not pull(offer, NEW, tmp_path / COPIED).is_part
    assert (tmp_path / COPIED / "a").read_text() == "abc"


def test_two_files_of_one_name(tmp_path: Path) -> None:
    one = {"name": "a", "size": 0, "crc": 0}
    data = json.encode({"step": 120, "generation": 3, "files": [one, one]})
    said = struct.pack(">I", len(data)) + data
    with peer(lambda caller: caller.sendall(said)) as offer, pytest.raises(FileExistsError):
        pull(offer, NEW, tmp_path / COPIED)


def test_nothing_is_said_to_who_does_not_know_the_nonce(tmp_path: Path) -> None:
    make(tmp_path, NEW)
    with Sender("127.0.0.1", found_in(tmp_path)) as sender:
        for hello in (b"\0" * 32, memory_sync._HELLO.pack(b"\1" * 16, 120, 3)):
            with socket.create_connection((sender.offer.addr, sender.offer.port)) as sock:
                sock.sendall(hello)
                assert sock.recv(100) == b""
        nonce = bytes.fromhex(sender.offer.nonce)
        with socket.create_connection((sender.offer.addr, sender.offer.port)) as sock:
            sock.sendall(memory_sync._HELLO.pack(nonce, 121, 3))
            assert sock.recv(100) == b"", "what was not offered"
        assert pull(sender.offer, NEW, tmp_path / COPIED).step == NEW.step


@pytest.mark.parametrize(
    "change",
    [
        {"port": 0},
        {"nonce": "x"},
        {"held": [[-1, 0]]},
        {"held": [[1, 2, 3]]},
        {"held": [[1]]},
        {"held": [[0, 0]] * 9},
        {"addr": None},
    ],
)
def test_what_is_no_offer_is_refused(change: dict[str, object]) -> None:
    whole = {"addr": "10.0.0.1", "port": 1, "nonce": "00" * 16, "held": [[1, 2]]}
    assert memory_sync.read_offer(json.encode(whole)).held == [Checkpoint(1, 2)]
    with pytest.raises(MalformedState):
        memory_sync.read_offer(json.encode(whole | change))


def test_what_training_goes_on_from_is_not_due_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, 1)
    (memory,) = nodes.memories
    path = make(memory, NEW)
    env = nodes.env(0) | {"ELASTIC_ETCD_MEMORY": str(memory), "ELASTIC_ETCD_LOCAL_RANK": "0"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert latest_checkpoint() == path
    with memory_checkpoint(NEW.step) as folder:
        assert folder is None
    with memory_checkpoint(NEW.step + 1) as folder:
        assert folder


# --- without our launcher ---


def test_without_our_launcher_it_is_the_newest_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELASTIC_ETCD_MEMORY", raising=False)
    assert latest_checkpoint() is None
    assert latest_checkpoint(tmp_path) is None
    old, new = make(tmp_path, OLD), make(tmp_path, NEW)
    assert latest_checkpoint(tmp_path) == new
    spoil(new)
    assert latest_checkpoint(str(tmp_path)) == old
    spoil(old)
    with pytest.raises(MalformedState, match=r"had whole \(step-120-3, step-110-3\)"):
        latest_checkpoint(tmp_path)
