"""The TCPStore behind MASTER_ADDR and MASTER_PORT, served by a child of group rank 0's agent.

The agent binds the socket itself, to port 0, so that the address is known before anything is
started and there is no race for a free port; it needs no torch for that. Connections queue in the
kernel until the child, which imports torch, serves them. Each generation has a fresh store: one
that is used again hands out stale NCCL ids (pytorch#135712).
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from elastic_etcd import children
from elastic_etcd.agent.environment import without_secrets
from elastic_etcd.agent.inbox import Tasks
from elastic_etcd.agent.prefork import Prefork
from elastic_etcd.core.words import ended
from elastic_etcd.errors import ElasticEtcdError
from elastic_etcd.protocol.packets import channel_pair
from elastic_etcd.system.child_process import (
    ExitWatch,
    LastWords,
    Process,
    discard,
    end,
    exited,
    start,
)
from elastic_etcd.system.sockets import listen
from elastic_etcd.times import IMPORTED

_PROGRAM = Path(children.__file__).with_name("store_server.py")
_BACKLOG = 2048

log = logging.getLogger(__name__)


def bind(address: str) -> tuple[socket.socket, int]:
    """A listening socket on `address` and its port, which the system chose.

    An address that isn't this machine's own (NAT, a service's name) means all interfaces. Names
    are not looked up. Raises OSError when the system has no socket to give.
    """
    try:
        ipaddress.ip_address(address.partition("%")[0])
        sock = listen(address, 0, _BACKLOG)
    except ValueError:
        sock = listen("::", 0, _BACKLOG)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        sock = listen("::", 0, _BACKLOG)
    return sock, sock.getsockname()[1]


class StoreServer:
    """The child that serves the stores, started at first use and kept for later generations.

    When it ends before `close` the log has its last words, and `lost` is called with the newest
    generation that it has served, 0 for none, and why; the next generation has another child.
    It dies with the agent. With `prefork` it is forked and need not import torch.
    """

    def __init__(
        self,
        tasks: Tasks,
        prefork: Prefork | None = None,
        lost: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        self._tasks = tasks
        self._prefork = prefork
        self._tell_lost = lost
        self._generation = 0
        self._child: _Child | None = None
        self._offered: tuple[int, socket.socket] | None = None

    def offer(self, generation: int, address: str) -> int:
        """Bind a socket for the store of `generation`, once; gives its port. Raises OSError."""
        if self._offered is None or self._offered[0] != generation:
            self._withdraw_offer()
            self._offered = generation, bind(address)[0]
        return int(self._offered[1].getsockname()[1])

    def begin(self, generation: int, *, here: bool) -> None:
        """Serve the store of a generation that begins, if it is `here` and was offered."""
        if here and self._offered and self._offered[0] == generation:
            self.serve(*self._offered)
            self._offered = None
        self._withdraw_offer()

    def serve(self, generation: int, sock: socket.socket) -> None:
        """Serve a fresh store on `sock`, which then is the child's. The older store ends."""
        self._generation = generation
        with sock:
            if self._child is None or self._child.gone:
                try:
                    self._child = _Child(self._lost)
                except OSError as error:  # the generation begins when this has returned
                    asyncio.get_running_loop().call_soon(self._lost, _not_started(error))
                    return
                self._tasks.create(self._child.live(self._prefork))
            self._child.hand_over(generation, sock)

    def close(self) -> None:
        """End the child and its store."""
        if self._child is not None:
            self._child.close()
            self._child = None
        self._withdraw_offer()

    def _withdraw_offer(self) -> None:
        if self._offered:
            self._offered[1].close()
            self._offered = None

    def _lost(self, why: str) -> None:
        log.warning("nobody answers at the master endpoint any more: the store server %s", why)
        self._tell_lost(self._generation, why)


class _Child:
    """A store process, the socketpair to it and its standard error; `lost(why)` at its end.

    Raises OSError when no descriptor is free.
    """

    def __init__(self, lost: Callable[[str], None]) -> None:
        self.gone = False
        self._lost = lost
        self._process: Process | None = None
        self._watch: ExitWatch | None = None
        self._channel, self._theirs = channel_pair()
        try:
            stderr, self._stderr = os.pipe()
        except OSError:
            self._channel.close()
            self._theirs.close()
            raise
        self._words = LastWords(stderr)

    async def live(self, prefork: Prefork | None) -> None:
        """Start the process, and watch it."""
        try:
            process = await start_with_torch(
                _PROGRAM, prefork=prefork, channel=self._theirs, stderr=self._stderr
            )
        except OSError as error:
            self._lost(_not_started(error))
            self.close()
            return
        finally:
            os.close(self._stderr)
            self._theirs.close()
        if self.gone:
            discard(process)
            return
        self._process = process
        self._watch = ExitWatch(process, self._on_exit)

    def hand_over(self, generation: int, sock: socket.socket) -> None:
        # When it has just died, `_on_exit` is about to say so.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._channel, [str(generation).encode()], [sock.fileno()])

    def close(self) -> None:
        self.gone = True
        self._channel.close()  # one that is still on its way ends by that
        self._words.close()
        if self._watch:
            self._watch.close()
        if self._process:
            end(self._process)

    def _on_exit(self, code: int) -> None:
        self._lost(f"{ended(code)}: {self._words.drain()}")
        self.close()


def _not_started(error: OSError) -> str:
    return f"can't be started: {error.strerror}"


async def check_store() -> None:
    """Raise ElasticEtcdError if a store can't be served here; it costs an import of torch."""
    ours, theirs = channel_pair()
    ours.close()  # so that it ends when it has imported torch
    read, stderr = os.pipe()
    with contextlib.closing(LastWords(read)) as words:
        try:
            with theirs:
                process = await start_with_torch(
                    _PROGRAM, prefork=None, channel=theirs, stderr=stderr
                )
        finally:
            os.close(stderr)
        try:
            async with asyncio.timeout(IMPORTED):
                code = await exited(process)
        except TimeoutError:
            discard(process)
            return
        if code:
            raise ElasticEtcdError(
                f"{words.drain()}\nThis node could not serve the store of its world, and would end "
                "it for all others: it does not join. Put that right here"
            )


async def start_with_torch(
    program: Path,
    *arguments: str,
    prefork: Prefork | None,
    channel: socket.socket,
    stderr: int,
) -> Process:
    """Start a program of children/ that needs torch, with its end of a channel. Raises OSError."""
    env = without_secrets(os.environ)
    # It computes nothing, and the workers may be importing torch at the same time.
    env.update(OMP_NUM_THREADS="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    # By its path and with -P, so that no file in the working directory stands in for a module.
    command = (sys.executable, "-P", str(program), *arguments)
    if prefork and prefork.ready:
        try:
            return await prefork.fork(command, env, stderr, stderr, given=[channel.fileno()])
        except OSError as error:
            log.debug("no fork of %s: %s", program.stem, error)
    return await start(
        [*command, str(channel.fileno())],
        env,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(channel.fileno(),),
    )
