"""A state's snapshot: its bytes, and two places for it in shared memory.

A snapshot is a header, each tensor's bytes, then the encoded objects. The same bytes lie in shared
memory and go to a peer; docs/state.md has the layout. A worker has two memory files (memfd), for
the last commit and the next, which live as long as its agent. The header is cleared before the body
is written and set after it: a process that is killed in between leaves the other one whole.
"""

import ctypes
import errno
import logging
import mmap
import os
import struct
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from math import prod
from typing import Any, NamedTuple

import torch

from elastic_etcd.errors import MalformedState, UsageError
from elastic_etcd.train.state.digest import (
    CHUNK,
    chunks_of,
    digest_of,
    digest_of_sums,
    sum_chunk,
    sum_of,
)
from elastic_etcd.train.state.encoding import DTYPES, dumps, loads
from elastic_etcd.train.state.free_memory import check_memory

HEADER = 4096  # one page, so that the body is aligned as memory is
_ALIGNED = 64
_FIELDS = struct.Struct("<8sQQqQQ16s")
_MAGIC = b"eestate3"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: all page faults at once, a third of their time

Piece = tuple[int, torch.Tensor]  # where in the body, and what: bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Version:
    """Which commit a snapshot is. `lineage` tells two runs apart that count alike."""

    generation: int
    counter: int
    lineage: int

    def age(self) -> tuple[bool, int, int]:
        """Larger is newer: a later generation's goes before more commits in one that ended.

        What no commit has made yet, the values that training began with, is older than any.
        """
        return self.counter > 0, self.generation, self.counter


@dataclass(frozen=True)
class Header:
    """What a body is, and its digest; `objects` and `size` in bytes."""

    version: Version
    objects: int
    size: int
    digest: bytes

    def pack(self) -> bytes:
        v = self.version
        packed = _FIELDS.pack(
            _MAGIC, v.generation, v.counter, v.lineage, self.objects, self.size, self.digest
        )
        return packed + zlib.crc32(packed).to_bytes(4, "little")

    @property
    def objects_at(self) -> int:
        """Where in the body the objects begin, in bytes."""
        return self.size - aligned(self.objects)

    @staticmethod
    def size_of(rows: Iterable["Row"], objects: bytes) -> int:
        """The size of a body that holds these."""
        return sum(aligned(row.size()) for row in rows) + aligned(len(objects))

    @classmethod
    def unpack(cls, data: bytes) -> "Header | None":
        """None for what `pack` has not written, or not to its end."""
        fields, crc = data[: _FIELDS.size], data[_FIELDS.size : _FIELDS.size + 4]
        if len(crc) < 4 or zlib.crc32(fields) != int.from_bytes(crc, "little"):
            return None
        magic, generation, counter, lineage, objects, size, digest = _FIELDS.unpack(fields)
        if magic != _MAGIC or objects > size or size % _ALIGNED:
            return None
        return cls(Version(generation, counter, lineage), objects, size, digest)


