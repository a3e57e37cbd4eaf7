"""Workers that are forked ahead of their use, where `import torch` has ended.

The fork server is a process (children/forkserver.py) that imports and forks, nothing else. A worker
is forked before it is needed, and gets its order through a socket of its own: no restart waits for
an import, nor for a fork. It is the agent's own child like one that was exec'd: the fork server
forks a process that forks the worker and ends, and the agent is a child subreaper meanwhile. Only
meanwhile, because orphans of workers would come to it, too, and nobody would reap them.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_etcd import children
from elastic_etcd.agent.inbox import Respawn, Timer
from elastic_etcd.core.words import ended
from elastic_etcd.errors import UsageError
from elastic_etcd.protocol import messages
from elastic_etcd.protocol.packets import channel_pair
from elastic_etcd.system.child_process import (
    ExitWatch,
    LastWords,
    Process,
    discard,
    end,
    start,
)
from elastic_etcd.system.kernel import adopt_orphans, memfd_with
from elastic_etcd.system.processes import stat
from elastic_etcd.times import ANSWER, IMPORTED

_PROGRAM = Path(children.__file__).with_name("forkserver.py")
# What was used up is forked anew when the generation that used it has had its start.
_REFILL_AFTER = 2.0
# A fork server that lived shorter is replaced more and more slowly: each one imports torch.
_QUIET = 60.0
_SLOWEST = 60.0
_TELLS = 10.0  # seconds of waiting for the first imports, after which that is told

log = logging.getLogger(__name__)


class Prefork:
    """`start()`, `await imported()`, then `await fork(...)`, and `close()`.

    `command` is the workers': a Python interpreter and its arguments, as launch.py makes them.
    `env` is their environment as far as it is known before a generation; the part counts that
    libraries read when they are loaded (OMP_NUM_THREADS). `size` workers wait for their order. A
    fork server that dies is replaced; meanwhile there is none. `create` begins its tasks, and
    learns of their crashes.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        preload: Sequence[str],
        size: int,
        create: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._command = command
        self._env = env
        self._preload = preload
        self._size = size
        self._create = create
        self._server: _ForkServer | None = None
        self._discarded: list[Process] = []  # fork servers that may be dying yet
        self._waiting: list[_Preforked] = []
        self._refill = Timer()
        self._respawn = Respawn(self.start, _QUIET, _SLOWEST)
        self._starting: asyncio.Task[None] | None = None
        self._is_warm = False
        self.lacks_torch = False  # in the workers' interpreter, from their folder
        self._decided = asyncio.Event()
        self._error: UsageError | None = None

    @property
    def pid(self) -> int | None:
        """The fork server; None when there is none."""
        return self._server.pid if self._server else None

    @property
    def ready(self) -> bool:
        """Whether `fork` would be served without an import."""
        return self._is_warm or bool(self._waiting)

    def start(self) -> None:
        """Start the fork server, which begins to import."""
        self._starting = self._create(self._start())

    async def _start(self) -> None:
        server = _ForkServer(self._take_message, self._ended, self._silent)
        try:
            await server.start(self._command, self._preload, self._env)
        except OSError as error:
            self._give_up(f"the fork server can't be started: {error.strerror}")
        else:
            self._server = server

    async def imported(self) -> None:
        """Wait until all is imported, or cannot be, or takes too long.

        Raises UsageError when a module of --preload can't be imported.
        """
        loop = asyncio.get_running_loop()
        began, patience = loop.time(), min(_TELLS, IMPORTED)
        while not self._decided.is_set():
            try:
                async with asyncio.timeout(patience):
                    if self._starting:
                        await asyncio.shield(self._starting)  # for its error
                    await self._decided.wait()
            except TimeoutError:
                seconds = loop.time() - began
                self._tell_slow(seconds)
                patience = IMPORTED - seconds if seconds < IMPORTED else IMPORTED
        if self._error is not None:
            raise self._error

    def _tell_slow(self, seconds: float) -> None:
        """Have the imports awaited no longer, unless the fork server is at work on them."""
        pid = self.pid
        if seconds < IMPORTED or (pid and (seen := stat(pid)) and seen.state == "R"):
            text = (
                "waiting for %.0f s: the fork server (pid %s) imports torch; then this node joins"
            )
            log.info(text, seconds, pid)
            return
        log.warning(
            "the fork server (pid %s) has not imported all in %.0f s (is it stopped, or does a "
            "file system stand still?): workers are started without it until it has",
            *(pid, seconds),
        )
        self._decided.set()

    async def fork(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        out: int,
        err: int,
        stdin: int = subprocess.DEVNULL,
        given: Sequence[int] = (),
    ) -> Process:
        """Run `argv` (`python [-u] script ...` or `-m module ...`) as a process of its own.

        `env` is its whole environment, `out` and `err` become its descriptors 1 and 2, `stdin`
        its 0; the numbers that it has for the descriptors `given` are appended to `argv`. All of
        them may be closed when this returns. Raises OSError when there is no process to be had.
        """
        streams = {1: out, 2: err} if stdin == subprocess.DEVNULL else {0: stdin, 1: out, 2: err}
        assignment = _assignment(argv, env, list(streams))
        try:
            preforked = self._take_preforked()
            preforked.order([assignment, *streams.values(), *given])
        finally:
            os.close(assignment)
            self._refill_later()
        return await preforked.arrived

    def close(self) -> None:
        """End the fork server and the workers that wait; not those that have their order."""
        self._refill.cancel()
        self._respawn.cancel()
        if self._starting:
            self._starting.cancel()
        self._is_warm = False
        self._stop_server()
        for process in self._discarded:
            end(process)
        while self._waiting:
            self._waiting.pop().end()

    def _stop_server(self) -> None:
        if self._server:
            self._discarded = [each for each in self._discarded if each.poll() is None]
            self._discarded.append(self._server.close())
            self._server = None

    def _take_preforked(self) -> "_Preforked":
        """A worker that waits or is on its way; a fresh one where there is none."""
        preforked = next((each for each in self._waiting if each.pid is not None), None)
        if preforked is None:
            preforked = self._waiting[0] if self._waiting else self._new()
        self._waiting.remove(preforked)
        return preforked

    def _new(self) -> "_Preforked":
        if self._server is None or not self._is_warm:
            raise OSError(errno.EAGAIN, "the fork server is not ready")
        preforked = _Preforked(self._server, self._lost)
        self._waiting.append(preforked)
        return preforked

    def _lost(self, preforked: "_Preforked") -> None:
        """It ended before it got an order."""
        if preforked in self._waiting:
            self._waiting.remove(preforked)
            self._refill_later()

    def _refill_later(self) -> None:
        if self._is_warm:
            self._refill.start_once(_REFILL_AFTER, self._fill)

    def _fill(self) -> None:
        self._refill.cancel()
        with contextlib.suppress(OSError):  # a worker that is missing is made when it is needed
            while self._is_warm and len(self._waiting) < self._size:
                self._new()

    def _take_message(self, message: messages.FromForkServer) -> None:
        match message:
            case messages.Warm():
                self._is_warm = True
                self._respawn.started()
                self._fill()
                self._decided.set()
            case messages.Unsafe(why):
                self._give_up(why)
            case messages.CannotImport(module, why) if module and not self._decided.is_set():
                text = f"--preload {module}: {self._command[0]} cannot import it: {why}"
                self._error = UsageError(text)
                self._give_up("")
            case messages.CannotImport(module, why):
                self.lacks_torch = not module
                self._give_up(f"{self._command[0]} cannot import {module or 'torch'}: {why}")

    def _ended(self, code: int, last_words: str) -> None:
        was_warm, self._is_warm = self._is_warm, False
        self._stop_server()
        if was_warm:
            again = self._respawn.again()
            log.warning("the fork server %s: %s; it is replaced %s", ended(code), last_words, again)
        else:
            self._give_up(f"the fork server {ended(code)} before it was warm: {last_words}")

    def _silent(self) -> None:
        log.warning(
            "the fork server (pid %s) has not answered for %g s (is it stopped, or does a file "
            "system stand still?): it is replaced %s; meanwhile workers are started without it",
            *(self.pid, ANSWER, self._respawn.again()),
        )
        self._is_warm = False
        asked = self._server.asked if self._server else ()
        self._stop_server()
        for preforked in tuple(asked):
            preforked.arrive()

    def _give_up(self, why: str) -> None:
        self._is_warm = False
        self._stop_server()
        if why:
            log.warning("workers are started without the fork server: %s", why)
        self._decided.set()


