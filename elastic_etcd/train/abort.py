"""Frees threads that wait in gloo, NCCL or the store for a peer that will never answer.

gloo and the store can't be told to give up: ProcessGroupGloo.abort() leaves a wait as it is (torch
2.13), and a wait for a key ends with its time-out. `abort_gloo` shuts their connections down under
them, from another thread: then each wait on them fails at once. NCCL's communicators can be
aborted, which `abort_nccl` does; it is written against torch 2.4 to 2.13, and what differs between
them is asked for by name.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_FDS = Path("/proc/self/fd")


def abort_gloo(port: int) -> None:
    """Shut down all of gloo's connections, and those to a store at `port`.

    Gloo's are found by the epoll instance of its device, whenever the group was made: it watches
    a pipe, a listening TCP socket and its connections, and no other library's does. The listening
    socket is left alone, since gloo ends the process when accept fails.
    """
    for fd in map(int, os.listdir(_FDS)):  # noqa: PTH208 - names, and no objects
        match _target_of(fd).partition(":"):
            case "socket", _, _:
                with _tcp_socket(fd) as sock:
                    if sock and _peer_port(sock) == port:
                        _shut_down(sock)
            case "anon_inode", _, "[eventpoll]":
                _shut_down_watched(fd)


def abort_nccl(aborted: list[Any]) -> None:
    """End what runs on this worker's communicators, so that no thread waits for them.

    `aborted` are backends that have been aborted before; the others are added. All at once, since
    one by one can deadlock (pytorch#119797).
    """
    backends = [backend for backend in _nccl_backends() if backend not in aborted]
    aborted += backends
    grouped = backends and hasattr(backends[0], "_group_start")
    if grouped:
        backends[0]._group_start()  # noqa: SLF001 - torch has no public name for it
    for backend in backends:
        abort = getattr(backend, "abort", None) or backend._shutdown  # noqa: SLF001 - torch < 2.6
        abort()
    if grouped:
        backends[0]._group_end()  # noqa: SLF001


def uses_nccl() -> bool:
    """Whether this process trains on NVIDIA devices."""
    return bool(torch.cuda.is_available() and dist.is_nccl_available())


def _nccl_backends() -> list[Any]:
    if not (uses_nccl() and dist.is_initialized()):
        return []
    found = []
    for group in tuple(dist.distributed_c10d._world.pg_map):  # noqa: SLF001
        with suppress(RuntimeError):  # this group has nothing for CUDA
            backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001
            if isinstance(backend, dist.ProcessGroupNCCL):
                found.append(backend)
    return found


def _shut_down_watched(epoll: int) -> None:
    """The connections that an epoll instance watches, if it is gloo's."""
    watched = list(_watched_by(epoll))
    if not any(_target_of(fd).startswith("pipe:") for fd in watched):
        return
    with ExitStack() as stack:
        sockets = [sock for fd in watched if (sock := stack.enter_context(_tcp_socket(fd)))]
        connections = [sock for sock in sockets if not _listens(sock)]
        if len(connections) < len(sockets):
            for sock in connections:
                _shut_down(sock)


def _watched_by(epoll: int) -> Iterator[int]:
    """What an epoll instance of this process waits for; see proc_pid_fdinfo(5)."""
    with suppress(OSError):
        for line in Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines():
            if line.startswith("tfd:"):
                yield int(line.split()[1])


@contextmanager
def _tcp_socket(fd: int) -> Iterator[socket.socket | None]:
    """The TCP socket by a descriptor of ours, since another thread may close `fd` any time."""
    if not _target_of(fd).startswith("socket:"):
        yield None
        return
    try:
        sock = socket.socket(fileno=os.dup(fd))
    except OSError:  # it has been closed just now
        yield None
        return
    with sock:
        yield sock if sock.family in (socket.AF_INET, socket.AF_INET6) else None


def _target_of(fd: int) -> str:
    """What the descriptor stands for, as `socket:[1234]`; "" once it is closed."""
    with suppress(OSError):
        return str((_FDS / str(fd)).readlink())
    return ""


def _peer_port(sock: socket.socket) -> int | None:
    with suppress(OSError):
        return int(sock.getpeername()[1])
    return None


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # it is not connected any more
        sock.shutdown(socket.SHUT_RDWR)
