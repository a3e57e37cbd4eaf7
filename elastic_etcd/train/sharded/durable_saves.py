"""Saves of a sharded state: which commits are written, by threads, and what comes of it.

All ranks begin a save together, and each writes its part from a copy in memory. Their threads meet
in the directory only: no change of world waits for them, and none of it breaks them off.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from secrets import randbits
from shutil import rmtree
from typing import Any, NamedTuple

import torch.distributed as dist

from elastic_etcd.errors import MalformedState
from elastic_etcd.protocol import activity
from elastic_etcd.train.agent_channel import agent
from elastic_etcd.train.collectives import gather, gather_json, generation, rank_and_size
from elastic_etcd.train.sharded import checkpoint_directory as directory
from elastic_etcd.train.state import files
from elastic_etcd.train.state.snapshot_format import Version
from elastic_etcd.train.state.snapshot_memfds import StateSnapshot

_LOOK = 0.2  # seconds between two looks whether all ranks have written their parts
_SEEN = 120.0  # seconds until what they have written is seen: NFS shows a directory of a minute ago

log = logging.getLogger(__name__)


class Part(NamedTuple):
    """The part of a commit that a rank writes."""

    replicated: StateSnapshot | None  # rank 0's
    pieces: StateSnapshot
    tree: dict[str, Any]  # the values of both
    shortage: str  # of memory for a copy: it is the commit itself


class DurableSaves:
    """The saves of a state into one directory, of which at most one is under way."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._last: _Save | None = None
        self._asked: Version | None = None
        self._begun_at = float("-inf")
        self._left_out = False  # has been said since a save was begun
        self._said: tuple[object, ...] = ()  # of the latest error

    def begin(
        self,
        version: Version,
        part_of: Callable[[], Part],
        *,
        wait: bool,
        keep: int,
        every: float,
    ) -> None:
        """Begin to write this commit if it is time, by rank 0's clock. Collective.

        If `wait` is true it waits for a save that is under way; else this commit is left out.
        """
        if version == self._asked and not wait:
            return
        last = self._last
        if wait and last:
            self._await_last()
            last.part.exception()
        self._asked = version
        rank, size = rank_and_size(launched=False)
        new = last is None or last.failed() or last.version != version
        due = new and time.monotonic() - self._begun_at >= every
        rows = gather([*(last.progress() if last else (0, 0, 0)), due, randbits(62)])
        broken = any(failed for _, _, failed, _, _ in rows)
        if last and not any(writes for writes, *_ in rows):
            last.all_written()
        busy = [r for r, row in enumerate(rows) if row[0] or (row[1] and not broken)]
        *_, wanted, token = rows[0]
        if busy:
            if rank == 0 and due and not self._left_out:
                log.warning(
                    "%s is not saved, nor are those after it until the one before is written: the "
                    "disk is slow, of rank %d for one",
                    *(self._root / directory.name_of(version), busy[-1]),
                )
                self._left_out = True
        elif wanted:
            if last:  # not all ranks have written it, or are there to write it
                last.give_up.set()
            self._begun_at, self._left_out = time.monotonic(), False
            part = part_of()
            self._last = _Save(self._root, version, token, self._say)
            self._last.start(part, rank, size, keep)
            if part.shortage:
                log.warning("save() waits, with no room for a copy: %s", part.shortage)
                self._last.part.exception()

    def finish(self) -> None:
        """Wait for a save that this world has begun. Collective.

        Raises OSError on all ranks if it could not be written, or that rank's error on a rank.
        """
        if (save := self._last) is None or not (texts := self._await_last()):
            return
        error = save.whole.exception()
        for rank, text in texts.items():
            if error and rank == rank_and_size(launched=False)[0]:
                raise error
            raise OSError(f"{save.target} was not saved: rank {rank}: {text}")

    def _await_last(self) -> dict[int, str]:
        """Wait for the end of the save that this world has begun; its errors, by rank."""
        save = self._last
        if save is None or save.awaited or save.generation != generation():
            return {}
        if not dist.is_initialized():  # the training has ended it already
            return {}
        save.awaited = True
        with activity.during(activity.Doing.SAVE):
            texts = gather_json(_text(save.part.exception()))
            if any(texts):
                save.give_up.set()
            save.all_written()
            after = gather_json(_text(save.whole.exception()))
            if save.failed():
                rmtree(save.folder, ignore_errors=True)
        texts = texts if any(texts) else after
        return {rank: text for rank, text in enumerate(texts) if text}

    def _say(self, save: "_Save", error: BaseException | None) -> None:
        """Log the end of a save, in its thread; an error once as long as it stays the same."""
        if error is None:
            self._said = ()
            log.info("%s is saved, after %.1f s", save.target, time.monotonic() - save.began)
        elif (said := (type(error), getattr(error, "errno", ""))) != self._said:
            self._said = said
            log.error("%s was not saved, and training goes on: %s", save.target, error)


