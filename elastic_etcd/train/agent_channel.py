"""A worker's end of the channel to its agent.

Requests are answered in the calling thread. A thread reads only in `listening`, which ee.run uses,
and hands on the messages that nobody has asked for. A process that is forked from a worker, such as
a DataLoader's, has no channel. docs/contributing/channel.md has the messages.
"""

import multiprocessing
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, TypeVar

from msgspec.structs import replace

from elastic_etcd.errors import AgentGone, EtcdUnreachable, StaleGeneration, UsageError
from elastic_etcd.protocol import messages
from elastic_etcd.protocol.packets import address_of, peer_of, receive
from elastic_etcd.times import ANSWER_TIMEOUT

A = TypeVar("A", bound=messages.Answer)
Receiver: TypeAlias = Callable[[messages.FromAgent | messages.Gone], None]


class Channel:
    """A connection to the agent. Its methods may be called from any thread.

    Everything ends in bounded time: each method raises AgentGone when the agent has gone, sends a
    message that is not its to send, or does not answer.
    """

    def __init__(self, name: str) -> None:
        self.generation = int(os.environ["ELASTIC_ETCD_GENERATION"])
        local_rank = os.environ.get("ELASTIC_ETCD_LOCAL_RANK") or os.environ["LOCAL_RANK"]
        self.local_rank = int(local_rank)
        self.reason = ""  # why this generation was begun
        self._name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests = threading.Lock()  # one at a time
        self._sending = threading.Lock()
        self._answered = threading.Condition()
        self.listens = False  # by a thread
        self._leaving = False  # by the messages until now
        # To the request that is under way, one at most, with the descriptor that came along.
        self._answers: list[tuple[messages.Answer, int]] = []
        self._number = 0
        self._gone = ""
        try:
            self._socket.connect(address_of(name))
        except OSError as error:
            self._socket.close()
            raise AgentGone(f"no agent answers at {name}: {error.strerror}") from error
        _, user = peer_of(self._socket)
        if user != os.geteuid():  # who may have taken the name since the agent's end
            self._socket.close()
            raise AgentGone(f"user {user} answers at {name}: that is no agent of this user")
        self._socket.setblocking(False)
        self._greet()

    def keep(self, name: str, fd: int) -> None:
        """Let the agent keep a descriptor (a memfd) beyond this process's end; `fd` stays ours.

        It replaces what this local rank has kept by that name.
        """
        self._request(messages.Keep(0, name), messages.Kept, fd)

    def drop(self, name: str) -> None:
        """Let the agent let go of what it keeps by that name for this local rank."""
        self.send(messages.Drop(name))

    def recall(self, name: str) -> int | None:
        """The descriptor that this local rank has kept, also before this process; now ours."""
        answer, fd = self._request(messages.Recall(0, name), messages.Recalled)
        if not answer.found:
            return None
        if fd < 0:
            raise AgentGone(f"the agent at {self._name} found {name!r}, but did not send it")
        return fd

    def share(self, name: str, fd: int) -> int:
        """The descriptor that this node's workers share by that name: `fd`, if it is the first.

        The one that is returned is ours. The file outlives this process, until all local ranks that
        share it have dropped it.
        """
        _, shared = self._request(messages.Share(0, name), messages.Recalled, fd)
        if shared < 0:
            raise AgentGone(f"the agent at {self._name} did not send {name!r}")
        return shared

    def raise_if_stale(self) -> None:
        """Raise StaleGeneration if this generation is not the job's any more, as etcd says now.

        The agent asks, linearizably. Raises EtcdUnreachable without an answer in time.
        """
        try:
            answer, _ = self._request(messages.AskCurrent(0), messages.Current)
        except _Silent as error:
            text = f"the agent could not ask etcd within {ANSWER_TIMEOUT:g} s"
            raise EtcdUnreachable(f"{text} whether this generation is still current") from error
        if answer.current is None:
            raise EtcdUnreachable(answer.reason)
        if not answer.current:
            raise StaleGeneration(f"generation {self.generation}: {answer.reason}")

    def leaving(self) -> bool:
        """Whether this node is leaving; while `listening` is open the answer is there already."""
        if self.listens:
            return self._leaving
        answer, _ = self._request(messages.AskLeaving(0), messages.Leaving)
        return answer.leaving

    def send(self, message: messages.FromWorker, fd: int = -1) -> None:
        """Send one message. Raises AgentGone."""
        packet = messages.encode(message)
        deadline = time.monotonic() + ANSWER_TIMEOUT
        with self._sending:
            while not self._gone:
                try:
                    socket.send_fds(self._socket, [packet], [fd] if fd >= 0 else [])
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline)
                except OSError as error:
                    raise self._lost(f"has gone: {error.strerror}") from error
                else:
                    return
            raise AgentGone(self._gone)

    @contextmanager
    def listening(self, receiver: Receiver) -> Iterator[None]:
        """While this is open, a thread calls `receiver(message)` for each that nobody asked for.

        The last message is Gone if the agent goes. The thread keeps no process that ends: an error
        that a signal's handler raises may skip the end of this.
        """
        wake, stop = os.pipe()
        listen = partial(self._listen, receiver, wake)
        thread = threading.Thread(target=listen, name="elastic_etcd", daemon=True)
        with self._requests:  # nobody else reads now
            self.listens = True
            thread.start()
        try:
            yield
        finally:
            if not sys.is_finalizing():  # then no thread runs that could be joined
                with self._requests:
                    os.write(stop, b"\0")  # a forked child may hold it open
                    thread.join()
                    os.close(stop)
                    os.close(wake)
                    self.listens = False

    def detach(self) -> None:
        """In a forked child: the socket is the parent's."""
        self._gone = "this process was forked from a worker: only the worker has a channel"
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _greet(self) -> None:
        self.send(messages.Hello(messages.VERSION, os.getpid(), self.local_rank, self.generation))
        message, _ = self._receive(time.monotonic() + ANSWER_TIMEOUT)
        if isinstance(message, messages.Welcome):
            self.reason = message.reason

    def _request(self, request: messages.Request, kind: type[A], fd: int = -1) -> tuple[A, int]:
        """Send it with an id; gives its answer, with the descriptor that came with it or -1."""
        deadline = time.monotonic() + ANSWER_TIMEOUT
        with self._requests:
            self._number += 1
            self._answers.clear()
            self.send(replace(request, id=self._number), fd)
            if self.listens:
                left = max(0.0, deadline - time.monotonic())
                with self._answered:
                    self._answered.wait_for(lambda: self._answers or self._gone, left)
            else:
                while not self._answers:
                    self._take(*self._receive(deadline))
            if not self._answers:
                raise AgentGone(self._gone) if self._gone else _Silent(self._silence())
            ((answer, sent),) = self._answers
        if not isinstance(answer, kind):
            raise AgentGone(f"the agent at {self._name} has answered something else")
        return answer, sent

    def _listen(self, receiver: Receiver, wake: int) -> None:
        try:
            while not self._wait(select.POLLIN, None, wake):
                message, fd = self._receive(None)
                if isinstance(message, messages.Change):
                    self._leaving = self._leaving or message.leaving
                if not self._take(message, fd):
                    receiver(message)
        except AgentGone as error:
            with self._answered:
                self._answered.notify_all()
            receiver(messages.Gone(str(error)))

    def _take(self, message: messages.FromAgent, fd: int) -> bool:
        """Whether it was an answer; one that comes too late for its request is dropped."""
        if not isinstance(message, messages.Answer):
            return False
        with self._answered:
            if message.id == self._number and not self._answers:
                self._answers.append((message, fd))
                self._answered.notify_all()
            elif fd >= 0:
                os.close(fd)
        return True

    def _receive(self, deadline: float | None) -> tuple[messages.FromAgent, int]:
        """The next message, with the descriptor that came with it or -1. Raises AgentGone."""
        while True:
            try:
                packet, fds, _ = receive(self._socket, 1)
                if not packet:
                    raise self._lost("has hung up")
                return messages.from_agent(packet), fds[0] if fds else -1
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
            except (OSError, ValueError) as error:
                raise self._lost(f"has gone: {error}") from error

    def _wait(self, event: int, deadline: float | None, wake: int = -1) -> bool:
        """Until the socket is ready; True for a byte in `wake`. Raises _Silent."""
        poll = select.poll()
        poll.register(self._socket, event)
        if wake >= 0:
            poll.register(wake, select.POLLIN)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = poll.poll(None if left is None else left * 1000)
        if not ready:
            raise _Silent(self._silence())
        return any(fd == wake for fd, _ in ready)

    def _silence(self) -> str:
        return f"the agent at {self._name} did not answer within {ANSWER_TIMEOUT:g} s"

    def _lost(self, why: str) -> AgentGone:
        self._gone = self._gone or f"the agent at {self._name} {why}"
        return AgentGone(self._gone)


