"""Files in memory (memfd): they have no name in any folder, and end with their last descriptor."""

import fcntl
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def new_memfd(name: str, size: int = 0) -> int:
    """A new file of `size` bytes, all 0; no child inherits its descriptor. Raises OSError."""
    return _create(name, size, os.MFD_CLOEXEC)


def sealed_memfd(name: str, size: int) -> int:
    """The same of a size that no process can change. Raises OSError.

    Memory that was mapped and is cut off by another process would end this one by a SIGBUS.
    """
    fd = _create(name, size, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def memfd_with(name: str, content: bytes) -> int:
    """A new file with this content, of which a reader begins at the start. Raises OSError."""
    fd = new_memfd(name)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _create(name: str, size: int, flags: int) -> int:
    fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd
