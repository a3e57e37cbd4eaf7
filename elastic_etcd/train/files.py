"""Snapshots in files: written whole or not at all, and read with distrust."""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from elastic_etcd.errors import MalformedState
from elastic_etcd.train.image import HEADER, Header, Version
from elastic_etcd.train.snapshot import Slot, Snapshot


def save(path: Path, slot: Slot, allowed: Callable[[], None]) -> None:
    """Write the slot's snapshot to `path`: a reader sees the old file or the new one, whole.

    `allowed` is called when only the renaming is left, and may raise. Raises OSError.
    """
    header = slot.header()
    assert header is not None
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(header.pack().ljust(HEADER, b"\0"))
            file.write(memoryview(slot.memory)[HEADER : HEADER + header.size])
            file.flush()
            os.fsync(file.fileno())
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


def load(path: Path, snapshot: Snapshot) -> Slot:
    """Read a file that `save` wrote into the older slot, as a commit that is older than any here.

    Raises OSError, and MalformedState for a file that `save` did not write to its end.
    """
    with path.open("rb") as file:
        header = Header.unpack(file.read(HEADER))
        if header is None or os.fstat(file.fileno()).st_size != HEADER + header.size:
            raise MalformedState(f"{path} is no saved state, or not all of it")
        slot = snapshot.other()
        slot.clear(header.size)
        file.readinto(memoryview(slot.memory)[HEADER : HEADER + header.size])
    version = Version(0, header.version.counter, header.version.lineage)
    slot.set(Header(version, header.objects, header.size, header.digest))
    if not slot.whole():
        slot.clear(0)
        raise MalformedState(f"{path} is damaged: it does not have the bytes that were saved")
    return slot
