"""The agent's directories: one in memory, for checkpoints, and another if it needs one.

They outlive the workers, and not the agent. It removes them at its end, and its guardian does if
the agent is killed. Beyond both, the agent holds a lock on each that the kernel lets go of at its
end, in whatever container that ran: the next agent here that gets the lock knows that nobody uses
the directory any more. Another machine's locks may not be seen on a shared file system, so a
directory's name says on which machine it was made, and since which start of that.

The lock is shared, so that workers can hold one as well: a directory that others have removed, as a
cleaner does, is made anew by the worker that needs it next.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from elastic_etcd.errors import UsageError
from elastic_etcd.system.threads import start_thread

Made = TypeVar("Made")

_MEMORY, _OWN = "elastic_etcd_memory-", "elastic_etcd_agent-"
LOOK = 1.0  # seconds for any call about these paths, which may be on a disk that stands still

log = logging.getLogger(__name__)


class Directory:
    """A directory below `parent` that this agent uses. Raises OSError where none can be made."""

    def __init__(self, parent: str, prefix: str) -> None:
        self.path, self._lock = "", -1
        while self._lock < 0 or not leads_to(self.path, self._lock):
            self._release()
            self.path = tempfile.mkdtemp(prefix=prefix, dir=parent)
            try:
                self._lock = locked(self.path, fcntl.LOCK_SH)
                _checked(self.path)
            except (FileNotFoundError, BlockingIOError):
                continue  # an agent that begins took it for one that was left
            except OSError:  # the file system is full, or has no locks
                self.remove()
                raise

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def leads_to(path: str, fd: int) -> bool:
    """Whether the file of this descriptor is at this path. Raises OSError."""
    try:
        return os.path.samestat(Path(path).stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def memory_directory(parent: str) -> Directory | None:
    """Make one below `parent`; None where none can be made."""
    try:
        return _directory(parent, _MEMORY)
    except OSError as error:
        log.info("no directory for ee.memory_checkpoint in %s: %s", parent, error.strerror)
        return None


def own_directory() -> Directory:
    """Make one for an etcd of the agent's own, or for a pipe. Raises UsageError.

    It is below TMPDIR, or elsewhere if that can't be used.
    """
    places = (tempfile.gettempdir(), "/tmp", *_in_memory())  # noqa: S108 - mkdtemp is used
    return _first(places, partial(_directory, prefix=_OWN))


def _directory(parent: str, prefix: str) -> Directory:
    """Make one there; a thread removes what dead agents of this user have left beside it."""
    prefix = f"{prefix}{_boot()}-"
    try:
        return Directory(parent, prefix)
    finally:  # not before: it would find the new one without its lock
        with suppress(BlockingIOError):  # then the next agent does it
            start_thread(partial(_remove_former, Path(parent), prefix), "directories")


def find_temporary_directory() -> None:
    """Set TMPDIR to memory where no usual place can be written. Raises UsageError.

    For the workers, too: `import torch._dynamo` fails without one.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        os.environ["TMPDIR"] = _first(_in_memory(), _checked)


def _first(places: Iterable[str], make: Callable[[str], Made]) -> Made:
    """Make it in the first of these directories in which that can be done."""
    refused = []
    for path in places:
        try:
            return make(path)
        except OSError as error:
            refused.append(f"{path}: {error.strerror}")
    raise UsageError(
        f"no directory for temporary files: {', '.join(refused)}.\nSet TMPDIR to one that this "
        "user may write to; in a container mount a tmpfs at /tmp"
    )


def _in_memory() -> list[str]:
    """Directories in memory that most machines have."""
    return [os.environ.get("XDG_RUNTIME_DIR") or "/dev/shm", "/dev/shm"]  # noqa: S108 - as above


def _checked(path: str) -> str:
    """This directory. Raises OSError if no file can be written there."""
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(b"\0")
    return path


@cache
def _boot() -> str:
    """This machine since its start, in 16 characters."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except (FileNotFoundError, PermissionError):  # then what a dead agent has left stays
        return os.urandom(8).hex()
    return text.replace("-", "")[:16]


def locked(path: str | Path, kind: int) -> int:
    """A descriptor that has the lock of this directory, LOCK_SH or LOCK_EX.

    Raises OSError: BlockingIOError if somebody has another kind, PermissionError if the
    directory is another user's.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(f"{path} is another user's")
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove_former(parent: Path, prefix: str) -> None:
    try:
        former = list(parent.glob(f"{prefix}*"))
    except FileNotFoundError:  # somebody has removed that meanwhile
        return
    for path in former:
        with suppress(OSError):  # somebody's, or gone meanwhile
            lock = locked(path, fcntl.LOCK_EX)
            log.info("removing what a dead agent left: %s", path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