class Memfd:
    """One memory file: a header in its first page, then the body. It owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        self.pid = os.getpid()
        if os.fstat(fd).st_size < HEADER:
            os.ftruncate(fd, HEADER)
        self._map_memory(os.fstat(fd).st_size)

    def snapshot(self) -> "StateSnapshot | None":
        """What it holds; None while it holds nothing complete."""
        header = Header.unpack(self.memory[:HEADER])
        if header is None or header.size > self.room:
            return None
        return StateSnapshot(self, header)

    def body(self, size: int) -> torch.Tensor:
        """Its first `size` bytes: the memory itself, not a copy."""
        return self._bytes[HEADER : HEADER + size]

    @property
    def room(self) -> int:
        """Bytes of the largest body that it has memory for."""
        return len(self._bytes) - HEADER

    def clear(self, size: int = 0) -> torch.Tensor:
        """The body, of `size` bytes, to be written; what was there is gone. Raises OSError."""
        if os.getpid() != self.pid:
            raise UsageError("a state belongs to the worker, not to a process forked from it")
        if HEADER + size > len(self._bytes):
            os.ftruncate(self.fd, HEADER + size)
            self._map_memory(HEADER + size)
            self._populate_memory()
        self.memory[:HEADER] = bytes(HEADER)
        return self.body(size)

    def set(self, header: Header) -> "StateSnapshot":
        """Say that the body is written."""
        packed = header.pack()
        self.memory[: len(packed)] = packed
        return StateSnapshot(self, header)

    def release(self) -> None:
        """Give the memory back, and what it holds."""
        if self.room:
            self.clear()
            os.ftruncate(self.fd, HEADER)
            self._map_memory(HEADER)

    def _map_memory(self, length: int) -> None:
        self.memory = mmap.mmap(self.fd, length)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    def _populate_memory(self) -> None:
        """Have all of the memory now. Raises OSError when it is not to be had."""
        try:
            self.memory.madvise(_POPULATE_WRITE)
        except OSError as error:  # before Linux 5.14 the pages come one by one
            if error.errno != errno.EINVAL:
                raise


@dataclass(frozen=True)
class StateSnapshot:
    """A snapshot in memory, written to its end; good until its memfd is cleared."""

    memfd: Memfd
    header: Header

    @property
    def body(self) -> torch.Tensor:
        """All after the header: the memory itself, not a copy."""
        return self.memfd.body(self.header.size)

    @property
    def memory(self) -> memoryview:
        """The body, as bytes."""
        return memoryview(self.memfd.memory)[HEADER : HEADER + self.header.size]

    @property
    def objects(self) -> bytes:
        """What `pack` made."""
        start = HEADER + self.header.objects_at
        return self.memfd.memory[start : start + self.header.objects]

    def load(self) -> tuple[dict[str, Any], dict[str, tuple[torch.Tensor, bool]]]:
        """The parts, and the tensors as views of the memory, with whether they were on a GPU.

        Raises MalformedState.
        """
        return unpack(self.objects, self.body)

    def is_intact(self) -> bool:
        """Whether the body is what the header says; reads all of it."""
        return digest_of(self.body) == self.header.digest


class MemfdPair:
    """The two memory files of one worker's state, of which one holds the newest snapshot."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.memfds = [Memfd(fd) for fd in fds]

    @property
    def node(self) -> int:
        """The node whose ranks share snapshots; -1: none."""
        return -1

    def newest(self) -> StateSnapshot | None:
        """The newest that was written to its end, if any."""
        return max(self.snapshots(), key=lambda each: each.header.version.age(), default=None)

    def snapshots(self) -> list[StateSnapshot]:
        """Those that were written to their end."""
        return [snapshot for memfd in self.memfds if (snapshot := memfd.snapshot())]

    def newest_intact(self) -> StateSnapshot | None:
        """The newest whose body is what was written; one that is not is dropped, and logged."""
        while (newest := self.newest()) is not None and not newest.is_intact():
            _log.error("the snapshot %s is damaged: going back one", newest.header)
            self._let_go(newest.memfd)
        return newest

    def version(self) -> Version | None:
        """The newest's."""
        newest = self.newest()
        return newest.header.version if newest else None

    def older(self) -> Memfd:
        """The one to write to: any that does not hold the newest."""
        newest = self.newest()
        return next(memfd for memfd in self.memfds if not newest or memfd is not newest.memfd)

    def clear_older(self, size: int) -> torch.Tensor:
        """The body of the memory file to write to, cleared, with room for `size` bytes.

        Raises OSError, and UsageError when the machine has no memory for both files of this size.
        """
        older = self.older()
        if size > older.room:
            check_memory(size, sum(max(0, size - memfd.room) for memfd in self.memfds))
        return older.clear(size)

    def write(self, draft: "Draft") -> None:
        """Write a snapshot; the newest stays as it is until this one is whole."""
        draft.write(self.older(), self.clear_older)

    @contextmanager
    def receiving(self, size: int) -> Iterator[Memfd]:
        """A memory file with room for `size` bytes; the newest, once a snapshot is set in it."""
        memfd = self.older()
        self.clear_older(size)
        yield memfd
        if snapshot := memfd.snapshot():
            self.prefer(snapshot)

    def take(self, header: Header) -> StateSnapshot | None:  # noqa: ARG002 - there is no other here
        """The snapshot of this header, if another worker of this node has it."""
        return None

    def prefer(self, snapshot: StateSnapshot) -> None:
        """Make this the newest: what is as new, of another lineage, is dropped."""
        while (newest := self.newest()) is not None and newest.memfd is not snapshot.memfd:
            self._let_go(newest.memfd)

    def begin_anew(self) -> None:
        """All ranks have the same values now."""

    def _let_go(self, memfd: Memfd) -> None:
        """What it holds is no snapshot of ours any more."""
        memfd.clear()


