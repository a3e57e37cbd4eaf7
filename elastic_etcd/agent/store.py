"""The TCPStore behind MASTER_ADDR and MASTER_PORT, hosted by a child of group rank 0's agent.

The agent binds the socket itself, to port 0, so that the address is known before anything is
started and there is no race for a free port; it needs no torch for that. Connections queue in the
kernel until the child, which imports torch, serves them. Each generation has a fresh store: one
that is used again hands out stale NCCL ids (pytorch#135712).
"""

import asyncio
import contextlib
import errno
import ipaddress
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from elastic_etcd import trampoline
from elastic_etcd.agent.environment import without_secrets
from elastic_etcd.agent.warm import WarmPool
from elastic_etcd.agent.worker import Process, Started

_PROGRAM = Path(trampoline.__file__).parent / "train" / "store_host.py"
_BACKLOG = 2048
_TAIL = 1 << 13


def bind(address: str) -> tuple[socket.socket, int]:
    """A listening socket on `address` and its port, which the system chose.

    An address that isn't this machine's own (NAT, a service's name) means all interfaces. Names
    are not looked up. Raises OSError when the system has no socket to give.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return _listen(*_everywhere())
    try:
        return _listen(socket.AF_INET6 if ip.version == 6 else socket.AF_INET, address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return _listen(*_everywhere())


class StoreHost:
    """The child that serves the stores, started at first use and kept for later generations.

    `died(text)` is called once if it ends before `close`, with its last words. It dies with the
    agent. With a warm `pool` it is forked there and need not import torch.
    """

    def __init__(self, died: Callable[[str], None], pool: WarmPool | None = None) -> None:
        self._died = died
        self._pool = pool
        self._child: _Child | None = None

    def warm(self) -> None:
        """Start the child ahead of its first use: exec'd it needs a second or two for torch."""
        if self._child is None:
            try:
                self._child = _Child(self._pool, self._on_death)
            except OSError as error:
                text = f"the store host can't be started: {error.strerror}"
                asyncio.get_running_loop().call_soon(self._died, text)

    def serve(self, generation: int, sock: socket.socket) -> None:
        """Serve a fresh store on `sock`, which is the child's from here on; drop the older one."""
        self.warm()
        with sock:
            if self._child is not None:
                self._child.hand_over(generation, sock)

    def close(self) -> None:
        """End the child and its store."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _on_death(self, text: str) -> None:
        self.close()
        self._died(text)


class _Child:
    """One store process, the socketpair to it and its standard error."""

    def __init__(self, pool: WarmPool | None, on_death: Callable[[str], None]) -> None:
        self._on_death = on_death
        self._last_words = bytearray()
        self._process: Process | None = None
        self._pidfd = -1
        self._closed = False
        # A message is a unit on a SOCK_SEQPACKET: a generation never parts from its descriptor.
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stderr, stderr = os.pipe()
        os.set_blocking(self._stderr, False)
        try:
            with theirs:
                _start(pool, theirs, stderr, self._begun)
        except OSError:
            self._channel.close()
            os.close(self._stderr)
            raise
        finally:
            os.close(stderr)
        asyncio.get_running_loop().add_reader(self._stderr, self._read_stderr)

    def hand_over(self, generation: int, sock: socket.socket) -> None:
        # When it has just died, `_on_exit` is about to say so.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._channel, [str(generation).encode()], [sock.fileno()])

    def close(self) -> None:
        self._closed = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._stderr)
        self._channel.close()  # one that is still on its way ends by that
        os.close(self._stderr)
        if self._process:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            _end(self._process)

    def _begun(self, process: Started) -> None:
        if isinstance(process, OSError):
            self._on_death(f"the store host can't be started: {process.strerror}")
        elif self._closed:
            _end(process)
        else:
            self._process = process
            self._pidfd = os.pidfd_open(process.pid)
            asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    def _read_stderr(self) -> bool:
        try:
            chunk = os.read(self._stderr, 1 << 16)
        except BlockingIOError:
            return False
        self._last_words += chunk
        del self._last_words[:-_TAIL]
        if not chunk:
            asyncio.get_running_loop().remove_reader(self._stderr)
        return bool(chunk)

    def _on_exit(self) -> None:
        assert self._process is not None
        while self._read_stderr():
            pass
        code = self._process.poll()
        lines = self._last_words.decode(errors="replace").strip().splitlines()
        words = lines[-1] if lines else "it said nothing"
        self._on_death(f"the store host ended with exit code {code}: {words}")


def _start(
    pool: WarmPool | None, channel: socket.socket, stderr: int, then: Callable[[Started], None]
) -> None:
    env = without_secrets(os.environ)
    # It computes nothing, and the workers may be importing torch at the same time.
    env.update(OMP_NUM_THREADS="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    # torch looks up the name of every peer (pytorch#159007), and a name server may not answer.
    env.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    if pool and pool.ready:
        command = (sys.executable, "-P", str(_PROGRAM))
        pool.fork(command, env, stderr, stderr, then, given=[channel.fileno()])
        return
    # By its path and with -P, so that no file in the working directory stands in for a module.
    child = [sys.executable, "-P", str(_PROGRAM), str(channel.fileno())]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--", *child],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(channel.fileno(),),
        process_group=0,  # out of the reach of the terminal's Ctrl-C
    )
    then(process)


def _end(process: Process) -> None:
    while process.poll() is None:
        pidfd = os.pidfd_open(process.pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [])
        os.close(pidfd)


def _everywhere() -> tuple[socket.AddressFamily, str]:
    # What torch's own store listens on. S104: the address to be reached at is not this machine's.
    if socket.has_dualstack_ipv6():
        return socket.AF_INET6, "::"
    return socket.AF_INET, "0.0.0.0"  # noqa: S104


def _listen(family: socket.AddressFamily, address: str) -> tuple[socket.socket, int]:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, 0))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock, sock.getsockname()[1]
