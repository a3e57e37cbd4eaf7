"""Files of snapshots, in the layout of safetensors, so that other programs read the tensors, too.

Eight bytes of length, a header in JSON that names each tensor, then their bytes without a gap, the
types of the largest numbers first. All else is in the header's `__metadata__`, as text:
docs/state.md has it.
"""

import contextlib
import json
import logging
import mmap
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch

from elastic_etcd.errors import MalformedState, UsageError
from elastic_etcd.train.state.encoding import DTYPES
from elastic_etcd.train.state.snapshot_format import (
    Header,
    Row,
    Version,
    aligned,
    ranges_of,
    read_objects,
)
from elastic_etcd.train.state.snapshot_memfds import HEADER, Memfd, StateSnapshot

FORMAT = "1"
_LONGEST_HEADER = 100_000_000  # bytes; safetensors reads no longer one
_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "bool": "BOOL",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_PARTS = {"complex64": "F32", "complex128": "F64"}  # with a last dimension of 2

_WRONG = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)

Saving: TypeAlias = Future[None]  # a save that a thread does

log = logging.getLogger(__name__)


def save(
    path: Path, header: Header, body: memoryview, allowed: Callable[[], None], *, keep: int
) -> None:
    """Write a snapshot to `path`: a reader sees the old file or the new one, whole.

    keep: how many files, of which the older are called PATH.1, PATH.2 and so on. A file of another
    lineage is kept beside it in any case. `allowed` is called when only the renaming is left, and
    may raise. Raises OSError, UsageError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            _write(file, header, body)
            file.flush()
            os.fsync(file.fileno())
        allowed()
        _keep_older(path, header.version.lineage, keep)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)


def flush(path: Path) -> None:
    """Have the bytes of a file, or the names in a folder, on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def begin_save(
    path: Path, header: Header, body: torch.Tensor, allowed: Callable[[], None], *, keep: int
) -> Saving:
    """Begin to write a copy of the snapshot, in a thread; its error is logged, too.

    The end of the process waits for it.
    """
    memory = mmap.mmap(-1, header.size)
    torch.frombuffer(memory, dtype=torch.uint8).copy_(body)

    def write() -> None:
        try:
            save(path, header, memoryview(memory), allowed, keep=keep)
        except BaseException as error:
            log.error("%s was not saved: %s", path, error)  # noqa: TRY400 - the caller has it
            raise

    thread = ThreadPoolExecutor(1, "elastic_etcd save")
    future = thread.submit(write)
    thread.shutdown(wait=False)
    return future


def load(path: Path, clear_older: Callable[[int], Memfd]) -> StateSnapshot:
    """Read a file that `save` wrote, as a commit that is older than any here.

    `clear_older` gives the memory file for a body of so many bytes. Raises OSError, and
    MalformedState for a file that `save` did not write to its end.
    """
    with path.open("rb") as file:
        try:
            header, objects = _read_header(file)
        except MalformedState as error:
            raise MalformedState(f"{path} is no saved state, or not all of it: {error}") from error
        memfd = clear_older(header.size)
        body = memoryview(memfd.memory)[HEADER : HEADER + header.size]
        rows, _ = read_objects(objects)
        for _, end in ranges_of(rows):
            body[end : aligned(end)] = bytes(aligned(end) - end)  # an older body's are there
        for _, start, end in _in_order(rows):
            file.readinto(body[start:end])
        start = header.objects_at
        body[start:] = objects.ljust(len(body) - start, b"\0")
    snapshot = memfd.set(replace(header, version=replace(header.version, generation=0)))
    if not snapshot.is_intact():
        memfd.clear()
        raise MalformedState(f"{path} is damaged: it does not have the bytes that were saved")
    return snapshot


def version_of(path: Path) -> Version | None:
    """The commit that a file is of; None where there is no file that `save` wrote."""
    with contextlib.suppress(OSError, MalformedState), path.open("rb") as file:
        return _read_header(file)[0].version
    return None