@dataclass(frozen=True)
class Draft:
    """A snapshot to be written.

    `batched` is given the pieces and makes them batches, in host memory; what it raises is raised,
    and nothing is written then.
    """

    version: Version
    parts: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    batched: Callable[[Iterator[Piece]], Iterable[Sequence[Piece]]]

    @property
    def objects(self) -> bytes:
        """What is no tensor, encoded. Raises UsageError."""
        return self._packed[0]

    @property
    def size(self) -> int:
        """Of the body, in bytes."""
        return self._packed[1]

    def write(self, memfd: Memfd, clear: Callable[[int], torch.Tensor]) -> None:
        """Write it into the memory file, once that is cleared."""
        pieces = pieces_of(self.objects, self.tensors.values())
        digest = write_body(clear(self.size), self.batched(pieces))
        memfd.set(self.header(digest))

    def digest(self) -> bytes:
        """The digest of the body that it would have; nothing is written."""
        return digest_of_sums(sums_of(self.batched(pieces_of(self.objects, self.tensors.values()))))

    def header(self, digest: bytes) -> Header:
        """What is written beside a body of this digest."""
        return Header(self.version, len(self.objects), self.size, digest)

    @cached_property
    def _packed(self) -> tuple[bytes, int]:
        return pack(self.parts, self.tensors)


class Row(NamedTuple):
    """What the table of a snapshot says of one tensor."""

    name: str
    dtype: str
    shape: list[int]
    cuda: bool

    def size(self) -> int:
        """In bytes. Raises MalformedState."""
        lengths = self.shape if type(self.shape) is list else [None]
        if not all(type(length) is int and 0 <= length < 1 << 48 for length in lengths):
            raise MalformedState(f"{self.shape} is no shape")
        return prod(self.shape) * int(DTYPES[self.dtype].itemsize)


def pack(parts: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, int]:
    """The encoded objects, and the size of a body that holds the tensors and them."""
    rows = [
        Row(name, str(t.dtype).removeprefix("torch."), list(t.shape), t.is_cuda)
        for name, t in tensors.items()
    ]
    objects = dumps({"tensors": rows, "parts": parts})
    return objects, Header.size_of(rows, objects)


