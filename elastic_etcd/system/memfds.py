"""Files in memory (memfd): they have no name in any folder, and end with their last descriptor."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_etcd.system.kernel import MFD_ALLOW_SEALING, MFD_CLOEXEC, memfd_create, seal_size


def new_memfd(name: str, size: int = 0) -> int:
    """A new file of `size` bytes, all 0; no child inherits its descriptor. Raises OSError."""
    with _memfd(name, MFD_CLOEXEC) as fd:
        os.ftruncate(fd, size)
    return fd


def sealed_memfd(name: str, size: int) -> int:
    """The same of a size that no process can change. Raises OSError.

    Memory that was mapped and is cut off by another process would end this one by a SIGBUS.
    """
    with _memfd(name, MFD_CLOEXEC | MFD_ALLOW_SEALING) as fd:
        os.ftruncate(fd, size)
        seal_size(fd)
    return fd


def memfd_with(name: str, content: bytes) -> int:
    """A new file with this content, of which a reader begins at the start. Raises OSError."""
    with _memfd(name, MFD_CLOEXEC) as fd:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
    return fd


@contextmanager
def _memfd(name: str, flags: int) -> Iterator[int]:
    """An empty file, which is closed if this block raises: `ulimit -f` counts for it, too."""
    fd = memfd_create(name, flags)
    try:
        yield fd
    except BaseException:
        os.close(fd)
        raise
