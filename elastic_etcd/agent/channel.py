"""The agent's end of the channel to its workers: a Unix socket with an abstract name.

Such a name is in no file system, so nobody can remove it. It is a network namespace's, which hosts
and containers may share, so it is drawn at random, and who may call is asked of the kernel: this
user, in this agent's process namespace or one below it.

No call blocks, and nothing that a worker sends is trusted, since it runs its user's code. A worker
that sends what it must not, sends too much or does not read loses its connection, with a warning,
and nothing else happens. The messages are described in docs/contributing/channel.md.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable

from elastic_etcd.agent.inbox import Timer
from elastic_etcd.protocol import messages
from elastic_etcd.protocol.packets import address_of, peer_of, receive

_WORKERS = 1024  # connections
_NAMES = 128  # that one worker may have us keep: copies of the pieces of many ranks, for one
_SHARED = 24  # that one worker may share
_UNREAD = 1 << 18  # bytes that a worker may leave unread
_DESCRIPTOR = 1 << 12  # and a descriptor counts for so many: a process may have few of them
_QUESTIONS = 16  # without an answer so far
_ACCEPT_AGAIN = 1.0

log = logging.getLogger(__name__)


class ChannelServer:
    """The socket at which this node's workers call.

    `take(channel, message)` is given what the server itself does not answer, and last
    Disconnected() of each worker that had said hello; it is called from the event loop.
    """

    def __init__(self, take: Callable[["WorkerChannel", messages.Heard], None]) -> None:
        self.take = take
        # Descriptors, which outlive the workers that gave them: of one local rank, or of all.
        self.kept: dict[tuple[int, str], int] = {}
        self.shared: dict[str, int] = {}
        self._sharers: dict[str, set[int]] = {}
        self.channels: set[WorkerChannel] = set()
        self.leaving = False  # whether this node is to leave
        self.reason = ""  # why the present generation was begun
        self.name = ""  # of the socket
        self._socket: socket.socket | None = None
        self._again = Timer()

    def open(self) -> str:
        """Listen at a name of its own, which is returned. Raises OSError."""
        self.name = f"@elastic_etcd-{os.urandom(16).hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(address_of(self.name))
        self._socket.listen(_WORKERS)
        asyncio.get_running_loop().add_reader(self._socket, self._accept)
        return self.name

    def close(self) -> None:
        """Hang up on everybody, and let go of what was kept."""
        for channel in tuple(self.channels):
            channel.close()
        self._again.cancel()
        if self._socket:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        for fd in (*self.kept.values(), *self.shared.values()):
            os.close(fd)
        self.kept.clear()
        self.shared.clear()

    def keep(self, local_rank: int, name: str, fd: int) -> None:
        """Own `fd` from here on. Raises ValueError when this worker has too many."""
        names = [n for rank, n in self.kept if rank == local_rank]
        if name not in names and len(names) >= _NAMES:
            os.close(fd)
            raise ValueError(f"more than {_NAMES} descriptors to keep")
        older = self.kept.pop((local_rank, name), None)
        self.kept[local_rank, name] = fd
        if older is not None:
            os.close(older)

    def share(self, local_rank: int, name: str, fd: int) -> int:
        """Own `fd` from here on; gives what is shared by that name, which is the first's `fd`.

        Raises ValueError when this worker shares too many.
        """
        sharers = self._sharers.setdefault(name, set())
        sharers.add(local_rank)
        if sum(local_rank in ranks for ranks in self._sharers.values()) > _SHARED:
            os.close(fd)
            self.drop(local_rank, name)
            raise ValueError(f"more than {_SHARED} descriptors to share")
        if self.shared.setdefault(name, fd) != fd:
            os.close(fd)
        return self.shared[name]

    def drop(self, local_rank: int, name: str) -> None:
        """Let go of what is kept by that name, and of what nobody else shares."""
        fds = [self.kept.pop((local_rank, name), None)]
        sharers = self._sharers.get(name, {local_rank})
        sharers.discard(local_rank)
        if not sharers:
            self._sharers.pop(name, None)
            fds.append(self.shared.pop(name, None))
        for fd in fds:
            if fd is not None:
                os.close(fd)

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptors left: it would be readable again at once
            log.warning("a worker's call can't be taken: %s", error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            self._again.start(_ACCEPT_AGAIN, loop.add_reader, self._socket, self._accept)
            return
        pid, uid = peer_of(sock)
        why = "too many have called" if len(self.channels) >= _WORKERS else ""
        if not pid:
            why = "it is in another container"
        if uid != os.geteuid():
            why = f"it is user {uid}"
        if why:
            log.warning("process %d calls and is not answered: %s", pid, why)
            sock.close()
            return
        self.channels.add(WorkerChannel(self, sock, pid))


class WorkerChannel:
    """The connection of one process that has called.

    `local_rank` and `generation` are what it said of itself; `generation` follows the worker from
    one world to the next.
    """

    def __init__(self, server: ChannelServer, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        self.local_rank = self.generation = -1
        self._server = server
        self._socket = sock
        self._unsent: deque[tuple[bytes, int]] = deque()
        self._greeted = self._closed = False
        self._questions: set[int] = set()
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock, self._readable)

    def send(self, message: messages.FromAgent, fd: int = -1) -> bool:
        """Send it, or queue it; False when the worker is gone. Never blocks; `fd` stays ours."""
        if self._closed:
            return False
        if isinstance(message, messages.NextWorld):
            self.generation = message.generation
        elif isinstance(message, messages.Current):
            self._questions.discard(message.id)
        try:
            self._unsent.append((messages.encode(message), os.dup(fd) if fd >= 0 else -1))
        except (OSError, ValueError) as error:
            self._drop(f"nothing can be handed to it: {error}")
        if len(self._unsent) == 1:
            self._write_packets()
        unread = (len(packet) + _DESCRIPTOR * (fd >= 0) for packet, fd in self._unsent)
        if sum(unread) > _UNREAD:
            self._drop("it does not read what it is told")
        return not self._closed

    def close(self) -> None:
        """Hang up, without a Disconnected()."""
        if self._closed:
            return
        self._closed = True
        self._server.channels.discard(self)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        self._socket.close()
        for _, fd in self._unsent:
            if fd >= 0:
                os.close(fd)

    def _drop(self, why: str) -> None:
        name = f"the worker of local rank {self.local_rank}" if self._greeted else "a process"
        log.warning("hanging up on %s (pid %d): %s", name, self.pid, why)
        self._hang_up()

    def _hang_up(self) -> None:
        if not self._closed:
            self.close()
            if self._greeted:
                self._server.take(self, messages.Disconnected())

    def _readable(self) -> None:
        try:
            packet, fds, flags = receive(self._socket, 4)
        except BlockingIOError:
            return
        except OSError as error:
            log.debug("pid %d: %s", self.pid, errno.errorcode.get(error.errno or 0))
            self._hang_up()
            return
        if not packet:
            _close_all(fds)
            self._hang_up()
            return
        try:
            _check_whole(flags)
            self._hear(messages.from_worker(packet), fds)
        except ValueError as error:
            self._drop(f"malformed: {error}")
        finally:
            _close_all(fds)

    def _hear(self, message: messages.FromWorker, fds: list[int]) -> None:
        """Take a message and its descriptor, which is taken out of `fds`."""
        if isinstance(message, messages.Hello) == self._greeted:
            raise ValueError("hello comes first, and once")
        if fds and not isinstance(message, messages.Keep | messages.Share):
            raise ValueError("a descriptor without a keep or share")
        match message:
            case messages.Hello():
                self._greet(message)
            case messages.Keep(number, name):
                self._server.keep(self.local_rank, name, _one(fds, "a keep"))
                self.send(messages.Kept(number, name))
            case messages.Share(number, name):
                fd = self._server.share(self.local_rank, name, _one(fds, "a share"))
                self.send(messages.Recalled(number, name, found=True), fd)
            case messages.Drop(name):
                self._server.drop(self.local_rank, name)
            case messages.Recall(number, name):
                fd = self._server.kept.get((self.local_rank, name), -1)
                self.send(messages.Recalled(number, name, found=fd >= 0), fd)
            case messages.AskCurrent(number):
                self._questions.add(number)
                if len(self._questions) > _QUESTIONS:
                    raise ValueError("too many questions at once")
                self._server.take(self, message)
            case messages.AskLeaving(number):
                self.send(messages.Leaving(number, self._server.leaving))
            case _:
                self._server.take(self, message)

    def _greet(self, hello: messages.Hello) -> None:
        if hello.v != messages.VERSION:
            raise ValueError(f"it speaks version {hello.v}, this agent {messages.VERSION}")
        self.local_rank, self.generation = hello.local_rank, hello.generation
        self._greeted = True
        self.send(messages.Welcome(messages.VERSION, self._server.reason))

    def _write_packets(self) -> None:
        while self._unsent and not self._closed:
            packet, fd = self._unsent[0]
            try:
                socket.send_fds(self._socket, [packet], [fd] if fd >= 0 else [])
            except BlockingIOError:
                break
            except OSError:
                # Its end is about to be read, and told from there.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                return
            if fd >= 0:
                os.close(fd)
            self._unsent.popleft()
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        if self._unsent:
            loop.add_writer(self._socket, self._write_packets)
        else:
            loop.remove_writer(self._socket)


def _check_whole(flags: int) -> None:
    """Raise ValueError for a packet that was cut."""
    if flags & socket.MSG_TRUNC:
        raise ValueError(f"more than {messages.LONGEST} bytes at once")
    if flags & socket.MSG_CTRUNC:
        raise ValueError("too many descriptors at once")


def _one(fds: list[int], what: str) -> int:
    """Take the descriptor that came along. Raises ValueError if there is another number of them."""
    if len(fds) != 1:
        raise ValueError(f"{what} has one descriptor")
    return fds.pop()


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
