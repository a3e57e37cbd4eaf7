"""NCCL's flight recorder of a worker: which collectives it has begun, and which have ended.

A thread of torch's writes it into a file when somebody writes to a pipe. It is asked only where the
user has turned both on, by torch's own variables: what can't make its pipe ends its process.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_FILES = (
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)  # the name of now, of before
_MOST = 1 << 24  # bytes of it that are copied

Stamp: TypeAlias = tuple[int, int] | None


class Dump(NamedTuple):
    """A file that is being written, and what it was like before."""

    path: Path
    before: Stamp


def is_on(env: Mapping[str, str]) -> bool:
    """Whether a worker with this environment may be asked."""
    return bool(env.get(_PIPE) and any(map(env.get, _FILES)))


def ask(env: Mapping[str, str], rank: int) -> Dump | None:
    """Have it write; None where nobody reads its pipe."""
    path = Path(f"{next(filter(None, map(env.get, _FILES)))}{rank}")
    asked = Dump(path, stamp(path))
    try:
        fd = os.open(f"{env[_PIPE]}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return asked if stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b"1") else None
    except OSError:  # it is full
        return None
    finally:
        os.close(fd)


def stamp(path: Path) -> Stamp:
    """Its time and size, which change when it is written; None where it is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None


def copy(path: Path, folder: Path) -> Path:
    """Copy it to `folder`, unless it is too large; gives where it is. Raises OSError."""
    if path.stat().st_size > _MOST:
        return path
    target = folder / "nccl_trace"
    with path.open("rb") as file:
        target.write_bytes(file.read(_MOST))
    return target
