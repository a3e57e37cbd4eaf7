"""A state's snapshot as bytes: a header, each tensor's bytes, then the encoded objects.

The same bytes lie in shared memory and go to a peer; docs/state.md has the layout.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch

from elastic_etcd.errors import MalformedState
from elastic_etcd.train.state.encoding import DTYPES, dumps, loads
from elastic_etcd.train.state.snapshot_bytes import TensorSlice, digest_of_batches, write_body

_ALIGNED = 64
_FIELDS = struct.Struct("<8sQQqQQQ16s")
_MAGIC = b"eestate4"


@dataclass(frozen=True)
class Version:
    """The commit that a snapshot is of."""

    generation: int
    counter: int  # of commits; 0: the values that training began with
    lineage: int  # tells two runs apart that count alike
    world_size: int = 1

    def age(self) -> tuple[bool, int, int]:
        """Larger is newer: a later generation goes before more commits in one that ended.

        The values that training began with are older than any commit.
        """
        return self.counter > 0, self.generation, self.counter


@dataclass(frozen=True)
class Header:
    """The description of a body."""

    version: Version
    objects: int  # bytes, of the encoded objects
    size: int  # bytes, of the body
    digest: bytes

    def pack(self) -> bytes:
        """Its bytes, with a checksum."""
        v = self.version
        packed = _FIELDS.pack(
            *(_MAGIC, v.generation, v.counter, v.lineage, v.world_size),
            *(self.objects, self.size, self.digest),
        )
        return packed + zlib.crc32(packed).to_bytes(4, "little")

    @property
    def objects_at(self) -> int:
        """The place in the body where the objects begin, in bytes."""
        return self.size - aligned(self.objects)

    @staticmethod
    def size_of(rows: Iterable["Row"], objects: bytes) -> int:
        """The size of a body that holds these."""
        return sum(aligned(row.size()) for row in rows) + aligned(len(objects))

    @classmethod
    def unpack(cls, data: bytes) -> "Header | None":
        """None for bytes that `pack` has not written, or not to its end."""
        fields, crc = data[: _FIELDS.size], data[_FIELDS.size : _FIELDS.size + 4]
        if len(crc) < 4 or zlib.crc32(fields) != int.from_bytes(crc, "little"):
            return None
        magic, *version, objects, size, digest = _FIELDS.unpack(fields)
        if magic != _MAGIC or objects > size or size % _ALIGNED:
            return None
        return cls(Version(*version), objects, size, digest)


@dataclass(frozen=True)
class Draft:
    """A snapshot to be written."""

    version: Version
    parts: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    # Makes batches of the slices, in host memory; its errors are raised, and nothing is written.
    batched: Callable[[Iterator[TensorSlice]], Iterable[Sequence[TensorSlice]]]

    @property
    def size(self) -> int:
        """Bytes of the body. Raises UsageError for objects that can't be encoded."""
        return self._packed[1]

    def write(self, body: torch.Tensor) -> Header:
        """Copy it into a body of `size` bytes; the header that goes beside it."""
        return self._header(write_body(body, self._batches()))

    def header(self) -> Header:
        """The header that it would have; nothing is written."""
        return self._header(digest_of_batches(self._batches()))

    def _batches(self) -> Iterable[Sequence[TensorSlice]]:
        objects, _ = self._packed
        return self.batched(slices_of(objects, self.tensors.values()))

    def _header(self, digest: bytes) -> Header:
        objects, size = self._packed
        return Header(self.version, len(objects), size, digest)

    @cached_property
    def _packed(self) -> tuple[bytes, int]:
        return pack(self.parts, self.tensors)


class Row(NamedTuple):
    """The entry of a tensor in a snapshot's table."""

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
    return objects, sum(aligned(t.nbytes) for t in tensors.values()) + aligned(len(objects))


def slices_of(objects: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[TensorSlice]:
    """The places in the body of all that it holds, in the order of `pack`.

    Tensors stay on their device. A gap between two parts becomes zero: it is part of the digest.
    """
    start = 0
    encoded = torch.frombuffer(bytearray(objects), dtype=torch.uint8)
    for tensor in chain(tensors, (encoded,)):
        flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        size = flat.nbytes
        if size:
            yield start, flat
        if gap := aligned(size) - size:
            yield start + size, torch.zeros(gap, dtype=torch.uint8, device="cpu")
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
    """The beginning and the end of each tensor in the body, in bytes."""
    start = 0
    for row in rows:
        yield start, start + row.size()
        start += aligned(row.size())


def aligned(size: int) -> int:
    """The place in the body where the next part begins, after `size` bytes."""
    return -(-size // _ALIGNED) * _ALIGNED
