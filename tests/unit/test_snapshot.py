"""Snapshots in shared memory: whole or not there, also when their writer is killed anywhere."""

import os
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_etcd.errors import MalformedState, UsageError
from elastic_etcd.train.state.encoding import dumps, encode
from elastic_etcd.train.state.snapshot_bytes import (
    CHUNK,
    Staging,
    TensorSlice,
    digest_of,
    write_body,
)
from elastic_etcd.train.state.snapshot_format import Draft, Header, Version, pack, slices_of, unpack
from elastic_etcd.train.state.snapshot_memfds import HEADER
from elastic_etcd.train.state.snapshot_store import Snapshots
from elastic_etcd.train.state.sync import differences
from tests.support.forked import Child
from tests.support.states import Node, Partner, at_once, commits, newest, opened

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float8_e4m3fn),
]
ODD = [
    torch.arange(7, dtype=torch.uint8)[3:],  # at an address that no word begins at
    torch.arange(12.0).view(3, 4).t(),
    torch.arange(10)[::3],
    torch.tensor(3.5),
    torch.empty(0, 4),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.ones(3).expand(5, 3),
]


def memory() -> Snapshots:
    return Node(shares=False).rank()


def put(memfds: Snapshots, version: Version, tensors: list[torch.Tensor]) -> None:
    parts = {"all": encode(list(range(len(tensors))), {})}
    memfds.write(Draft(version, parts, named(tensors), at_once))


def named(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"all.{number}": tensor for number, tensor in enumerate(tensors)}


def got(memfds: Snapshots) -> list[torch.Tensor]:
    """The tensors of the newest one."""
    return [tensor for tensor, _ in newest(memfds).load()[1].values()]


def bits(tensor: torch.Tensor) -> list[int]:
    plain = tensor.resolve_conj().contiguous().view(-1)
    return list(plain.view(torch.uint8).tolist()) if plain.numel() else []


def test_tensors_of_every_kind_come_back_bit_by_bit() -> None:
    memfds = memory()
    tensors = [torch.randn(5, 3).mul(100).to(dtype) for dtype in DTYPES] + ODD
    put(memfds, Version(1, 1, 1), tensors)
    for tensor, back in zip(tensors, got(memfds), strict=True):
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert bits(back) == bits(tensor)


@given(st.lists(st.integers(0, 5000), max_size=12), st.sampled_from((256, 1024, 4096)))
def test_the_buffers_of_a_gpu_give_the_same_bytes_in_the_same_order(
    lengths: list[int], size: int
) -> None:
    tensors = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in lengths]
    objects, whole = pack({}, named(tensors))
    direct, staged = (torch.zeros(whole, dtype=torch.uint8) for _ in range(2))
    digest = write_body(direct, [list(slices_of(objects, tensors))])
    again = write_body(staged, Staging("cpu", size).through(slices_of(objects, tensors)))
    assert again == digest
    assert torch.equal(direct, staged)


def test_what_a_gpu_is_still_reading_is_not_given_back() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def temporaries() -> Iterator[TensorSlice]:
        for start in range(0, 64 * 5, 64):
            piece = torch.ones(64, dtype=torch.uint8)
            made.append(weakref.ref(piece.untyped_storage()))
            yield start, piece
            del piece

    for number, _ in enumerate(Staging("cpu", 64).through(temporaries())):
        in_flight = number + 1
        if in_flight < 5:
            assert made[in_flight]() is not None


def test_the_memory_is_given_back_with_the_snapshot() -> None:
    memfds = memory()
    put(memfds, Version(0, 1, 1), [torch.ones(10)])
    fds = [memfd.fd for memfd in memfds.own]
    del memfds
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_pieces_that_are_in_host_memory_need_no_buffer() -> None:
    staging = Staging("cuda", 256)
    tensors = [torch.ones(1000), torch.ones(3)]
    batches = list(staging.through(slices_of(b"x", tensors)))
    pieces = {start: piece for batch in batches for start, piece in batch}
    assert pieces[0].data_ptr() == tensors[0].data_ptr()
    assert pieces[0].nbytes == 4 * 256  # a batch of them may be larger
    assert sum(piece.nbytes for piece in pieces.values()) == 4032 + 64 + 64


