"""The agent's directories: one in memory, for checkpoints, and one for its socket and its etcd.

They outlive the workers, and not the agent. It removes them at its end, and its guardian does if
the agent is killed. Beyond both, the agent holds a lock on each that the kernel lets go of at its
end, in whatever container that ran: the next agent here that gets the lock knows that nobody uses
the directory any more.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

_MEMORY, _OWN = "elastic_etcd_memory-", "elastic_etcd_agent-"
_LONGEST = 50  # bytes of TMPDIR: a Unix socket's address has 107

log = logging.getLogger(__name__)


def memory_directory(parent: str) -> tuple[str, Callable[[], None]]:
    """Make one below `parent`; gives its path and what removes it. "" where none can be made.

    A thread removes what dead agents of this user have left there.
    """
    return _directory(parent, _MEMORY, "ee.memory_checkpoint")


def own_directory() -> tuple[str, Callable[[], None]]:
    """Make one for all else of an agent; gives the same two.

    It is below TMPDIR, or below /tmp where that is too long for a socket's path.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _LONGEST:
        parent = "/tmp"  # noqa: S108 - mkdtemp makes one in it
    return _directory(parent, _OWN, "this agent's own files")


def _directory(parent: str, prefix: str, purpose: str) -> tuple[str, Callable[[], None]]:
    remove_former = partial(_remove_former, Path(parent), prefix)
    threading.Thread(target=remove_former, name="memory", daemon=True).start()
    try:
        path, lock = _make(parent, prefix)
    except OSError as error:
        log.info("no directory for %s in %s: %s", purpose, parent, error.strerror)
        return "", lambda: None
    return path, partial(_remove, path, lock)


def _make(parent: str, prefix: str) -> tuple[str, int]:
    """The path, and the descriptor that has the lock."""
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        with suppress(FileNotFoundError):  # another agent took it for one that was left
            try:
                lock = _locked(path)
            except OSError:  # this file system has no locks
                Path(path).rmdir()
                raise
            if lock >= 0 and Path(path).exists():
                return path, lock
            if lock >= 0:
                os.close(lock)


def _locked(path: str | Path) -> int:
    """A descriptor that has the lock of this directory; -1 if it is somebody's. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            return -1
        raise
    return fd


def _remove(path: str, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _remove_former(parent: Path, prefix: str) -> None:
    for path in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # somebody else's, or gone meanwhile
            if path.stat(follow_symlinks=False).st_uid == os.geteuid():
                lock = _locked(path)
                if lock >= 0:
                    log.info("removing what a dead agent left: %s", path)
                    _remove(str(path), lock)
