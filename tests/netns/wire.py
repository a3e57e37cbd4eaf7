"""Hosts in network namespaces of their own, and the wire between them, which can be cut.

Each host has a kernel's whole network stack and one TUN interface; this process carries the
packets from one to the other, or loses or delays them. It takes root and /dev/net/tun, but
neither netem nor iptables, and leaves nothing behind, however it ends: a namespace lives as long
as its processes, an interface as long as its descriptor.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import selectors
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
NETWORK = "10.77.0"
INTERFACE = "eth0"
_BURST = 1 << 15  # bytes that pass at once, where a host is slow

T = TypeVar("T")


class Host:
    """A network namespace at an address; what is started by `run` is in it."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        # A namespace is a thread's, and its children inherit it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.tun = self.run(self._enter)

    def run(self, do: Callable[[], T]) -> T:
        """Call it on this host."""
        return self._thread.submit(do).result()

    def _enter(self) -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET) < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"unshare: {os.strerror(error)}")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        request = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(tun, _TUNSETIFF, request)
        for command in (
            "link set lo up",
            f"address add {self.address}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        return tun

    def close(self) -> None:
        os.close(self.tun)
        self._thread.shutdown()


class Wire:
    """Carries packets between hosts; `loss` (0…1), `delay` (seconds, one way) and cuts apply to
    those that enter from now on. What is lost is chosen by the seed and the order of packets.
    """

    def __init__(self, names: Iterable[str], seed: int = 1) -> None:
        self.loss = self.delay = 0.0
        self.limits: dict[str, float] = {}  # bytes a second that a host sends and gets
        self._full: dict[str, float] = {}  # until when a host has used them up
        self._cuts: frozenset[tuple[str, str]] = frozenset()
        self.hosts = {
            name: Host(name, f"{NETWORK}.{number}") for number, name in enumerate(names, 1)
        }
        self._random = random.Random(seed)
        self._late: list[tuple[float, int, int, bytes]] = []  # due, tie-break, tun, packet
        self._count = itertools.count()
        self._end, self._ended = socket.socketpair()
        self._thread = threading.Thread(target=self._carry, name="wire")
        self._thread.start()

    def cut(self, sources: Iterable[str], targets: Iterable[str]) -> None:
        """From now on nothing that one of the first sends reaches one of the others."""
        self._cuts |= set(itertools.product(sources, targets))

    def cut_both_ways(self, some: Iterable[str], others: Iterable[str]) -> None:
        some, others = list(some), list(others)
        self.cut(some, others)
        self.cut(others, some)

    def heal(self) -> None:
        """All packets arrive, at once."""
        self._cuts, self.loss, self.delay, self.limits = frozenset(), 0.0, 0.0, {}

    def close(self) -> None:
        self._end.close()
        self._thread.join()
        self._ended.close()
        for host in self.hosts.values():
            host.close()

    def _carry(self) -> None:
        to = {socket.inet_aton(host.address): host for host in self.hosts.values()}
        with selectors.DefaultSelector() as selector:
            selector.register(self._ended, selectors.EVENT_READ)
            for host in self.hosts.values():
                selector.register(host.tun, selectors.EVENT_READ, host)
            while True:
                wait = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
                for key, _ in selector.select(wait):
                    if key.data is None:
                        return
                    self._take(key.data, to)
                while self._late and self._late[0][0] <= time.monotonic():
                    _, _, tun, packet = heapq.heappop(self._late)
                    _put(tun, packet)

    def _take(self, source: Host, to: dict[bytes, Host]) -> None:
        """Everything that a host has sent."""
        while True:
            try:
                packet = os.read(source.tun, 1 << 16)
            except BlockingIOError:
                return
            target = to.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if target is None or (source.name, target.name) in self._cuts:
                continue
            if self.loss and self._random.random() < self.loss:
                continue
            if self.limits and self._is_too_much(len(packet), source.name, target.name):
                continue
            if self.delay:
                due = time.monotonic() + self.delay
                heapq.heappush(self._late, (due, next(self._count), target.tun, packet))
            else:
                _put(target.tun, packet)

    def _is_too_much(self, size: int, *hosts: str) -> bool:
        """Whether one of these hosts sends or gets more than it can, so that this is lost."""
        now = time.monotonic()
        for name in hosts:
            if rate := self.limits.get(name):
                full = max(self._full.get(name, 0.0), now - _BURST / rate)
                if full > now:
                    return True
                self._full[name] = full + size / rate
        return False


def _put(tun: int, packet: bytes) -> None:
    with contextlib.suppress(BlockingIOError):  # a full queue loses packets on a real wire, too
        os.write(tun, packet)
