"""A state's snapshot: its bytes, two places for it in shared memory, and files of it.

A snapshot is a header, the encoded objects, then each tensor's bytes. The same bytes lie in shared
memory, go to a peer and are written to a file; docs/state.md has the layout. A worker has two
memory files (memfd), for the last commit and the next, which live as long as its agent. The header
is cleared before the body is written and set after it: a process that is killed in between leaves
the other one whole.
"""

import contextlib
import errno
import hashlib
import logging
import mmap
import os
import secrets
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from elastic_etcd.errors import MalformedState, UsageError
from elastic_etcd.train.codecs import decode, encode

HEADER = 4096  # one page, so that the body is aligned as memory is
CHUNK = 2 << 20  # summed while it is still in the cache, and large enough for torch's overhead
_ALIGNED = 64
_FIELDS = struct.Struct("<8sQQqQQ16s")
_MAGIC = b"eestate1"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: all page faults at once, a third of their time

Piece = tuple[int, torch.Tensor]  # where in the body, and what: int64 words or uint8 bytes

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
        if header is None or header.size > len(self._bytes) - HEADER:
            return None
        return StateSnapshot(self, header)

    def body(self, size: int) -> torch.Tensor:
        """Its first `size` bytes: the memory itself, not a copy."""
        return self._bytes[HEADER : HEADER + size]

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

    def load(self) -> tuple[dict[str, bytes], list[tuple[torch.Tensor, bool]]]:
        """The parts, and the tensors as views of the memory, with whether they were on a GPU.

        Raises MalformedState.
        """
        objects = self.memfd.memory[HEADER : HEADER + self.header.objects]
        return unpack(objects, self.body)

    def is_intact(self) -> bool:
        """Whether the body is what the header says; reads all of it."""
        return digest_of(self.body) == self.header.digest


class MemfdPair:
    """The two memory files of one worker's state, of which one holds the newest snapshot."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.memfds = [Memfd(fd) for fd in fds]

    def newest(self) -> StateSnapshot | None:
        """The newest that was written to its end, if any."""
        found = [snapshot for memfd in self.memfds if (snapshot := memfd.snapshot())]
        return max(found, key=lambda each: each.header.version.age(), default=None)

    def newest_intact(self) -> StateSnapshot | None:
        """The newest whose body is what was written; one that is not is dropped, and logged."""
        while (newest := self.newest()) is not None and not newest.is_intact():
            _log.error("the snapshot %s is damaged: going back one", newest.header)
            newest.memfd.clear()
        return newest

    def version(self) -> Version | None:
        """The newest's."""
        newest = self.newest()
        return newest.header.version if newest else None

    def older(self) -> Memfd:
        """The one to write to: any that does not hold the newest."""
        newest = self.newest()
        return next(memfd for memfd in self.memfds if not newest or memfd is not newest.memfd)

    def write(
        self,
        version: Version,
        parts: dict[str, bytes],
        tensors: Sequence[torch.Tensor],
        batched: Callable[[Iterator[Piece]], Iterable[Sequence[Piece]]],
    ) -> None:
        """Write a snapshot; the newest stays as it is until this one is whole.

        `batched` is given the pieces and makes them batches, in host memory. What it raises is
        raised, and nothing is written then.
        """
        objects, size = pack(parts, tensors)
        memfd = self.older()
        digest = write_body(memfd.clear(size), batched(pieces_of(objects, tensors)))
        memfd.set(Header(version, len(objects), size, digest))

    def prefer(self, snapshot: StateSnapshot) -> None:
        """Make this the newest: what is as new, of another lineage, is dropped."""
        while (newest := self.newest()) is not None and newest.memfd is not snapshot.memfd:
            newest.memfd.clear()


