"""A worker's end of the channel to its agent: what it asks, and what it is told meanwhile.

Standard library only. Requests are answered in the calling thread; only while something listens
(`listening`, which ee.run uses) a thread reads, and hears what comes unasked. A process that is
forked from a worker, such as a DataLoader's, has no channel. docs/channel.md has the messages.
"""

import multiprocessing
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from elastic_etcd.core.messages import FROM_AGENT, VERSION, Lines, decode, encode
from elastic_etcd.errors import AgentGone, EtcdUnreachable, StaleGeneration

_TIMEOUT = 10.0


class Channel:
    """One connection to the agent. Its methods may be called from any thread.

    Everything ends in bounded time: each method raises AgentGone when the agent has gone, says
    what it must not, or does not answer.
    """

    def __init__(self, path: str) -> None:
        self.generation = int(os.environ["ELASTIC_ETCD_GENERATION"])
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._requests = threading.Lock()  # one at a time
        self._sending = threading.Lock()
        self._answered = threading.Condition()
        self._listens = False  # by a thread
        self._lines = Lines()
        self._messages: deque[dict[str, Any]] = deque()
        self._descriptors: deque[int] = deque()
        self._answer: tuple[dict[str, Any], int] | None = None
        self._number = 0
        self._gone = ""
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise AgentGone(f"no agent answers at {path}: {error.strerror}") from error
        self._socket.setblocking(False)
        self._greet()

    def keep(self, name: str, fd: int) -> None:
        """Let the agent keep a descriptor (a memfd) beyond this process's end; `fd` stays ours.

        It replaces what this local rank has kept by that name.
        """
        self._request({"type": "keep", "name": name}, fd)

    def recall(self, name: str) -> int | None:
        """What this local rank has kept, also before this process: a descriptor of ours, now."""
        answer, fd = self._request({"type": "recall", "name": name})
        if not answer["found"]:
            return None
        if fd < 0:
            raise AgentGone(f"the agent at {self._path} found {name!r}, but did not send it")
        return fd

    def current(self, timeout: float = _TIMEOUT) -> None:
        """Return if this generation is still the job's: the agent asks etcd, linearizably.

        Raises StaleGeneration if it is not, EtcdUnreachable when that can't be told in time.
        """
        try:
            answer, _ = self._request({"type": "current"}, timeout=timeout)
        except _Silent as error:
            text = f"the agent could not ask etcd within {timeout:g} s"
            raise EtcdUnreachable(f"{text} whether this generation is still current") from error
        if answer["current"] is None:
            raise EtcdUnreachable(answer["reason"])
        if not answer["current"]:
            raise StaleGeneration(f"generation {self.generation}: {answer['reason']}")

    def elastic(self) -> None:
        """From here on this worker is asked to park, not killed, when its world ends."""
        self.send({"type": "elastic"})

    def parked(self, error: str = "") -> None:
        """Nothing runs here; `error` is what made it park by itself, if nobody asked."""
        text = error.encode(errors="replace").decode()[:4096]
        self.send({"type": "parked", "generation": self.generation, "error": text})

    def send(self, message: Mapping[str, Any], fd: int = -1) -> None:
        """Send one message. Raises AgentGone."""
        line = encode(message)
        deadline = time.monotonic() + _TIMEOUT
        with self._sending:
            while line:
                if self._gone:
                    raise AgentGone(self._gone)
                try:
                    sent = socket.send_fds(self._socket, [line], [fd] if fd >= 0 else [])
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline)
                    continue
                except OSError as error:
                    raise self._lost(f"has gone: {error.strerror}") from error
                line, fd = line[sent:], -1

    @contextmanager
    def listening(self, heard: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """While this is open, `heard(message)` is called for what comes unasked, in a thread.

        Its last message is {"type": "gone", "reason": ...} if the agent goes.
        """
        wake, stop = os.pipe()
        thread = threading.Thread(target=self._listen, args=(heard, wake), name="elastic_etcd")
        with self._requests:  # nobody else reads now
            self._listens = True
            thread.start()
        try:
            yield
        finally:
            with self._requests:
                os.write(stop, b"\0")  # a forked child may hold it open
                thread.join()
                os.close(stop)
                os.close(wake)
                self._listens = False

    def detach(self) -> None:
        """In a forked child: the socket is the parent's."""
        self._gone = "this process was forked from a worker: only the worker has a channel"
        self._socket.close()

    def _greet(self) -> None:
        local_rank = os.environ.get("ELASTIC_ETCD_LOCAL_RANK") or os.environ["LOCAL_RANK"]
        hello = {"type": "hello", "v": VERSION, "pid": os.getpid(), "local_rank": int(local_rank)}
        self.send(hello | {"generation": self.generation})
        deadline = time.monotonic() + _TIMEOUT
        self._receive(deadline)  # its welcome

    def _request(
        self, message: dict[str, Any], fd: int = -1, timeout: float = _TIMEOUT
    ) -> tuple[dict[str, Any], int]:
        """Send it and wait for its answer, with the descriptor that came with it or -1."""
        deadline = time.monotonic() + timeout
        with self._requests:
            self._number += 1
            self._answer = None
            self.send(message | {"id": self._number}, fd)
            if self._listens:
                left = max(0.0, deadline - time.monotonic())
                with self._answered:
                    self._answered.wait_for(lambda: self._answer or self._gone, left)
            else:
                while self._answer is None:
                    self._take(self._receive(deadline))
            return self._result(timeout)

    def _result(self, timeout: float) -> tuple[dict[str, Any], int]:
        if self._answer is not None:
            return self._answer
        raise AgentGone(self._gone) if self._gone else _Silent(self._silence(timeout))

    def _listen(self, heard: Callable[[dict[str, Any]], None], wake: int) -> None:
        try:
            while message := self._receive(None, wake):
                if not self._take(message):
                    heard(message)
        except AgentGone as error:
            with self._answered:
                self._answered.notify_all()
            heard({"type": "gone", "reason": str(error)})

    def _take(self, message: dict[str, Any] | None) -> bool:
        """Whether it was an answer; one that comes too late for its request is dropped."""
        if message is None or "id" not in message:
            return False
        fd = -1
        if message.get("found") and self._descriptors:
            fd = self._descriptors.popleft()
        with self._answered:
            if message["id"] == self._number and self._answer is None:
                self._answer = message, fd
                self._answered.notify_all()
            elif fd >= 0:
                os.close(fd)
        return True

    def _receive(self, deadline: float | None, wake: int = -1) -> dict[str, Any] | None:
        """The next message; None after a byte in `wake`. Raises AgentGone."""
        while not self._messages:
            if self._wait(select.POLLIN, deadline, wake):
                return None
            try:
                chunk, fds, _, _ = socket.recv_fds(
                    self._socket, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC
                )
                self._descriptors += fds
                self._messages += [decode(line, FROM_AGENT) for line in self._lines.feed(chunk)]
            except BlockingIOError:
                continue
            except (OSError, ValueError) as error:
                raise self._lost(f"has gone: {error}") from error
            if not chunk:
                raise self._lost("has hung up")
        return self._messages.popleft()

    def _wait(self, event: int, deadline: float | None, wake: int = -1) -> bool:
        """Until the socket is ready; True for a byte in `wake`. Raises _Silent."""
        poll = select.poll()
        poll.register(self._socket, event)
        if wake >= 0:
            poll.register(wake, select.POLLIN)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = poll.poll(None if left is None else left * 1000)
        if not ready:
            raise _Silent(self._silence(_TIMEOUT))
        return any(fd == wake for fd, _ in ready)

    def _silence(self, timeout: float) -> str:
        return f"the agent at {self._path} did not answer within {timeout:g} s"

    def _lost(self, why: str) -> AgentGone:
        self._gone = self._gone or f"the agent at {self._path} {why}"
        return AgentGone(self._gone)


class _Silent(AgentGone):
    """No answer in time, but the channel may still be good."""


_channel: Channel | None = None
_forked = False


def agent() -> Channel | None:
    """This process's one channel, connected at its first use.

    None where there is none: without our launcher, and in what a worker has forked or spawned
    with multiprocessing. Raises AgentGone.
    """
    global _channel  # noqa: PLW0603 - one process, one worker, one channel
    if _channel is None:
        path = os.environ.get("ELASTIC_ETCD_SOCKET")
        if not path or _forked or multiprocessing.parent_process() is not None:
            return None
        _channel = Channel(path)
    return _channel


def _after_fork_in_child() -> None:
    global _channel, _forked  # noqa: PLW0603
    if _channel is not None:
        _forked = True
        _channel.detach()
        _channel = None


os.register_at_fork(after_in_child=_after_fork_in_child)
