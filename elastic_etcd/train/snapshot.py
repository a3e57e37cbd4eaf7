"""Two snapshots in shared memory, which live as long as the agent: the last commit and the next.

Each has a memory file (memfd) of its own, whose header is cleared before the body is written and
set after it: a process that is killed in between leaves the other one whole.
"""

import errno
import logging
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence

import torch

from elastic_etcd.errors import UsageError
from elastic_etcd.train.image import HEADER, Header, Piece, Version, digest_of, write

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: all page faults at once, a third of their time
_log = logging.getLogger(__name__)


class Slot:
    """One memory file: a header in its first page, then the body. It owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        self.pid = os.getpid()
        if os.fstat(fd).st_size < HEADER:
            os.ftruncate(fd, HEADER)
        self._map(os.fstat(fd).st_size)

    def header(self) -> Header | None:
        """What it holds; None while it holds nothing complete."""
        header = Header.unpack(self.memory[:HEADER])
        return None if header is None or header.size > len(self._bytes) - HEADER else header

    def body(self, size: int) -> torch.Tensor:
        """Its first `size` bytes: the memory itself, not a copy."""
        return self._bytes[HEADER : HEADER + size]

    def read(self, size: int) -> bytes:
        """A copy of the first `size` bytes of the body."""
        return self.memory[HEADER : HEADER + size]

    def clear(self, size: int) -> torch.Tensor:
        """The body, of `size` bytes, to be written; what was there is gone. Raises OSError."""
        if os.getpid() != self.pid:
            raise UsageError("a state belongs to the worker, not to a process forked from it")
        if HEADER + size > len(self._bytes):
            os.ftruncate(self.fd, HEADER + size)
            self._map(HEADER + size)
            self._populate()
        self._set(bytes(HEADER))
        return self.body(size)

    def set(self, header: Header) -> None:
        """Say that the body is written."""
        self._set(header.pack())

    def whole(self) -> bool:
        """Whether the body is what the header says; reads all of it."""
        header = self.header()
        return header is not None and digest_of(self.body(header.size)) == header.digest

    def _set(self, data: bytes) -> None:
        self.memory[: len(data)] = data

    def _map(self, length: int) -> None:
        self.memory = mmap.mmap(self.fd, length)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    def _populate(self) -> None:
        """Have all of the memory now. Raises OSError when it is not to be had."""
        try:
            self.memory.madvise(_POPULATE_WRITE)
        except OSError as error:  # before Linux 5.14 the pages come one by one
            if error.errno != errno.EINVAL:
                raise


class Snapshot:
    """The two slots of one worker."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.slots = [Slot(fd) for fd in fds]

    def newest(self) -> Slot | None:
        """The newest that was written to its end, if any."""
        found = [(header.version.age(), slot) for slot in self.slots if (header := slot.header())]
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def version(self) -> Version | None:
        """The newest's."""
        newest = self.newest()
        header = newest.header() if newest else None
        return header.version if header else None

    def other(self) -> Slot:
        """The slot to write to: any but the newest."""
        newest = self.newest()
        return next(slot for slot in self.slots if slot is not newest)

    def write(
        self, version: Version, objects: int, size: int, batches: Iterable[Sequence[Piece]]
    ) -> None:
        """Write a snapshot; the newest stays as it is until this one is whole."""
        slot = self.other()
        digest = write(slot.clear(size), batches)
        slot.set(Header(version, objects, size, digest))

    def prefer(self, slot: Slot) -> None:
        """Make this the newest: what is as new, of another lineage, is dropped."""
        while (newest := self.newest()) is not None and newest is not slot:
            newest.clear(0)

    def check(self) -> Slot | None:
        """The newest whose body is what was written; one that is not is dropped, and said."""
        while (newest := self.newest()) is not None and not newest.whole():
            _log.error("the snapshot %s is damaged: going back one", newest.header())
            newest.clear(0)
        return newest