class _ForkServer:
    """The fork server's process: `take(message)` for each, once `ended(code, last words)`.

    `silent()` is called when it lives and has not answered for long. `await start(...)` first,
    which raises OSError. It runs with the workers' own interpreter, in which this package need not
    be installed, so its program is run by its path. The log has the lines that its imports print.
    It dies with this process.
    """

    def __init__(
        self,
        take: Callable[[messages.FromForkServer], None],
        ended: Callable[[int, str], None],
        silent: Callable[[], None],
    ) -> None:
        self._take = take
        self._ended = ended
        self._silent = silent
        self.asked: set[_Preforked] = set()  # those on their way
        self._late = Timer()

    async def start(
        self, command: Sequence[str], preload: Sequence[str], env: Mapping[str, str]
    ) -> None:
        """Start it; a thread does, since the program may be on a disk that stands still."""
        self._channel, theirs = channel_pair()
        arguments = [str(theirs.fileno()), ",".join(preload), *command]
        program = [command[0], "-u", str(_PROGRAM), *arguments]
        output, theirs_output = os.pipe()
        try:
            with theirs:
                self._process = await start(
                    program,
                    env,
                    stdout=theirs_output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                )
        except BaseException:
            self._channel.close()
            os.close(output)
            raise
        finally:
            os.close(theirs_output)
        self.pid = self._process.pid
        self._output = LastWords(output, "fork server")
        self._watch = ExitWatch(self._process, self._on_exit)
        asyncio.get_running_loop().add_reader(self._channel, self._listen)

    def fork(self, preforked: "_Preforked", channel: socket.socket) -> None:
        """Ask for a worker that reads its order from `channel`. Raises OSError."""
        socket.send_fds(self._channel, [b"fork"], [channel.fileno()])
        self.asked.add(preforked)
        self._late.start_once(ANSWER, self._silent)

    def answered(self, preforked: "_Preforked") -> None:
        """Wait for this one no more, and for the others' answers anew."""
        self.asked.discard(preforked)
        self._late.cancel()
        if self.asked and self._channel.fileno() >= 0:
            self._late.start(ANSWER, self._silent)

    def close(self) -> Process:
        """Kill it, if it still runs; its end is for the caller to wait for."""
        self._watch.close()
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        discard(self._process)
        self._output.close()
        self._late.cancel()
        return self._process

    def _listen(self) -> None:
        try:
            packet = self._channel.recv(messages.LONGEST)
        except BlockingIOError:
            return
        except ConnectionResetError:
            packet = b""
        if packet:
            self._take(messages.from_fork_server(packet))
        else:  # `_on_exit` follows
            asyncio.get_running_loop().remove_reader(self._channel)

    def _on_exit(self, code: int) -> None:
        self._listen()  # its last message may have come in the same turn
        if self._channel.fileno() >= 0:  # else that was the end of it
            self._ended(code, self._output.drain())


