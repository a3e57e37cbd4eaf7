"""Workers that the warm pool has forked: first they wait for their order, then they run.

A fork of the pool's becomes this process's own child: the pool forks a process that forks the
worker and ends, and this process is a child subreaper meanwhile, so it inherits the worker. Only
meanwhile, because orphans of workers would come to it, too, and nobody would reap them.
"""

import asyncio
import ctypes
import errno
import json
import os
import signal
import socket
from collections.abc import Callable, Sequence

from elastic_etcd.agent.worker import Started

_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """A worker from the pool: a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit status, minus the signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


class Spare:
    """A worker that is on its way or waits for its order; `lost(spare)` if it ends before that.

    `ask(channel)` asks the pool for it. Raises OSError when that cannot be.
    """

    _on_their_way = 0

    def __init__(
        self, ask: Callable[[socket.socket], None], lost: "Callable[[Spare], None]"
    ) -> None:
        self.pid: int | None = None
        self._lost = lost
        self._then: Callable[[Started], None] | None = None
        self._pidfd = -1
        # On a SOCK_SEQPACKET a message never parts from its descriptors.
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        Spare._adopt(+1)  # first: init would inherit a worker that is faster
        try:
            with theirs:
                ask(theirs)
        except OSError:
            Spare._adopt(-1)
            self._channel.close()
            raise
        asyncio.get_running_loop().add_reader(self._channel, self._arrived)

    @classmethod
    def _adopt(cls, more: int) -> None:
        cls._on_their_way += more
        wanted = bool(cls._on_their_way)
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted)) != 0:
            raise OSError(errno.EINVAL, "prctl(PR_SET_CHILD_SUBREAPER)")

    def order(self, fds: Sequence[int], then: Callable[[Started], None]) -> None:
        """Send its order, `fds`; `then` is called here and now if it waits already.

        Raises OSError when it is gone.
        """
        socket.send_fds(self._channel, [b"run"], fds)
        if self.pid is None:
            self._then = then
        else:
            self._forget()
            then(Forked(self.pid))

    def end(self) -> None:
        """It isn't needed."""
        if self.pid is None:  # it ends by itself when it finds the channel closed
            asyncio.get_running_loop().remove_reader(self._channel)
            Spare._adopt(-1)
        else:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self._forget()

    def _arrived(self) -> None:
        """It has said its pid, or the pool could not fork it."""
        loop = asyncio.get_running_loop()
        try:
            words = self._channel.recv(1 << 10)
        except ConnectionResetError:
            words = b""
        loop.remove_reader(self._channel)
        Spare._adopt(-1)
        then = self._then
        if not words:
            self._forget()
            if then:
                then(OSError(errno.EAGAIN, "the warm pool could not fork"))
            else:
                self._lost(self)
            return
        self.pid = int(json.loads(words)["pid"])
        if then:
            self._forget()
            then(Forked(self.pid))
            return
        self._pidfd = os.pidfd_open(self.pid)
        loop.add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        assert self.pid is not None
        os.waitpid(self.pid, 0)
        self._forget()
        self._lost(self)

    def _forget(self) -> None:
        """Close what is held for it; a message that it has not read yet stays readable."""
        self._channel.close()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
