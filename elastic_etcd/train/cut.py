"""Frees a thread that waits inside gloo or the store for a peer that will never answer.

Neither can be told to give up: ProcessGroupGloo.abort() leaves a wait as it is (torch 2.13), and
a wait for a key ends with its time-out. Their connections can be shut down under them, though,
from another thread: then each wait on them fails at once.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_FDS = Path("/proc/self/fd")


def cut(port: int) -> None:
    """Shut down all of gloo's connections, and those to a store at `port`.

    Gloo's are found by the epoll instance of its device, whenever the group was made: it watches
    a pipe, a listening TCP socket and its connections, and no other library's does. The listening
    socket is left alone, since gloo ends the process when accept fails.
    """
    for fd in map(int, os.listdir(_FDS)):  # noqa: PTH208 - names, and no objects
        match _target(fd).partition(":"):
            case "socket", _, _:
                with _borrowed(fd) as sock:
                    if sock and _peer_port(sock) == port:
                        _shut(sock)
            case "anon_inode", _, "[eventpoll]":
                _cut_gloo(fd)


def _cut_gloo(epoll: int) -> None:
    watched = list(_watched(epoll))
    if not any(_target(fd).startswith("pipe:") for fd in watched):
        return
    with ExitStack() as stack:
        sockets = [sock for fd in watched if (sock := stack.enter_context(_borrowed(fd)))]
        connections = [sock for sock in sockets if not _listens(sock)]
        if len(connections) < len(sockets):
            for sock in connections:
                _shut(sock)


def _watched(epoll: int) -> Iterator[int]:
    """What an epoll instance of this process waits for; see proc_pid_fdinfo(5)."""
    with suppress(OSError):
        for line in Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines():
            if line.startswith("tfd:"):
                yield int(line.split()[1])


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket | None]:
    """A TCP socket by a descriptor of ours, since another thread may close `fd` any time."""
    if not _target(fd).startswith("socket:"):
        yield None
        return
    try:
        sock = socket.socket(fileno=os.dup(fd))
    except OSError:  # it has been closed just now
        yield None
        return
    with sock:
        yield sock if sock.family in (socket.AF_INET, socket.AF_INET6) else None


def _target(fd: int) -> str:
    with suppress(OSError):
        return str((_FDS / str(fd)).readlink())
    return ""


def _peer_port(sock: socket.socket) -> int | None:
    with suppress(OSError):
        return int(sock.getpeername()[1])
    return None


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):  # it is not connected any more
        sock.shutdown(socket.SHUT_RDWR)
