"""The agent's side of the warm pool: workers that are forked where `import torch` has ended.

The pool is a process (train/warm.py) that imports and forks, nothing else. A worker is forked
ahead of its use, and when it is needed it gets its order through a socket of its own: no restart
waits for an import, nor for a fork. It is the agent's own child like one that was exec'd.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_etcd.agent.forks import Spare
from elastic_etcd.agent.logs import WorkerLog
from elastic_etcd.agent.pool import PoolProcess
from elastic_etcd.agent.worker import Started, WorkerSpec, execute
from elastic_etcd.errors import UsageError

# What was used up is forked anew when the generation that used it has had its start.
_REFILL_AFTER = 2.0

log = logging.getLogger(__name__)


class WarmPool:
    """`start()`, `await warm()`, then `fork` or `start_worker`, and `close()`.

    `command` is what the workers run: a Python interpreter and its arguments, as launch.py makes
    them. `env` is the workers' environment as far as it is known before a generation; what
    libraries read when they are loaded (OMP_NUM_THREADS) counts. `size` workers wait for their
    order. No call blocks, and `then` may be called from within one. A pool that dies is replaced.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], preload: Sequence[str], size: int
    ) -> None:
        self._command = command
        self._env = env
        self._preload = preload
        self._size = size
        self._process: PoolProcess | None = None
        self._spares: list[Spare] = []
        self._refill: asyncio.TimerHandle | None = None
        self._is_warm = self._was_warm = False
        self._settled = asyncio.Event()
        self._error: UsageError | None = None

    @property
    def pid(self) -> int | None:
        """The pool's process; None when there is none."""
        return self._process.pid if self._process else None

    @property
    def ready(self) -> bool:
        """Whether `fork` would be served without an import."""
        return self._is_warm or bool(self._spares)

    def start(self) -> None:
        """Start the pool's process, which begins to import."""
        try:
            self._process = PoolProcess(
                self._command, self._preload, self._env, self._heard, self._ended
            )
        except OSError as error:
            self._give_up(f"the warm pool can't be started: {error.strerror}")

    async def warm(self) -> None:
        """Return when the pool is warm, or when it has said why it never will be.

        Raises UsageError when a module of --preload can't be imported.
        """
        await self._settled.wait()
        if self._error is not None:
            raise self._error

    def fork(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        out: int,
        err: int,
        then: Callable[[Started], None],
        given: Sequence[int] = (),
    ) -> None:
        """Run `argv` (`python [-u] script ...` or `-m module ...`) as a process of its own.

        `env` is its whole environment, `out` and `err` become its descriptors 1 and 2; the numbers
        that it has for the descriptors `given` are appended to `argv`. All of them may be closed
        when this returns. `then` gets the process, or an OSError when there will be none.
        """
        try:
            order = os.memfd_create("order")
            with open(order, "wb", closefd=False) as file:
                file.write(json.dumps({"argv": [*argv], "env": dict(env)}).encode())
        except OSError as error:
            then(error)
            return
        try:
            os.lseek(order, 0, os.SEEK_SET)
            self._take().order([order, out, err, *given], then)
        except OSError as error:
            then(error)
        finally:
            os.close(order)
        self._refill_later()

    def start_worker(
        self, spec: WorkerSpec, output: WorkerLog, then: Callable[[Started], None]
    ) -> None:
        """A Starter: fork the worker, or exec it while the pool is not ready."""

        def forked(process: Started) -> None:
            if isinstance(process, OSError):
                log.debug("no fork of rank %d: %s", spec.rank, process)
                execute(spec, output, then)
            else:
                then(process)

        if self.ready:
            self.fork(spec.argv, spec.env, output.out.child_fd, output.err.child_fd, forked)
        else:
            execute(spec, output, then)

    def close(self) -> None:
        """End the pool and the workers that wait; not those that have their order."""
        if self._refill:
            self._refill.cancel()
        self._is_warm = False
        self._stop()
        while self._spares:
            self._spares.pop().end()

    def _stop(self) -> None:
        if self._process:
            self._process.close()
            self._process = None

    def _take(self) -> Spare:
        """A worker that waits or is on its way; a fresh one where there is none."""
        spare = next((spare for spare in self._spares if spare.pid is not None), None)
        if spare is None:
            spare = self._spares[0] if self._spares else self._new()
        self._spares.remove(spare)
        return spare

    def _new(self) -> Spare:
        if self._process is None or not self._is_warm:
            raise OSError(errno.EAGAIN, "the warm pool is not ready")
        spare = Spare(self._process.fork, self._lost)
        self._spares.append(spare)
        return spare

    def _lost(self, spare: Spare) -> None:
        """It ended before it got an order."""
        if spare in self._spares:
            self._spares.remove(spare)
            self._refill_later()

    def _refill_later(self) -> None:
        if self._is_warm and self._refill is None:
            loop = asyncio.get_running_loop()
            self._refill = loop.call_later(_REFILL_AFTER, self._fill)

    def _fill(self) -> None:
        self._refill = None
        with contextlib.suppress(OSError):  # what is missing is made when it is needed
            while self._is_warm and len(self._spares) < self._size:
                self._new()

    def _heard(self, words: dict[str, Any]) -> None:
        """A message of the pool's process."""
        if "warm" in words:
            self._is_warm = self._was_warm = True
            self._fill()
            self._settled.set()
        elif "unsafe" in words:
            self._give_up(words["unsafe"])
        elif words["failed"] and not self._was_warm:
            self._error = UsageError(
                f"--preload {words['failed']}: {self._command[0]} cannot import it: {words['why']}"
            )
            self._give_up("")
        else:
            module = words["failed"] or "torch"
            self._give_up(f"{self._command[0]} cannot import {module}: {words['why']}")

    def _ended(self, code: int, last_words: str) -> None:
        was_warm, self._is_warm = self._is_warm, False
        self._stop()
        if was_warm:
            log.warning("the warm pool ended (%d): %s; it is replaced", code, last_words)
            self.start()
        else:
            self._give_up(f"the warm pool ended ({code}) before it was warm: {last_words}")

    def _give_up(self, why: str) -> None:
        self._is_warm = False
        self._stop()
        if why:
            log.warning("workers are started without the warm pool: %s", why)
        self._settled.set()