def save(path: Path, snapshot: StateSnapshot, allowed: Callable[[], None]) -> None:
    """Write the snapshot to `path`: a reader sees the old file or the new one, whole.

    `allowed` is called when only the renaming is left, and may raise. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write_file(temporary, snapshot)
        allowed()
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load(path: Path, memfds: MemfdPair) -> StateSnapshot:
    """Read a file that `save` wrote into the older memfd, as a commit that is older than any here.

    Raises OSError, and MalformedState for a file that `save` did not write to its end.
    """
    with path.open("rb") as file:
        header = Header.unpack(file.read(HEADER))
        if header is None or os.fstat(file.fileno()).st_size != HEADER + header.size:
            raise MalformedState(f"{path} is no saved state, or not all of it")
        memfd = memfds.older()
        memfd.clear(header.size)
        file.readinto(memoryview(memfd.memory)[HEADER : HEADER + header.size])
    snapshot = memfd.set(replace(header, version=replace(header.version, generation=0)))
    if not snapshot.is_intact():
        memfd.clear()
        raise MalformedState(f"{path} is damaged: it does not have the bytes that were saved")
    return snapshot


def _write_file(path: Path, snapshot: StateSnapshot) -> None:
    with path.open("xb") as file:
        file.write(snapshot.header.pack().ljust(HEADER, b"\0"))
        file.write(memoryview(snapshot.memfd.memory)[HEADER : HEADER + snapshot.header.size])
        file.flush()
        os.fsync(file.fileno())


def pack(parts: dict[str, bytes], tensors: Sequence[torch.Tensor]) -> tuple[bytes, int]:
    """The encoded objects, and the size of a body that holds them and the tensors."""
    table = [(str(t.dtype), tuple(t.shape), t.is_cuda) for t in tensors]
    objects = encode((table, parts), [])
    sizes = (len(objects), *(t.numel() * t.element_size() for t in tensors))
    return objects, sum(map(_aligned, sizes))


def pieces_of(objects: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[Piece]:
    """Where each part of the body goes; tensors stay on their device, in the order of `pack`."""
    start = 0
    encoded = torch.frombuffer(bytearray(objects), dtype=torch.uint8)
    for flat in (encoded, *map(_bytes_of, tensors)):
        words = len(flat) // 8 if flat.storage_offset() % 8 == 0 else 0
        if words:
            yield start, flat[: words * 8].view(torch.int64)
        if words * 8 < len(flat):
            yield start + words * 8, flat[words * 8 :]
        start += _aligned(len(flat))


def unpack(objects: bytes, body: torch.Tensor) -> tuple[dict[str, bytes], list[tuple[Any, bool]]]:
    """The parts, and the tensors as views of the body, with whether they were on a GPU.

    Raises MalformedState.
    """
    try:
        table, parts = decode(objects, ())
        parts = {str(name): bytes(memoryview(part)) for name, part in parts.items()}
        tensors = []
        start = _aligned(len(objects))
        for name, shape, cuda in table:
            tensor = _tensor_at(body, start, _DTYPES[name], shape)
            start += _aligned(tensor.numel() * tensor.element_size())
            tensors.append((tensor, bool(cuda)))
    except MalformedState:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise MalformedState(f"not a snapshot's table of tensors: {error}") from error
    return parts, tensors


def _tensor_at(body: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    if not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
        raise MalformedState(f"{shape} is no shape")
    end = start + prod(shape) * dtype.itemsize
    if end > len(body):
        raise MalformedState(f"a tensor ends {end - len(body)} bytes after the snapshot")
    return body[start:end].view(dtype).view(shape)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def write_body(body: torch.Tensor, batches: Iterable[Sequence[Piece]]) -> bytes:
    """Copy the pieces, which ascend, into the body. Returns the digest of what is there then.

    Each batch in two halves, a thread for each: as a plain copy does with more than one, and one
    that copies and sums alone takes 1.3 times as long. They wait for each other once per batch.
    More at each chunk, which torch's own would do, took 9 times where others want the processors.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # also of the thread that follows
    try:
        with ThreadPoolExecutor(1) as other:
            return _write_batches(body, batches, other)
    finally:
        torch.set_num_threads(threads)


def digest_of(body: torch.Tensor) -> bytes:
    """What `write_body` returned, of a body as it is now.

    The 64-bit words of each chunk are summed, and the sums hashed: any one changed word is found,
    and so are chunks in another order; words that swap places inside one chunk are not.
    """
    words = body.view(torch.int64)
    whole = len(body) // CHUNK
    sums = words[: whole * CHUNK // 8].view(whole, CHUNK // 8).sum(1)
    if whole * CHUNK < len(body):
        sums = torch.cat((sums, torch.stack(_chunk_sums(words, whole, whole + 1))))
    return _digest_of_sums(sums)


def _write_batches(
    body: torch.Tensor, batches: Iterable[Sequence[Piece]], other: Executor
) -> bytes:
    sums: list[torch.Tensor] = []
    for batch in batches:
        end = batch[-1][0] + batch[-1][1].nbytes
        begin = len(sums)
        middle = (begin + -(-end // CHUNK)) // 2
        first = None
        if middle > begin:  # else a thread would be begun for nothing, as long as a small commit
            first = other.submit(_write_half, body, batch, begin * CHUNK, middle * CHUNK)
        second = _write_half(body, batch, middle * CHUNK, end)
        sums += (first.result() if first else []) + second
    sums += _chunk_sums(body.view(torch.int64), len(sums), -(-len(body) // CHUNK))
    return _digest_of_sums(torch.stack(sums))


def _write_half(
    body: torch.Tensor, batch: Sequence[Piece], begin: int, end: int
) -> list[torch.Tensor]:
    """Copy what lies from `begin`, a chunk's, to `end`. The sums of the chunks that are whole."""
    words = body.view(torch.int64)
    first_chunk = begin // CHUNK
    sums: list[torch.Tensor] = []
    for start, piece in batch:
        target = words if piece.dtype == torch.int64 else body
        unit = piece.element_size()
        first, stop = max(start, begin), min(start + piece.nbytes, end)
        while first < stop:
            last = min(stop, (first // CHUNK + 1) * CHUNK)
            part = piece[(first - start) // unit : (last - start) // unit]
            target[first // unit : last // unit].copy_(part)
            sums += _chunk_sums(words, first_chunk + len(sums), last // CHUNK)
            first = last
    return sums + _chunk_sums(words, first_chunk + len(sums), end // CHUNK)


def _chunk_sums(words: torch.Tensor, first: int, end: int) -> list[torch.Tensor]:
    words_each = CHUNK // 8
    return [words[n * words_each : (n + 1) * words_each].sum() for n in range(first, end)]


def _digest_of_sums(sums: torch.Tensor) -> bytes:
    values = sums.tolist()
    return hashlib.blake2b(struct.pack(f"<{len(values)}q", *values), digest_size=16).digest()
