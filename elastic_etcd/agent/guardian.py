"""The agent's side of the guardian: a process that outlives the agent, and what it is told.

When the agent ends without `dismiss`, however it does, the kernel closes the socket between the
two, and the guardian (children/guard.py) kills the worker groups and revokes the lease. Nobody else
holds this end of the socket, so that its end of file means nothing but the agent's own end.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from elastic_etcd.agent.environment import without_secrets
from elastic_etcd.children import guard
from elastic_etcd.etcd.config import EtcdConfig
from elastic_etcd.process import channel_pair
from elastic_etcd.times import GUARD_LIFE, GUARDIAN_QUIET, GUARDIAN_SLOWEST

log = logging.getLogger(__name__)


class Guardian:
    """`start()`, then `guard(...)` at each change, and `dismiss()` when the agent ends in order.

    No call waits for anything; all are made in the event loop. A guardian that dies is replaced,
    with a line in the log; the new one knows what the old one knew.
    """

    def __init__(self, etcd: EtcdConfig) -> None:
        self._etcd = etcd
        self._lease = 0
        self._groups: tuple[int, ...] = ()
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
        with contextlib.suppress(ConnectionError):  # dead already; `_ended` will say so
            ours.send(_first_packet(self._etcd))
        self._socket = ours
        loop.add_reader(ours, self._ended)
        self._send()

    def guard(self, lease: int | None = None, groups: tuple[int, ...] | None = None) -> None:
        """What is to end with the agent, each in place of what was said of it before.

        `lease` 0: no lease. `groups` are the process groups of the workers, each of which leads
        its own; they should be taken out as soon as they are empty, because numbers come again.
        """
        self._lease = self._lease if lease is None else lease
        self._groups = self._groups if groups is None else groups
        assert all(group > 1 for group in self._groups), groups  # 0, 1 would mean other groups
        packet = " ".join(map(str, (self._lease, *self._groups))).encode()
        if packet != self._packet:
            self._packet = packet
            self._send()

    def dismiss(self) -> None:
        """End the process before it acts: the agent has done itself what it was there for."""
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
        if asyncio.get_running_loop().time() - self._started > GUARDIAN_QUIET:
            self._delay = 0.0
        self._start_again(f"the guardian (pid {pid}) has ended ({how})")

    def _start_again(self, what: str) -> None:
        loop = asyncio.get_running_loop()
        when = f"in {self._delay:.0f} s" if self._delay else "now"
        log.warning("%s; another one is started %s", what, when)
        self._again = loop.call_later(self._delay, self.start)
        self._delay = min(GUARDIAN_SLOWEST, max(1.0, 2 * self._delay))

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


def _first_packet(etcd: EtcdConfig) -> bytes:
    """The first packet: secrets go this way, never by argument or environment."""
    # The last entry is for an installation that Python finds by a hook and not by the path.
    path = [*map(os.path.abspath, sys.path), str(Path(guard.__file__).parents[2])]
    return json.dumps({**dataclasses.asdict(etcd), "path": path}).encode()


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Without the trampoline, which would end it with the agent, and in a session of its own."""
    ours, theirs = channel_pair()
    arguments = [str(os.getpid()), str(GUARD_LIFE)]
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, *arguments],
                env=without_secrets(os.environ),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    return process, ours
