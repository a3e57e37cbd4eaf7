"""A snapshot as bytes: a header, the encoded objects, then each tensor's bytes at its place.

The same bytes lie in shared memory, go to a peer and are written to a file. docs/state.md has the
layout.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from elastic_etcd.errors import MalformedState
from elastic_etcd.train.encoding import decode, encode

HEADER = 4096  # one page, so that the body is aligned as memory is
CHUNK = 2 << 20  # summed while it is still in the cache, and large enough for torch's overhead
_ALIGNED = 64
_FIELDS = struct.Struct("<8sQQqQQ16s")
_MAGIC = b"eestate1"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

Piece = tuple[int, torch.Tensor]  # where in the body, and what: int64 words or uint8 bytes


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


def pack(parts: dict[str, bytes], tensors: Sequence[torch.Tensor]) -> tuple[bytes, int]:
    """The encoded objects, and the size of a body that holds them and the tensors."""
    table = [(str(t.dtype), tuple(t.shape), t.is_cuda) for t in tensors]
    objects = encode((table, parts), [])
    sizes = (len(objects), *(t.numel() * t.element_size() for t in tensors))
    return objects, sum(map(_aligned, sizes))


def write(body: torch.Tensor, batches: Iterable[Sequence[Piece]]) -> bytes:
    """Copy the pieces, which ascend, into the body. Returns the digest of what is there then.

    Each batch in two halves, a thread for each: as a plain copy does with more than one, and one
    that copies and sums alone takes 1.3 times as long. They wait for each other once per batch.
    More at each chunk, which torch's own would do, took 9 times where others want the processors.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # also of the thread that follows
    try:
        with ThreadPoolExecutor(1) as other:
            return _write(body, batches, other)
    finally:
        torch.set_num_threads(threads)


def _write(body: torch.Tensor, batches: Iterable[Sequence[Piece]], other: Executor) -> bytes:
    sums: list[torch.Tensor] = []
    for batch in batches:
        end = batch[-1][0] + batch[-1][1].nbytes
        begin = len(sums)
        middle = (begin + -(-end // CHUNK)) // 2
        first = None
        if middle > begin:  # else a thread would be begun for nothing, as long as a small commit
            first = other.submit(_write_part, body, batch, begin * CHUNK, middle * CHUNK)
        second = _write_part(body, batch, middle * CHUNK, end)
        sums += (first.result() if first else []) + second
    sums += _sums(body.view(torch.int64), len(sums), -(-len(body) // CHUNK))
    return _digest(torch.stack(sums))


def _write_part(
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
            sums += _sums(words, first_chunk + len(sums), last // CHUNK)
            first = last
    return sums + _sums(words, first_chunk + len(sums), end // CHUNK)


def pieces_of(objects: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[Piece]:
    """Where each part of the body goes; tensors stay on their device, in the order of `pack`."""
    start = 0
    for flat in (torch.frombuffer(bytearray(objects), dtype=torch.uint8), *map(_flat, tensors)):
        words = len(flat) // 8 if flat.storage_offset() % 8 == 0 else 0
        if words:
            yield start, flat[: words * 8].view(torch.int64)
        if words * 8 < len(flat):
            yield start + words * 8, flat[words * 8 :]
        start += _aligned(len(flat))


def digest_of(body: torch.Tensor) -> bytes:
    """What `write` returned, of a body as it is now.

    The 64-bit words of each chunk are summed, and the sums hashed: any one changed word is found,
    and so are chunks in another order; words that swap places inside one chunk are not.
    """
    words = body.view(torch.int64)
    whole = len(body) // CHUNK
    sums = words[: whole * CHUNK // 8].view(whole, CHUNK // 8).sum(1)
    if whole * CHUNK < len(body):
        sums = torch.cat((sums, _sum(words, whole).view(1)))
    return _digest(sums)


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
            tensor = _view(body, start, _DTYPES[name], shape)
            start += _aligned(tensor.numel() * tensor.element_size())
            tensors.append((tensor, bool(cuda)))
    except MalformedState:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise MalformedState(f"not a snapshot's table of tensors: {error}") from error
    return parts, tensors


def _view(body: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    if not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
        raise MalformedState(f"{shape} is no shape")
    end = start + prod(shape) * dtype.itemsize
    if end > len(body):
        raise MalformedState(f"a tensor ends {end - len(body)} bytes after the snapshot")
    return body[start:end].view(dtype).view(shape)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def _sum(words: torch.Tensor, chunk: int) -> torch.Tensor:
    return words[chunk * CHUNK // 8 : (chunk + 1) * CHUNK // 8].sum()


def _sums(words: torch.Tensor, first: int, end: int) -> list[torch.Tensor]:
    return [_sum(words, chunk) for chunk in range(first, end)]


def _digest(sums: torch.Tensor) -> bytes:
    values = sums.tolist()
    return hashlib.blake2b(struct.pack(f"<{len(values)}q", *values), digest_size=16).digest()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
