"""Frees threads that wait in gloo, NCCL or the store for a peer that will never answer.

gloo and the store have no way to give up: ProcessGroupGloo.abort() leaves a wait as it is (torch
2.13), and a wait for a key ends with its time-out. `abort_gloo` shuts their connections down under
them, from another thread: then each wait on them fails at once. NCCL's communicators can be
aborted, which `abort_nccl` does; it is written against torch 2.4 to 2.13, whose differences it asks
for by name.
"""

import ipaddress
import os
import socket
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

Address: TypeAlias = tuple[str, int]  # an IP address and a port

_FDS = Path("/proc/self/fd")


def addresses_of(host: str, port: int) -> frozenset[Address]:
    """All addresses that a name may stand for, none if it can't be looked up."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return frozenset(_plain(str(address[0]), port) for *_, address in found)
    return frozenset()


def strangers() -> frozenset[str]:
    """The devices of gloo's that are there before the group is made, and so are another's."""
    return frozenset(device for fd in _descriptors() if (device := _device_of(fd)))


def abort_gloo(store: Collection[Address], strange: Collection[str] = ()) -> None:
    """Shut down all of gloo's connections, and those to a store at one of these addresses.

    Gloo's are found by the epoll instance of its device, whenever the group was made: it watches
    one pipe, one listening TCP socket, its connections and nothing else. The listening socket is
    left alone, since gloo ends the process when accept fails. So is what is `strange`.
    """
    for fd in _descriptors():
        with _tcp_socket(fd) as sock:
            if sock and _peer(sock) in store:
                _shut_down(sock)
        device = _device_of(fd)
        if device and device not in strange:
            for watched in list(_watched_by(fd)):
                with _tcp_socket(watched) as sock:
                    if sock and not _listens(sock):
                        _shut_down(sock)


def abort_nccl(aborted: list[Any]) -> None:
    """Abort this worker's communicators, so that no thread waits for them.

    `aborted` are backends that have been aborted before; the others are added. All at once, since
    one by one can deadlock (pytorch#119797). torch's groups of NCCL calls would not do: they are
    the calling thread's, and `abort` works in another one. Raises RuntimeError.
    """
    backends = [backend for backend in _nccl_backends() if backend not in aborted]
    if not backends:
        return
    with ThreadPoolExecutor(len(backends)) as threads:
        errors = [each.exception() for each in [threads.submit(_abort, b) for b in backends]]
    aborted += [b for b, error in zip(backends, errors, strict=True) if not error]
    for error in filter(None, errors):  # it is tried again
        raise error


def _abort(backend: Any) -> None:
    (getattr(backend, "abort", None) or backend._shutdown)()  # noqa: SLF001 - torch < 2.6


def nccl_error() -> str:
    """The error that NCCL's watchdog has met on this worker, as "TIMEOUT"; "" for none.

    Older versions of torch do not say.
    """
    telling = [backend for backend in _nccl_backends() if hasattr(backend, "get_error")]
    errors = [backend.get_error().name for backend in telling]
    return next((error for error in errors if error != "SUCCESS"), "")


def has_nccl() -> bool:
    """Whether one of this worker's process groups is NCCL's."""
    return bool(_nccl_backends())


def uses_nccl() -> bool:
    """Whether this process trains on NVIDIA devices."""
    return bool(torch.cuda.is_available() and dist.is_nccl_available())


def _nccl_backends() -> list[Any]:
    if not (uses_nccl() and dist.is_initialized()):
        return []
    found = []
    for group in tuple(dist.distributed_c10d._world.pg_map):  # noqa: SLF001
        with suppress(RuntimeError):  # this group has nothing for CUDA
            backend = unwrapped(group._get_backend(torch.device("cuda")))  # noqa: SLF001
            if isinstance(backend, dist.ProcessGroupNCCL):
                found.append(backend)
    return found


def unwrapped(backend: Any) -> Any:
    """The backend itself: TORCH_DISTRIBUTED_DEBUG=DETAIL puts one around it."""
    return getattr(backend, "wrapped_pg", backend)


def _descriptors() -> Iterator[int]:
    yield from map(int, os.listdir(_FDS))  # noqa: PTH208 - names, and no objects


def _device_of(fd: int) -> str:
    """The pipe of the gloo device whose epoll instance this is, as "pipe:[1234]"; "" for all else.

    A store's server watches an eventfd, too, and asyncio's loops a pair of Unix sockets.
    """
    if _target_of(fd) != "anon_inode:[eventpoll]":
        return ""
    pipes, listening = [], 0
    for each in _watched_by(fd):
        target = _target_of(each)
        with _tcp_socket(each) as sock:
            if sock:
                listening += _listens(sock)
            elif target.startswith("pipe:"):
                pipes.append(target)
            elif target:
                return ""
    return pipes[0] if (len(pipes), listening) == (1, 1) else ""


def _watched_by(epoll: int) -> Iterator[int]:
    """The descriptors that an epoll instance of this process watches; see proc_pid_fdinfo(5)."""
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
    """The object behind a descriptor, as `socket:[1234]`; "" once it is closed."""
    with suppress(OSError):
        return str((_FDS / str(fd)).readlink())
    return ""


def _peer(sock: socket.socket) -> Address | None:
    with suppress(OSError):
        host, port, *_ = sock.getpeername()
        return _plain(host, port)
    return None


def _plain(host: str, port: int) -> Address:
    """An IPv4 address as such, also where a socket of IPv6 shows it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address), port


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # it is not connected any more
        sock.shutdown(socket.SHUT_RDWR)