class _Forked:
    """A worker of the fork server's: a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit status, or minus the signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


class _Preforked:
    """A worker that is on its way or waits for its order; `lost(this)` if it ends before that.

    Raises OSError when the fork server can't be asked for it.
    """

    _on_their_way = 0

    def __init__(self, server: _ForkServer, lost: "Callable[[_Preforked], None]") -> None:
        self.pid: int | None = None
        self._server = server
        self._lost = lost
        self._ordered = False
        self._watch: ExitWatch | None = None
        # Raises OSError if it could not be forked.
        self.arrived: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        self._channel, theirs = channel_pair()
        self._adopt(+1)  # first: init would inherit a worker that is faster
        try:
            with theirs:
                server.fork(self, theirs)
        except OSError:
            self._adopt(-1)
            self._channel.close()
            raise
        asyncio.get_running_loop().add_reader(self._channel, self.arrive)

    @classmethod
    def _adopt(cls, more: int) -> None:
        cls._on_their_way += more
        adopt_orphans(wanted=bool(cls._on_their_way))

    def order(self, fds: Sequence[int]) -> None:
        """Send its order. Raises OSError when it is gone."""
        socket.send_fds(self._channel, [b"run"], fds)
        self._ordered = True
        if self.pid is not None:
            self._forget()

    def end(self) -> None:
        """End it: it is not needed."""
        if self.pid is None:  # it ends by itself when it finds the channel closed
            self._end_wait()
        self._forget()
        if self.pid is not None:
            end(self.arrived.result())

    def arrive(self) -> None:
        """It has said its pid, or won't come any more."""
        try:
            packet = self._channel.recv(messages.LONGEST)
        except (BlockingIOError, ConnectionResetError):
            packet = b""
        self._end_wait()
        if packet:
            self._take_process(_Forked(messages.from_forked(packet).pid))
            return
        self._forget()
        if not self._ordered:
            self._lost(self)
        elif not self.arrived.cancelled():
            self.arrived.set_exception(OSError(errno.EAGAIN, "the fork server could not fork"))

    def _end_wait(self) -> None:
        asyncio.get_running_loop().remove_reader(self._channel)
        self._server.answered(self)
        self._adopt(-1)

    def _take_process(self, process: _Forked) -> None:
        self.pid = process.pid
        if self.arrived.cancelled():  # nobody needs it any more
            discard(process)
            self._forget()
            return
        self.arrived.set_result(process)
        if self._ordered:
            self._forget()
        else:
            self._watch = ExitWatch(process, self._on_exit)

    def _on_exit(self, code: int) -> None:
        log.debug("a preforked worker ended before its order: %d", code)
        self._forget()
        self._lost(self)

    def _forget(self) -> None:
        """Close what is held for it; a message that it has not read yet stays readable."""
        self._channel.close()
        if self._watch:
            self._watch.close()
            self._watch = None


def _assignment(argv: Sequence[str], env: Mapping[str, str], streams: Sequence[int]) -> int:
    """A descriptor of a file with what a process is to become: an environment may be large.

    `streams` are the standard streams that are sent after it; the others are /dev/null.

    Not by msgspec: a variable may have bytes that are no UTF-8.
    """
    order = {"argv": [*argv], "env": dict(env), "streams": streams}
    return memfd_with("order", json.dumps(order).encode())