def test_m10_no_thread_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The container may have all that it is allowed, and a commit needs no more than its time."""
    body = torch.randint(0, 255, (3 * CHUNK + 64,), dtype=torch.uint8)
    digest = digest_of(body)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    written = torch.empty_like(body)
    assert write_body(written, [[(0, body)]]) == digest_of(body) == digest
    assert torch.equal(written, body)


@pytest.mark.parametrize("size", [64, CHUNK - 64, CHUNK, CHUNK + 64, 2 * CHUNK + 192])
def test_the_digest_is_of_every_byte(size: int) -> None:
    body = torch.randint(0, 255, (size,), dtype=torch.uint8)
    digest = write_body(torch.empty_like(body), [[(0, body)]])
    assert digest_of(body) == digest
    for where in (0, size // 2, size - 1):
        body[where] ^= 16
        assert digest_of(body) != digest
        body[where] ^= 16
    assert digest_of(body) == digest


@pytest.mark.parametrize("size", [8, 1 << 10, 8 << 10, 32 << 10, 256 << 10, CHUNK])
def test_what_changes_places_is_found(size: int) -> None:
    """Words, rows of a matrix, pieces of 2 MiB."""
    body = torch.randint(0, 255, (2 * CHUNK,), dtype=torch.uint8)
    swapped = body.clone()
    swapped[:size], swapped[-size:] = body[-size:], body[:size]
    assert digest_of(swapped) != digest_of(body)
    if size < CHUNK:  # side by side
        swapped = body.clone()
        swapped[:size], swapped[size : 2 * size] = body[size : 2 * size], body[:size]
        assert digest_of(swapped) != digest_of(body)


PLAIN = [  # whose words differ in few bits, often only in their highest
    torch.eye,
    lambda n: torch.eye(n, dtype=torch.float64),
    lambda n: torch.ones(n, n).sub_(2 * torch.eye(n)),
    lambda n: torch.ones(n, n, dtype=torch.float64).sub_(2 * torch.eye(n)),
    lambda n: torch.arange(n).repeat(n, 1).t().contiguous(),
    lambda n: torch.eye(n, dtype=torch.bool),
    lambda n: -torch.eye(n, dtype=torch.int64),
]


@pytest.mark.parametrize("plain", PLAIN)
@given(st.data())
def test_rows_that_change_places_and_highest_bits_are_found(
    plain: Callable[[int], torch.Tensor], data: st.DataObject
) -> None:
    matrix = plain(data.draw(st.sampled_from((8, 64, 200))))
    rows = st.integers(0, len(matrix) - 1)
    one, other = data.draw(st.lists(rows, min_size=2, max_size=2, unique=True))
    swapped, altered = matrix.clone(), matrix.clone()
    swapped[[one, other]] = matrix[[other, one]]
    altered.view(-1).view(torch.int64).view(len(matrix), -1)[[one, other], 0] ^= -1 << 63
    digests = {digest_of(each.view(-1).view(torch.uint8)) for each in (matrix, swapped, altered)}
    assert len(digests) == 3


@given(st.integers(1, 9000), st.integers(0, 9000))
def test_zeros_at_the_end_are_found(words: int, more: int) -> None:
    body = torch.ones(words, dtype=torch.int64)
    longer = torch.cat((body, torch.zeros(more + 1, dtype=torch.int64)))
    assert digest_of(longer.view(torch.uint8)) != digest_of(body.view(torch.uint8))


@given(st.lists(st.integers(0, 400_000), min_size=1, max_size=4), st.sampled_from((18, 20, 22)))
def test_what_is_only_summed_has_the_digest_of_what_is_written(
    lengths: list[int], bits: int
) -> None:
    """However the batches are cut."""
    tensors = [torch.randint(0, 1 << 40, (length,)) for length in lengths]
    staged = Staging("cpu", 1 << bits).through
    draft = Draft(Version(0, 1, 1), {}, named(tensors), staged)
    body = torch.empty(draft.size, dtype=torch.uint8)
    header = draft.write(body)
    assert header == draft.header()
    assert header.digest == digest_of(body)
    _, there = unpack(bytes(body[header.objects_at :][: header.objects].tolist()), body)
    for tensor, (found, _) in zip(tensors, there.values(), strict=True):
        assert torch.equal(found, tensor)


def test_a_commit_leaves_the_one_before_and_may_grow() -> None:
    memfds = memory()
    assert memfds.newest() is memfds.newest_intact() is None
    for count in (1, 2, 3, 4):
        put(memfds, Version(0, count, 5), [torch.full((count * 100_000,), float(count))])
        assert memfds.version() == Version(0, count, 5)
        versions = [s.header.version.counter for m in memfds.own if (s := m.snapshot())]
        assert sorted(versions) == [count - 1, count][-len(versions) :]
        assert bool((got(memfds)[0] == count).all())


def test_newer_is_of_a_later_generation_then_of_more_commits() -> None:
    ages = [
        *(Version(9, 0, 1), Version(0, 1, 1), Version(0, 7, 1), Version(2, 5, 1)),
        *(Version(2, 6, 1), Version(3, 1, 1)),
    ]
    assert sorted(set(ages), key=Version.age) == ages


def test_a_damaged_snapshot_is_dropped_for_the_one_before() -> None:
    memfds = memory()
    for count in (1, 2):
        put(memfds, Version(0, count, 5), [torch.full((100,), float(count))])
    for left in (1, 0):
        damaged = newest(memfds)
        got(memfds)[0][50] = 0
        assert memfds.newest_intact() != damaged
        assert commits(memfds) == left
    assert memfds.newest_intact() is None


def test_a_forked_process_can_not_write() -> None:
    memfd = memory().own[0]
    memfd.pid += 1
    with pytest.raises(UsageError, match="forked"):
        memfd.clear(10)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_none(data: bytes) -> None:
    assert Header.unpack(data) is None
    packed = Header(Version(1, 2, 3), 10, 64, bytes(16)).pack()
    assert Header.unpack(packed + data) == Header(Version(1, 2, 3), 10, 64, bytes(16))
    for cut in range(len(packed)):
        assert Header.unpack(packed[:cut].ljust(HEADER, b"\0")) is None


TABLES = st.lists(
    st.tuples(
        st.sampled_from(("a", "b", 1)),
        st.sampled_from(("float32", "bool", "float", "os.system", 3)),
        st.one_of(
            st.lists(st.integers(-2, 1 << 70) | st.booleans(), max_size=3),
            st.text(max_size=2),
        ),
        st.booleans(),
    )
    | st.integers(),
    max_size=3,
)


@given(TABLES | st.none(), st.dictionaries(st.text(), st.integers()) | st.integers())
def test_any_table_of_tensors_is_read_or_malformed(table: Any, parts: Any) -> None:
    objects = dumps({"tensors": table, "parts": parts})
    try:
        found, tensors = unpack(objects, torch.zeros(4096, dtype=torch.uint8))
    except MalformedState:
        return
    assert found == parts
    assert len(tensors) == len(table)


def commit_until(fds: list[Any], count: int, last: int) -> None:
    """Commit `count` times, then once more, to be killed after `last` pieces of it."""
    memfds = opened(fds)
    for n in range(1, count + 1):
        put(memfds, Version(0, n, 1), numbered(n))

    def killed(pieces: Iterator[TensorSlice]) -> Iterator[list[TensorSlice]]:
        yield from ([piece] for piece in islice(pieces, last))
        os.kill(os.getpid(), signal.SIGKILL)

    memfds.write(Draft(Version(0, count + 1, 1), {}, named(numbered(count + 1)), killed))


def commit_for_ever(fds: list[Any], said: Any) -> None:
    memfds = opened(fds)
    for count in range(1, 1_000_000):
        put(memfds, Version(0, count, 1), numbered(count))
        said.send(count)


def numbered(count: int) -> list[torch.Tensor]:
    return [torch.full((n + 64 * count,), count) for n in (1_000_000, 1_000, 0, 70_001)]


def left_whole(node: Node) -> int:
    """Which commit the newest snapshot is, when its process is dead; all of it is that one's."""
    left = node.rank()
    counter = commits(left)
    assert all(one.is_intact() for memfd in left.own if (one := memfd.snapshot()))
    assert all(bool((tensor == counter).all()) for tensor in got(left))
    return counter