class _Save:
    """A save, as this rank has its part in it."""

    def __init__(
        self,
        root: Path,
        version: Version,
        token: int,
        say: Callable[["_Save", BaseException | None], None],
    ) -> None:
        self.version, self.generation, self.began = version, generation(), time.monotonic()
        self.target = root / directory.name_of(version)
        self.folder = root / directory.unfinished(version, token)
        self._say = say
        self.give_up = threading.Event()  # the others' parts
        self.awaited = False
        self._deadline = float("inf")  # for the others' parts to be seen
        self.part: Future[None] = Future()
        self.whole = self.part  # on rank 0 another one

    def start(self, part: Part, rank: int, size: int, keep: int) -> None:
        """Write in a thread, for which the end of the process waits."""
        steps = [(self.part, partial(self._write, part, rank))]
        if rank == 0:
            self.whole = Future()
            steps.append((self.whole, partial(self._complete, size, keep)))
        threading.Thread(target=self._go_through, args=(steps,), name="elastic_etcd save").start()

    def progress(self) -> tuple[bool, bool, bool]:
        """Whether it writes its part, waits for those of this world's other ranks, has failed."""
        waits = self.generation == generation() and not self.whole.done()
        return not self.part.done(), waits, self.failed()

    def all_written(self) -> None:
        """Give the others' parts, which all are written, some time to be seen."""
        self._deadline = min(self._deadline, time.monotonic() + _SEEN)

    def failed(self) -> bool:
        """Whether this rank knows that it has come to nothing."""
        return self.whole.done() and self.whole.exception() is not None

    def _go_through(self, steps: list[tuple[Future[None], Callable[[], None]]]) -> None:
        while steps:
            future, step = steps.pop(0)
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
                if not self.part.done() or self.part.exception() is not error:
                    self._say(self, error)
                # The frames of a traceback hold the copy of the commit.
                error.__traceback__ = error.__context__ = error.__cause__ = None
                future.set_exception(error)
            else:
                if not steps:
                    self._say(self, None)
                future.set_result(None)
            del step

    def _write(self, part: Part, rank: int) -> None:
        for held in filter(None, (part.pieces, part.replicated)):
            if not held.is_intact():
                raise MalformedState(f"the snapshot {held.header} is damaged in memory")
        self.folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            directory.remove_unfinished(self.folder)
        directory.write_part(self.folder, rank, part.tree)
        if part.replicated:
            there = self.folder / directory.REPLICATED
            files.save(there, part.replicated.header, part.replicated.memory, lambda: None, keep=1)

    def _complete(self, size: int, keep: int) -> None:
        """Make one of all ranks' parts, when they are there."""
        self.part.result()
        while len(list(self.folder.glob("*.record"))) < size:
            late = time.monotonic() > self._deadline or not threading.main_thread().is_alive()
            if self.give_up.wait(_LOOK) or late:
                raise TimeoutError(
                    "the parts of others are not there: do all nodes share the directory?"
                )
        directory.finish(self.folder, size)
        if channel := agent():
            channel.raise_if_stale()
        directory.publish(self.folder, self.version, keep)


def _text(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}" if error else ""