def pieces_of(objects: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[Piece]:
    """Where each part of the body goes; tensors stay on their device, in the order of `pack`.

    What is between two parts becomes zero, since it is part of the digest.
    """
    start = 0
    encoded = torch.frombuffer(bytearray(objects), dtype=torch.uint8)
    for tensor in chain(tensors, (encoded,)):
        flat = _bytes_of(tensor)
        size = flat.nbytes
        if size:
            yield start, flat
        if gap := aligned(size) - size:
            yield start + size, torch.zeros(gap, dtype=torch.uint8)
        start += aligned(size)


def unpack(
    objects: bytes, body: torch.Tensor
) -> tuple[dict[str, Any], dict[str, tuple[torch.Tensor, bool]]]:
    """The parts, and the tensors as views of the body, with whether they were on a GPU.

    Raises MalformedState.
    """
    rows, parts = read_objects(objects)
    tensors = {}
    for row, (start, end) in zip(rows, ranges_of(rows), strict=True):
        if end > len(body):
            raise MalformedState(f"a tensor ends {end - len(body)} bytes after the snapshot")
        tensor = body[start:end].view(DTYPES[row.dtype]).view(row.shape)
        tensors[row.name] = tensor, bool(row.cuda)
    return parts, tensors


def read_objects(objects: bytes) -> tuple[list[Row], dict[str, Any]]:
    """The table of tensors, and the parts. Raises MalformedState."""
    try:
        found = loads(objects)
        parts, rows = found["parts"], [Row(*row) for row in found["tensors"]]
        names = {row.name for row in rows}
        if type(parts) is not dict or len(names) < len(rows):
            raise MalformedState("a snapshot without parts, or with two tensors of one name")
        if not all(row.dtype in DTYPES and type(row.name) is str for row in rows):
            raise MalformedState("a snapshot with a tensor of no type")
        for row in rows:
            row.size()
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise MalformedState(f"not a snapshot's table of tensors: {error}") from error
    return rows, parts


def ranges_of(rows: Iterable[Row]) -> Iterator[tuple[int, int]]:
    """Where in the body each tensor begins and ends, in bytes."""
    start = 0
    for row in rows:
        yield start, start + row.size()
        start += aligned(row.size())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def aligned(size: int) -> int:
    """Where in the body the next part begins, after `size` bytes."""
    return -(-size // _ALIGNED) * _ALIGNED


def write_body(body: torch.Tensor, batches: Iterable[Sequence[Piece]]) -> bytes:
    """Copy the pieces, which ascend and fill the body, into it. The digest of what is there then.

    Each batch in two halves, a thread for each: as a plain copy does with more than one, and one
    that copies and sums alone takes 1.3 times as long. They wait for each other once per batch.
    More at each chunk, which torch's own would do, took 9 times where others want the processors.
    """
    with ThreadPoolExecutor(1) as other:
        sums = _write_batches(body, batches, other)
    return digest_of_sums(sums[chunk] for chunk in chunks_of(body.nbytes))


def sums_of(batches: Iterable[Sequence[Piece]]) -> Iterator[bytes]:
    """The sums of the chunks that the pieces, which ascend and fill a body, would make."""
    room = torch.empty(CHUNK, dtype=torch.uint8)
    parts = chain.from_iterable(map(_within_chunks, batches))
    for _, of_chunk in groupby(parts, lambda part: part[0] // CHUNK):
        end = 0
        for start, part in of_chunk:
            if part.nbytes == CHUNK:
                yield sum_of(part)  # where it is
                continue
            ctypes.memmove(room.data_ptr() + start % CHUNK, part.data_ptr(), part.nbytes)
            end = start % CHUNK + part.nbytes
        if end:
            yield sum_of(room[:end])


def _within_chunks(
    pieces: Iterable[Piece], begin: int = 0, end: int = sys.maxsize
) -> Iterator[Piece]:
    """What lies from `begin` to `end`, in pieces none of which reaches into two chunks."""
    for start, piece in pieces:
        first, stop = max(start, begin), min(start + piece.nbytes, end)
        while first < stop:
            last = min(stop, (first // CHUNK + 1) * CHUNK)
            yield first, piece[first - start : last - start]
            first = last


def _write_batches(
    body: torch.Tensor, batches: Iterable[Sequence[Piece]], other: Executor
) -> dict[int, bytes]:
    """The sums of the chunks that the pieces reach."""
    sums: dict[int, bytes] = {}
    for batch in batches:
        begin = batch[0][0] // CHUNK
        end = batch[-1][0] + batch[-1][1].nbytes
        middle = (begin + -(-end // CHUNK)) // 2
        first = None
        if middle > begin:  # else a thread would be begun for nothing, as long as a small commit
            half = body, batch, begin * CHUNK, middle * CHUNK
            first = other.submit(_write_half, *half)
        sums |= _write_half(body, batch, middle * CHUNK, end)
        if first:
            sums |= first.result()
    return sums


def _write_half(
    body: torch.Tensor, batch: Sequence[Piece], begin: int, end: int
) -> dict[int, bytes]:
    """Copy what lies from `begin` to `end`. The sums of the chunks that it reaches.

    Each is taken when the chunk is whole, or the last piece is there: the last one's may be taken
    again with the next batch.
    """
    sums: dict[int, bytes] = {}
    chunk = -1
    for start, part in _within_chunks(batch, begin, end):
        if start // CHUNK != chunk and chunk >= 0:
            sums[chunk] = sum_chunk(body, chunk)
        chunk = start // CHUNK
        ctypes.memmove(body.data_ptr() + start, part.data_ptr(), part.nbytes)
    if chunk >= 0:
        sums[chunk] = sum_chunk(body, chunk)
    return sums
