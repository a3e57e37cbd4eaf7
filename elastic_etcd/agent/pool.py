"""The process of the warm pool: started, asked to fork, listened to, watched.

It runs with the workers' own interpreter, in which this package need not be installed, so
train/warm.py is run by its path.
"""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_etcd import trampoline

_PROGRAM = Path(trampoline.__file__).parent / "train" / "warm.py"
_TAIL = 1 << 13

log = logging.getLogger(__name__)


class PoolProcess:
    """`heard(words)` for each message, once `ended(code, last words)` if it is not closed before.

    What its imports print goes to the log, line by line. It dies with this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        preload: Sequence[str],
        env: Mapping[str, str],
        heard: Callable[[dict[str, Any]], None],
        ended: Callable[[int, str], None],
    ) -> None:
        self._heard = heard
        self._ended = ended
        self._printed = b""
        self._last_line = "it said nothing"
        # On a SOCK_SEQPACKET a message never parts from its descriptor.
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        arguments = [str(theirs.fileno()), ",".join(preload), *command]
        try:
            with theirs:
                self._process = _spawn([command[0], "-u", str(_PROGRAM), *arguments], env, theirs)
        except OSError:
            self._channel.close()
            raise
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._output, self._read)
        loop.add_reader(self._channel, self._listen)
        loop.add_reader(self._pidfd, self._on_exit)

    def fork(self, channel: socket.socket) -> None:
        """Ask for a worker that reads its order from `channel`. Raises OSError."""
        socket.send_fds(self._channel, [b"fork"], [channel.fileno()])

    def close(self) -> None:
        """Kill it, if it still runs."""
        loop = asyncio.get_running_loop()
        for fd in (self._output, self._channel, self._pidfd):
            loop.remove_reader(fd)
        self._process.kill()
        self._process.wait()
        self._channel.close()
        self._output.close()
        os.close(self._pidfd)

    def _listen(self) -> None:
        try:
            words = self._channel.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionResetError:
            words = b""
        if words:
            self._heard(json.loads(words))
        else:  # `_on_exit` follows
            asyncio.get_running_loop().remove_reader(self._channel)

    def _read(self) -> bool:
        """Log the lines that have come; False when there is nothing to read now."""
        chunk = self._output.read(1 << 16)
        if chunk == b"":
            asyncio.get_running_loop().remove_reader(self._output)
        *lines, rest = (self._printed + (chunk or b"")).split(b"\n")
        self._printed = rest[-_TAIL:]
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            if text:
                self._last_line = text
                log.info("warm pool: %s", text)
        return bool(chunk)

    def _on_exit(self) -> None:
        self._listen()  # its last message may have come in the same turn
        if self._channel.fileno() < 0:  # and have been the end of it
            return
        while self._read():
            pass
        self._ended(self._process.wait(), self._last_line)


def _spawn(
    pool: Sequence[str], env: Mapping[str, str], channel: socket.socket
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--", *pool],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(channel.fileno(),),
        bufsize=0,
        process_group=0,  # out of the reach of the terminal's Ctrl-C
    )
