"""The agent's side of the guardian: a process that outlives the agent, and what it is told.

When the agent ends without `dismiss`, however it does, the kernel closes the socket between the
two, and the guardian kills the worker groups and revokes the lease (guard.py). Nobody else holds
this end of the socket, so that its end of file means nothing but the agent's own end.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from elastic_etcd.agent import guard
from elastic_etcd.agent.environment import without_secrets
from elastic_etcd.etcd.config import EtcdConfig

QUIET = 10.0  # seconds; one that lived shorter is replaced more and more slowly
SLOWEST = 60.0


class Guardian:
    """`start()`, then `guard(...)` at each change, and `dismiss()` when the agent ends in order.

    No call waits for anything; all are made in the event loop. A guardian that dies is replaced,
    and `said` gets one line about it; the new one knows what the old one knew.
    """

    def __init__(self, etcd: EtcdConfig, said: Callable[[str], None]) -> None:
        self._etcd = etcd
        self._said = said
        self._packet = b"0"
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._delay = self._started = 0.0
        self._again: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The process; None before `start`, after `dismiss` and while it is being replaced."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process. One that can't be started is tried again, like one that died."""
        loop = asyncio.get_running_loop()
        self._started = loop.time()
        try:
            self._process, ours = _spawn()
        except OSError as error:
            self._start_again(f"the guardian can't be started ({error.strerror})")
            return
        ours.setblocking(False)
        with contextlib.suppress(ConnectionError):  # dead already; `_ended` will say so
            ours.send(_config(self._etcd))
        self._socket = ours
        loop.add_reader(ours, self._ended)
        self._send()

    def guard(self, lease: int, groups: Collection[int]) -> None:
        """What is to end with the agent, in place of what was said before.

        `lease` 0: no lease. `groups` are the process groups of the workers, each of which leads
        its own; they should be taken out as soon as they are empty, because numbers come again.
        """
        assert all(group > 1 for group in groups), groups  # 0 and 1 would mean other groups
        packet = " ".join(map(str, (lease, *groups))).encode()
        if packet != self._packet:
            self._packet = packet
            self._send()

    def dismiss(self) -> None:
        """End the process before it can do anything: the agent has seen to all of it itself."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._end()

    def _send(self) -> None:
        if self._socket is None:  # the next one gets it
            return
        loop = asyncio.get_running_loop()
        try:
            self._socket.send(self._packet)
        except BlockingIOError:  # frozen; once it reads again it gets what is true then
            loop.add_writer(self._socket, self._send)
        except ConnectionError:
            loop.remove_writer(self._socket)  # it has just died, and `_ended` is about to say so
        else:
            loop.remove_writer(self._socket)

    def _ended(self) -> None:
        assert self._process is not None
        pid, code = self._process.pid, self._end()
        known = -code in set(signal.Signals)
        how = signal.Signals(-code).name if known else f"exit code {code}"
        if asyncio.get_running_loop().time() - self._started > QUIET:
            self._delay = 0.0
        self._start_again(f"the guardian (pid {pid}) has ended ({how})")

    def _start_again(self, what: str) -> None:
        loop = asyncio.get_running_loop()
        when = f"in {self._delay:.0f} s" if self._delay else "now"
        self._said(f"{what}; another one is started {when}")
        self._again = loop.call_later(self._delay, self.start)
        self._delay = min(SLOWEST, max(1.0, 2 * self._delay))

    def _end(self) -> int:
        """The process is no more when this returns; its exit code."""
        if self._process is None or self._socket is None:
            return 0
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        self._process.kill()  # also a frozen one; before the socket closes, which would set it off
        code = self._process.wait()
        self._socket.close()
        self._process = self._socket = None
        return code


def _config(etcd: EtcdConfig) -> bytes:
    """The first packet: secrets go this way, never by argument or environment."""
    # The last entry is for an installation that Python finds by a hook and not by the path.
    path = [*map(os.path.abspath, sys.path), str(Path(guard.__file__).parents[2])]
    return json.dumps({**dataclasses.asdict(etcd), "path": path}).encode()


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Without the trampoline, which would end it with the agent, and in a session of its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(os.getpid())],
                env=without_secrets(os.environ),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    return process, ours
