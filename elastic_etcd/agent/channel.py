"""The agent's end of the channel to its workers: a Unix socket in a directory of its own.

Nothing here blocks or trusts: a worker runs its user's code, so one that says what it must not,
says too much or doesn't listen loses its connection, with a warning, and nothing else happens.
What each message means is in docs/channel.md.
"""

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic_etcd.core.messages import FROM_WORKER, VERSION, Lines, decode, encode

_PEERS = 1024
_NAMES = 16  # that one worker may have us keep
_UNREAD = 1 << 18  # bytes that a worker may leave unread
_QUESTIONS = 16  # without an answer so far
_LONGEST_PATH = 107  # of a Unix socket's address
_ACCEPT_AGAIN = 1.0

log = logging.getLogger(__name__)


class Channels:
    """The socket at which this node's workers call.

    `heard(peer, message)` is given "elastic" and "parked" as they come in, and last
    {"type": "disconnected"} of each peer that had said hello. `current(peer, id)` is asked whether
    the peer's generation is the job's, and answers with `peer.send`. Both are called from the
    event loop. Descriptors that workers have kept are here until `close`.
    """

    def __init__(
        self,
        heard: Callable[["Peer", dict[str, Any]], None],
        current: Callable[["Peer", int], None],
    ) -> None:
        self.heard, self.current = heard, current
        self.kept: dict[tuple[int, str], int] = {}
        self.peers: set[Peer] = set()
        self._socket: socket.socket | None = None
        self._directory = ""
        self._again: asyncio.TimerHandle | None = None

    def open(self) -> str:
        """Listen; the socket's path, which only this user can reach. Raises OSError."""
        self._directory = tempfile.mkdtemp(prefix="elastic_etcd-")
        if len(os.fsencode(self._directory)) + 6 > _LONGEST_PATH:  # TMPDIR may be anything
            Path(self._directory).rmdir()
            self._directory = tempfile.mkdtemp(prefix="elastic_etcd-", dir="/tmp")
        path = f"{self._directory}/agent"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(path)
        self._socket.listen(_PEERS)
        asyncio.get_running_loop().add_reader(self._socket, self._accept)
        return path

    def close(self) -> None:
        """Hang up on everybody, let go of what was kept, and remove the socket."""
        if self._again:
            self._again.cancel()
        for peer in tuple(self.peers):
            peer.close()
        if self._socket:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        for fd in self.kept.values():
            os.close(fd)
        self.kept.clear()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

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
            self._again = loop.call_later(
                _ACCEPT_AGAIN, loop.add_reader, self._socket, self._accept
            )
            return
        pid, uid, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        if uid != os.geteuid() or len(self.peers) >= _PEERS:
            why = f"it is user {uid}" if uid != os.geteuid() else "too many have called"
            log.warning("process %d calls and is not answered: %s", pid, why)
            sock.close()
            return
        self.peers.add(Peer(self, sock, pid))


class Peer:
    """One process that has called. `local_rank` and `generation` are what it said of itself.

    `generation` follows the worker from one world to the next.
    """

    def __init__(self, channels: Channels, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        self.local_rank = self.generation = -1
        self._channels = channels
        self._socket = sock
        self._lines = Lines()
        self._descriptors: deque[int] = deque()
        self._unsent: deque[tuple[bytes, int]] = deque()
        self._greeted = self._closed = False
        self._questions: set[int] = set()
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock, self._read)

    def send(self, message: Mapping[str, Any], fd: int = -1) -> bool:
        """Send it, or queue it; False when the peer is gone. Never blocks; `fd` stays ours."""
        if self._closed:
            return False
        if message["type"] == "world":
            self.generation = message["generation"]
        elif message["type"] == "current":
            self._questions.discard(message["id"])
        try:
            self._unsent.append((encode(message), os.dup(fd) if fd >= 0 else -1))
        except OSError as error:
            self._drop(f"nothing can be handed to it: {error.strerror}")
        if len(self._unsent) == 1:
            self._write()
        if sum(len(line) for line, _ in self._unsent) > _UNREAD:
            self._drop("it does not read what it is told")
        return not self._closed

    def close(self) -> None:
        """Hang up; nobody is told."""
        if self._closed:
            return
        self._closed = True
        self._channels.peers.discard(self)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        self._socket.close()
        for fd in (*self._descriptors, *(fd for _, fd in self._unsent if fd >= 0)):
            os.close(fd)

    def _drop(self, why: str) -> None:
        name = f"the worker of local rank {self.local_rank}" if self._greeted else "a process"
        log.warning("hanging up on %s (pid %d): %s", name, self.pid, why)
        self._end()

    def _end(self) -> None:
        if not self._closed:
            self.close()
            if self._greeted:
                self._channels.heard(self, {"type": "disconnected"})

    def _read(self) -> None:
        try:
            chunk, fds, flags, _ = socket.recv_fds(
                self._socket, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError as error:
            log.debug("pid %d: %s", self.pid, errno.errorcode.get(error.errno or 0))
            self._end()
            return
        self._descriptors += fds
        if not chunk:
            self._end()
            return
        try:
            if flags & socket.MSG_CTRUNC:
                raise ValueError("too many descriptors at once")  # noqa: TRY301
            for line in self._lines.feed(chunk):
                self._hear(decode(line, FROM_WORKER))
                if self._closed:
                    return
            if self._descriptors and not self._lines:
                raise ValueError("a descriptor without a keep")  # noqa: TRY301
        except ValueError as error:
            self._drop(f"malformed: {error}")

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if (kind == "hello") == self._greeted:
            raise ValueError("hello comes first, and once")
        match kind:
            case "hello":
                self._greet(message)
            case "keep":
                self._keep(message["id"], message["name"])
            case "recall":
                fd = self._channels.kept.get((self.local_rank, message["name"]), -1)
                answer = {"type": "recalled", "id": message["id"], "name": message["name"]}
                self.send(answer | {"found": fd >= 0}, fd)
            case "current":
                self._questions.add(message["id"])
                if len(self._questions) > _QUESTIONS:
                    raise ValueError("too many questions at once")
                self._channels.current(self, message["id"])
            case _:
                self._channels.heard(self, message)

    def _greet(self, hello: dict[str, Any]) -> None:
        if hello["v"] != VERSION:
            raise ValueError(f"it speaks version {hello['v']}, this agent {VERSION}")
        self.local_rank, self.generation = hello["local_rank"], hello["generation"]
        self._greeted = True
        self.send({"type": "welcome", "v": VERSION})

    def _keep(self, number: int, name: str) -> None:
        if not self._descriptors:
            raise ValueError("a keep without a descriptor")
        self._channels.keep(self.local_rank, name, self._descriptors.popleft())
        self.send({"type": "kept", "id": number, "name": name})

    def _write(self) -> None:
        while self._unsent and not self._closed:
            line, fd = self._unsent[0]
            try:
                sent = socket.send_fds(self._socket, [line], [fd] if fd >= 0 else [])
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
            if sent < len(line):
                self._unsent.appendleft((line[sent:], -1))
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        if self._unsent:
            loop.add_writer(self._socket, self._write)
        else:
            loop.remove_writer(self._socket)