class _Silent(AgentGone):
    """No answer in time, but the channel may still be good."""


_channel: Channel | None = None
_forked = False
_TAKEN = "ELASTIC_ETCD_WORKER_PID"  # in the environment of what a worker starts: who is the worker


def agent() -> Channel | None:
    """The channel of this process, connected at its first use.

    There is none without our launcher, nor in a process that a worker has forked, spawned with
    multiprocessing or started otherwise. Raises AgentGone.
    """
    global _channel  # noqa: PLW0603 - one process, one worker, one channel
    if _channel is None:
        name = os.environ.get("ELASTIC_ETCD_SOCKET")
        if not name or _forked or multiprocessing.parent_process() is not None:
            return None
        own = str(os.getpid())
        if (os.environ.get(_TAKEN) or own) != own:
            return None
        os.environ[_TAKEN] = own
        _channel = Channel(name)
    return _channel


def leaving() -> bool:
    """Whether this worker's node leaves the job: SIGTERM has come to its agent, or a drain.

        signal.signal(signal.SIGTERM, lambda *_: ee.leaving() and save())

    True from then until the end of this process, which the agent kills ELASTIC_ETCD_LEAVE_DEADLINE
    seconds after that (an environment variable; a drain may give others). No other world begins
    before that end: it finds all that is saved now. A plain script gets SIGTERM at every change of
    world, and asks this to know whether it has to save for all; ee.run stops its loop as at any
    planned change and then raises SystemExit, so that a `finally` around it can save.

    In ee.run it costs nothing, elsewhere a question to the agent, about a millisecond. Any thread,
    a signal's handler and a worker's child may ask it. False without our launcher. Raises
    AgentGone. docs/contributing/channel.md has the messages.
    """
    if _channel is not None and _channel.listens:
        return _channel.leaving()
    name = os.environ.get("ELASTIC_ETCD_SOCKET")
    if not name:
        return False
    channel = Channel(name)  # another one: a handler may have interrupted a request on ours
    try:
        return channel.leaving()
    finally:
        channel.close()


def raise_if_stale() -> None:
    """Raise StaleGeneration if the job has gone on without this worker: its agent asks etcd.

        ee.raise_if_stale()
        os.replace("model.pt.new", "model.pt")

    For a script that is about to replace a file that newer worlds write, too. The read is
    linearizable, and takes about a millisecond. Raises EtcdUnreachable without an answer in time,
    AgentGone, and UsageError where no agent of ours has started this process. See "Files" in
    docs/state.md.
    """
    channel = agent()
    if channel is None:
        text = "ee.raise_if_stale(): this process is no worker of `python -m elastic_etcd.launch`"
        raise UsageError(f"{text}, or was started by one: call it in the worker itself")
    channel.raise_if_stale()


def _leave_channel_to_parent() -> None:
    """In a forked child: the channel is the parent's."""
    global _channel, _forked  # noqa: PLW0603
    if _channel is not None:
        _forked = True
        _channel.detach()
        _channel = None


os.register_at_fork(after_in_child=_leave_channel_to_parent)
