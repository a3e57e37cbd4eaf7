"""The agent's side of the guardian: a process that outlives the agent, and what it is told.

When the agent ends without `dismiss`, however it does, the kernel closes the socket between the
two, and the guardian (children/guardian_process.py) kills the worker groups and revokes the lease.
No other process holds this end of the socket, so its end of file means that the agent has ended.
With --when-cut-off stop it also kills the workers of an agent that lives and renews no lease.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TypeAlias

from elastic_etcd import children
from elastic_etcd.agent.environment import without_secrets
from elastic_etcd.agent.inbox import Respawn
from elastic_etcd.core.words import ended
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.protocol.packets import channel_pair
from elastic_etcd.system.child_process import ExitWatch, discard, end
from elastic_etcd.system.leftovers import GUARDS
from elastic_etcd.system.threads import begin
from elastic_etcd.times import GUARD_LIFE, GUARDIAN_QUIET, GUARDIAN_SLOWEST

_PROGRAM = Path(children.__file__).with_name("guardian_process.py")

_Spawned: TypeAlias = tuple[subprocess.Popen[bytes], socket.socket]

log = logging.getLogger(__name__)


class Guardian:
    """`start()`, then `guard(...)` at each change, and `dismiss()` when the agent ends in order.

    No call waits for anything; all are made in the event loop. The process is started by a thread,
    since its program may be on a disk that stands still. A guardian that dies is replaced, with a
    line in the log; the new one knows what the old one knew.
    """

    def __init__(
        self,
        etcd: EtcdConfig,
        mark: str = "",
        *folders: str,
        log_fields: dict[str, str] | None = None,
    ) -> None:
        self._etcd = etcd
        self._mark = mark
        self._arguments = [json.dumps(log_fields)] if log_fields else []  # then its log is JSON
        self._folders = folders  # which are to be removed
        self._lease = 0
        self._groups: tuple[int, ...] = ()
        self._parked: tuple[int, ...] = ()
        self._until = 0.0
        self._packet = b"0 0 0"
        self._starting: asyncio.Future[_Spawned] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: ExitWatch | None = None
        self._socket: socket.socket | None = None
        self._respawn = Respawn(self.start, GUARDIAN_QUIET, GUARDIAN_SLOWEST)

    @property
    def pid(self) -> int | None:
        """The process; None until it has been started, after `dismiss` and while it is replaced."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process. A guardian that fails to start is tried again, like one that died."""
        self._starting = begin(partial(_spawn, self._mark, self._arguments))
        self._starting.add_done_callback(self._on_start)

    def _on_start(self, starting: asyncio.Future[_Spawned]) -> None:
        self._respawn.started()
        try:
            process, ours = starting.result()
        except OSError as error:
            self._start_again(f"the guardian can't be started ({error.strerror})")
            return
        if starting is not self._starting:  # dismissed before it was there
            discard(process)
            ours.close()
            return
        with contextlib.suppress(ConnectionError):  # dead already; `_ended` will say so
            ours.send(_first_packet(self._etcd, self._mark, self._folders))
        self._process, self._socket = process, ours
        self._watch = ExitWatch(self._process, self._ended)
        self._send()

    def guard(
        self,
        lease: int | None = None,
        groups: tuple[int, ...] | None = None,
        parked: tuple[int, ...] | None = None,
        until: float | None = None,
    ) -> None:
        """Tell it what is to end with the agent, in place of what was told before.

        `lease` 0 is none. `groups` are the process groups of the workers that train and `parked`
        of those that wait. They should be taken out as soon as they are empty, because numbers come
        again. Those that train end also at `until`, in seconds of `etcd.retry.boottime`; 0: never.
        """
        self._lease = self._lease if lease is None else lease
        self._groups = self._groups if groups is None else groups
        self._parked = self._parked if parked is None else parked
        self._until = self._until if until is None else until
        every = (*self._groups, *self._parked)
        assert all(group > 1 for group in every), every  # 0, 1 would mean other groups
        numbers = (self._lease, int(self._until * 1000), len(self._groups), *every)
        packet = " ".join(map(str, numbers)).encode()
        if packet != self._packet:
            self._packet = packet
            self._send()

    def dismiss(self) -> None:
        """End the process before it acts: the agent has done itself what it was there for."""
        self._respawn.cancel()
        self._starting = None
        self._end()

    def _send(self) -> None:
        if self._socket is None:  # the next one gets it
            return
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._socket)
        try:
            self._socket.send(self._packet)
        except BlockingIOError:  # frozen; once it reads again it gets what is true then
            loop.add_writer(self._socket, self._send)
        except ConnectionError:
            pass  # it has just died, and `_ended` is about to say so

    def _ended(self, code: int) -> None:
        assert self._process is not None
        pid = self._process.pid
        self._end()
        self._start_again(f"the guardian (pid {pid}) {ended(code)}")

    def _start_again(self, what: str) -> None:
        if self._starting is not None:
            log.warning("%s; another one is started %s", what, self._respawn.again())

    def _end(self) -> None:
        """The process does nothing more when this returns."""
        if self._process is None or self._socket is None or self._watch is None:
            return
        self._watch.close()
        asyncio.get_running_loop().remove_writer(self._socket)
        end(self._process)  # also a frozen one; before the socket closes, which would set it off
        self._socket.close()
        self._process = self._socket = self._watch = None


def _first_packet(etcd: EtcdConfig, mark: str, folders: tuple[str, ...]) -> bytes:
    """The first packet: secrets go this way, never by argument or environment."""
    # The last entry is for an installation that Python finds by a hook and not by the path.
    path = [*map(os.path.abspath, sys.path), str(_PROGRAM.parents[2])]
    more = {"path": path, "mark": mark, "folders": folders}
    return json.dumps({**dataclasses.asdict(etcd), **more}).encode()


def _spawn(mark: str, more: list[str]) -> _Spawned:
    """Without the trampoline, which would end it with the agent, and in a session of its own."""
    ours, theirs = channel_pair()
    arguments = [str(os.getpid()), str(GUARD_LIFE), *more]
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM), *arguments],
                env={**without_secrets(os.environ), GUARDS: mark},
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    return process, ours