def _write(file: BinaryIO, header: Header, body: memoryview) -> None:
    start = header.objects_at
    objects = bytes(body[start : start + header.objects])
    file.write(_header_of(header, objects))
    rows, _ = read_objects(objects)
    for _, start, end in _in_order(rows):
        file.write(body[start:end])


def _header_of(header: Header, objects: bytes) -> bytes:
    """The file's first bytes, up to the first tensor's. Raises UsageError."""
    version = header.version
    metadata = {
        "format": "pt",
        "elastic_etcd": FORMAT,
        "generation": str(version.generation),
        "counter": str(version.counter),
        "lineage": str(version.lineage),
        "world_size": str(version.world_size),
        "digest": header.digest.hex(),
        "crc": header.pack()[-4:].hex(),  # of these numbers
        "objects": objects.decode("ascii"),
    }
    table: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    rows, _ = read_objects(objects)
    for row, start, end in _in_order(rows):
        dtype, shape, _ = _in_file(row)
        offsets = [begin, begin := begin + end - start]
        table[row.name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text = text.ljust(-(-len(text) // 8) * 8)
    if len(text) > _LONGEST_HEADER:
        raise UsageError("what is no tensor is too much for a file: keep long lists in tensors")
    return len(text).to_bytes(8, "little") + text


def _read_header(file: BinaryIO) -> tuple[Header, bytes]:
    """The header of a file, and its objects; the file stands at the first tensor then.

    The bytes are made anew from the metadata, and have to be the same. Raises MalformedState.
    """
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length) if length <= _LONGEST_HEADER else b""
    try:
        metadata = json.loads(text)["__metadata__"]
        objects = metadata["objects"].encode("ascii")
        names = ("generation", "counter", "lineage", "world_size")
        numbers = (int(metadata[name]) for name in names)
        rows, _ = read_objects(objects)
        size = Header.size_of(rows, objects)
        header = Header(Version(*numbers), len(objects), size, bytes.fromhex(metadata["digest"]))
        again = _header_of(header, objects)
    except MalformedState:
        raise
    except (*_WRONG, UsageError, struct.error) as error:
        raise MalformedState(f"{type(error).__name__}: {error}") from error
    tensors = sum(end - start for _, start, end in _in_order(rows))
    if again != length.to_bytes(8, "little") + text:
        raise MalformedState("its header is not as it is written")
    if os.fstat(file.fileno()).st_size != len(again) + tensors:
        raise MalformedState("it has another length than its header says")
    return header, objects


def _in_order(rows: list[Row]) -> Iterator[tuple[Row, int, int]]:
    """Each row with its place in the body, in the order of the file: each begins at a multiple."""
    found = [(row, start, end) for row, (start, end) in zip(rows, ranges_of(rows), strict=True)]
    return iter(sorted(found, key=lambda each: -_in_file(each[0])[2]))


def _in_file(row: Row) -> tuple[str, list[int], int]:
    """Type, shape and bytes of a number in the file; a type that it lacks is there as bytes."""
    size = int(DTYPES[row.dtype].itemsize)
    if row.dtype in _PARTS:
        return _PARTS[row.dtype], [*row.shape, 2], size // 2
    if row.dtype in _TYPES:
        return _TYPES[row.dtype], row.shape, size
    return "U8", [row.size()], 1


def _keep_older(path: Path, lineage: int, keep: int) -> None:
    """Number the older files, or put a file of another lineage aside."""
    found = version_of(path)
    if found is not None and found.lineage != lineage:
        aside = path.with_name(f"{path.name}.{found.lineage:x}")
        _link(path, aside)
        text = "%s was of another training, at its commit %d: it is kept as %s"
        log.warning(text, path, found.counter, aside)
    elif keep > 1 and path.exists():
        for number in range(keep - 1, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                _numbered(path, number - 1).replace(_numbered(path, number))
        _link(path, _numbered(path, 1))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _link(path: Path, other: Path) -> None:
    """Give the file this name, too."""
    other.unlink(missing_ok=True)
    try:
        os.link(path, other)
    except OSError:  # a file system that knows no links
        shutil.copyfile(path, other)