@pytest.mark.parametrize("last", range(6))
@pytest.mark.parametrize("count", [1, 4])
def test_killed_between_two_slices_of_a_commit_it_leaves_the_one_before(
    count: int, last: int
) -> None:
    node = Node(shares=False)
    assert Child(commit_until, node.passed_on(), count, last).result() is None
    assert left_whole(node) == count


def test_killed_at_any_moment_it_leaves_the_last_or_the_one_that_it_was_at() -> None:
    rng = random.Random(7)
    for _ in range(12):
        node, last = Node(shares=False), 0
        child = Partner(commit_for_ever, node.passed_on())
        for _ in range(rng.randint(1, 6)):
            child.wait()
            last = child.here.recv()
        for _ in range(rng.randint(0, 20000)):  # some microseconds, not a wait
            pass
        assert child.process.pid
        os.kill(child.process.pid, signal.SIGKILL)
        assert child.result() is None
        with suppress(EOFError):
            while True:
                last = child.here.recv()
        assert left_whole(node) in {last, last + 1}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
    ],
    ids=["shape", "dtype", "a bit"],
)
def test_tensors_differ_by_shape_dtype_or_a_bit(one: torch.Tensor, other: torch.Tensor) -> None:
    snapshots = []
    for tensor in (one, other):
        memfds = memory()
        put(memfds, Version(0, 1, 1), [torch.arange(4), tensor])
        snapshots.append(newest(memfds))
    first, second = snapshots
    assert differences(first, second) == ["all.1"]
    assert differences(first, first) == []
