"""The system calls that a Python may be built without, or a kernel refuse: pidfds and memory files.

The Pythons of conda, of miniforge and of older versions of uv were built with old headers: they
lack these calls on every kernel, and here they are made by number. A kernel before 5.3 and some
containers refuse pidfds; then `has_pidfds` is False, and `processes.open_pidfd` has another way.
There is none without memory files, see `check`: these have no name in any folder, and end with
their last descriptor.
"""

import ctypes
import errno
import fcntl
import functools
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from elastic_etcd.errors import ElasticEtcdError, UsageError

# No descriptor is free: nothing can be watched until something else is closed, and a process that
# can't be seen may still run. So it is tried again after so many seconds.
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
OPEN_AGAIN = 0.2
_DESCRIPTORS = 64  # that an agent of one worker takes, and some to spare
_THREADS = 32  # likewise, with the processes that it starts

MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # on every architecture
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "riscv64": 279, "ppc64le": 360, "s390x": 350}
_MADV_POPULATE_WRITE = 23
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


_limit_before: list[int] = []  # of descriptors, of a process that has raised it


def raise_descriptor_limit() -> None:
    """Let this process open as many descriptors as it may: `ulimit -n` is often 1,024 of a million.

    Children begin with the limit of before (`childrens_descriptor_limit`): some programs close all
    that they could have open, and select() takes no descriptor from 1,024 on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _limit_before[:] = [soft]
    with suppress(ValueError, OSError):  # the kernel allows less than the limit says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def childrens_descriptor_limit() -> int:
    """The soft limit of descriptors for a child of this process."""
    return _limit_before[0] if _limit_before else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def check() -> None:
    """Raise UsageError if this machine refuses a call for which there is no other way.

    Also if it has no /proc, or too few descriptors or threads for an agent: gRPC would crash.
    """
    if not Path("/proc/self/stat").exists():
        raise UsageError(
            "no /proc, by which an agent finds what its workers have started.\n"
            "Mount it, `mount -t proc proc /proc`, or let the container have it"
        )
    try:
        with ExitStack() as held:
            fd = memfd_create("elastic_etcd-check", MFD_CLOEXEC)
            held.callback(os.close, fd)
            for _ in range(_DESCRIPTORS):
                held.callback(os.close, os.dup(fd))
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise UsageError(
                f"{error.strerror}: an agent needs more than {_DESCRIPTORS}, this process may have "
                f"{most} (ulimit -Hn).\nAllow more before it is started: `ulimit -n 65536`, or "
                "LimitNOFILE= in a systemd unit"
            ) from None
        raise UsageError(
            f"memfd_create: {error.strerror}: {machine()}, or the container's seccomp profile, "
            "does not let a process make files in memory, in which training keeps its state.\n"
            "Take Linux 3.17 or newer, and allow memfd_create in the profile"
        ) from None
    over = threading.Event()
    try:
        for _ in range(_THREADS):
            threading.Thread(target=over.wait, daemon=True).start()
    except RuntimeError as error:
        raise ElasticEtcdError(
            f"{error}: an agent and its first processes need {_THREADS}, and fewer are left of "
            "what this user or container may have.\nAllow more before it is started: `ulimit -u` "
            "and `-v`, TasksMax= in a systemd unit, or the pids limit of the container"
        ) from None
    finally:
        over.set()


def machine() -> str:
    """The kernel's name and release, and the processor's."""
    seen = os.uname()
    return f"{seen.sysname} {seen.release} ({seen.machine})"


@functools.cache
def has_pidfds() -> bool:
    """Whether pidfds can be opened and signalled here. Raises OSError if no descriptor is free."""
    try:
        pidfd = pidfd_open(os.getpid())
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return False
    try:
        pidfd_send_signal(pidfd, 0)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def is_open_to_its_user() -> bool:
    """Whether this user's other processes may open the descriptors of this one in /proc.

    They may not if its program has capabilities (`setcap`), so that its /proc belongs to root.
    """
    return Path("/proc/self/fd").stat().st_uid == os.geteuid()


def pidfd_open(pid: int) -> int:
    """A descriptor of this process. Raises OSError."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _syscall("pidfd_open", _PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Send a signal to the process of this pidfd. Raises OSError."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _syscall("pidfd_send_signal", _PIDFD_SEND_SIGNAL, pidfd, number, None, 0)


def memfd_create(name: str, flags: int) -> int:
    """An empty file in memory. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    number = _MEMFD_CREATE.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, "this Python has no os.memfd_create")
    return _syscall("memfd_create", number, name.encode(), flags)


def seal_size(fd: int) -> None:
    """Let no process change the size of a memory file from here on. Raises OSError."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)


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


def populate(address: int, size: int) -> None:
    """Have the memory of these bytes at once: page after page takes 1.3 times as long, or more.

    Huge pages take five times as long where memory is in pieces. A kernel before 5.14 does nothing.
    """
    page = resource.getpagesize()
    start, end = -(-address // page) * page, (address + size) // page * page
    if end > start:
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE)


def signal_at_parents_death(number: int) -> None:
    """Get this signal when the thread that has started this process ends. Raises OSError."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, int(number))


def adopt_orphans(*, wanted: bool) -> None:
    """Get the orphans of this process's children as children, instead of init. Raises OSError."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, int(wanted))


def _prctl(name: str, option: int, value: int) -> None:
    if _libc().prctl(option, value) != 0:
        raise _error(f"prctl({name})")


def _syscall(name: str, number: int, *args: int | bytes | None) -> int:
    given = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result = int(_libc().syscall(ctypes.c_long(number), *given))
    if result < 0:
        raise _error(name)
    return result


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
