"""torch's file timers: by when a worker will be done with something, or else is to be ended.

torch's own server reads them, in a child (children/timer_server.py), since an agent loads no torch.
It tells which timer has expired; the agent ends the worker. Nothing of that is trusted, because
workers wrote it.
"""

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import Meta, MsgspecError, Struct, json

from elastic_etcd import children
from elastic_etcd.agent.directories import LOOK
from elastic_etcd.agent.prefork import Prefork
from elastic_etcd.agent.store import start_with_torch
from elastic_etcd.errors import UsageError
from elastic_etcd.protocol.messages import LONGEST
from elastic_etcd.protocol.packets import channel_pair
from elastic_etcd.system.child_process import LastWords, Process, end
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import IMPORTED

_PROGRAM = Path(children.__file__).with_name("timer_server.py")

log = logging.getLogger(__name__)


class Expired(Struct, frozen=True):
    """A timer of process `pid` that has expired; without a `signal` above 0 nothing is ended."""

    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    scope: str
    signal: Annotated[int, Meta(ge=-64, le=64)]


class FileTimers:
    """The child that serves the pipe at `path`; `expired` is called of each timer that expires."""

    def __init__(self, path: str, expired: Callable[[Expired], None]) -> None:
        self.path = path
        self._expired = expired
        self._process: Process | None = None

    async def serve(self, prefork: Prefork | None) -> None:
        """Start the child, unless it serves the pipe. Raises OSError, and UsageError."""
        is_there = await in_thread(partial(Path(self.path).is_fifo), LOOK)
        if self._process and self._process.poll() is None and is_there:
            return
        self.close()
        try:
            await in_thread(partial(_check_place, self.path), LOOK)
        except OSError as error:
            raise self._refused(str(error.strerror)) from error
        self._channel, theirs = channel_pair()
        read, stderr = os.pipe()
        self._words = LastWords(read)
        try:
            with theirs:
                self._process = await start_with_torch(
                    _PROGRAM, self.path, prefork=prefork, channel=theirs, stderr=stderr
                )
        except OSError:
            self._channel.close()
            self._words.close()
            raise
        finally:
            os.close(stderr)
        if not await self._serves():
            raise self._refused(self._words.drain())
        asyncio.get_running_loop().add_reader(self._channel, self._listen)

    async def _serves(self) -> bool:
        """Wait for the child's first word, which comes when the pipe is there."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IMPORTED):
                return bool(await asyncio.get_running_loop().sock_recv(self._channel, LONGEST))
        return False

    def close(self) -> None:
        """End the child, and remove the pipe."""
        if self._process is None:
            return
        asyncio.get_running_loop().remove_reader(self._channel)
        end(self._process)
        self._process = None
        self._channel.close()
        self._words.close()
        with contextlib.suppress(OSError):
            Path(self.path).unlink()

    def _listen(self) -> None:
        packet = self._channel.recv(LONGEST)
        if not packet:
            asyncio.get_running_loop().remove_reader(self._channel)
            text = "timers of the script are not served until the next start: %s"
            log.warning(text, self._words.drain())
            return
        try:
            self._expired(json.decode(packet, type=Expired))
        except MsgspecError as error:
            log.warning("TORCHELASTIC_TIMER_FILE: ignored %r: %s", packet[:200], error)

    def _refused(self, why: str) -> UsageError:
        return UsageError(
            f"TORCHELASTIC_TIMER_FILE={self.path}: there can be no pipe: {why}.\n"
            "Name a file that is not there, where this user may write, or unset it."
        )


def _check_place(path: str) -> None:
    """Raise OSError unless nothing is there, or a dead agent's pipe: torch's server removes it."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno == errno.ENXIO:  # nobody reads it
            return
        raise
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
