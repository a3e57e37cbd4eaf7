"""Checkpoints whose files are spread over the nodes, as `torch.distributed.checkpoint` writes them.

All workers of a node write into one folder. When all have written, the first workers of nodes copy
its files to other nodes, through the process group, and the folders get their names once all have
theirs. latest_checkpoint.py puts the files of all nodes together.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from msgspec import to_builtins

from elastic_etcd.errors import UsageError
from elastic_etcd.train.checkpoint.checkpoint_folder import (
    File,
    Manifest,
    Target,
    aside,
    check_free,
    describe,
    flush_all,
    give_name,
    memory_of,
)
from elastic_etcd.train.collectives import copies, exchange, gather, gather_json, rank_and_size
from elastic_etcd.train.sharded.pieces import Place, partners
from elastic_etcd.train.state.files import flush
from elastic_etcd.train.state.sync import BUCKET


@dataclass(frozen=True)
class ShardedTarget(Target):
    """The folder of a node, or on a disk that of all. Whatever a rank does here is collective."""

    first: bool = True  # of the workers that write there

    @classmethod
    def of(cls, target: Target) -> Self:
        """The folder that this worker shares with others. Raises UsageError."""
        if not dist.is_initialized():
            raise UsageError(
                "ee.memory_checkpoint(sharded=True) is for all ranks of a process group: call "
                "init_process_group before it"
            )
        memory, first = memory_of(os.environ), rank_and_size()[0] == 0
        if memory:
            folder, first = memory / ".0", target.memory is not None
        else:
            folder = Path(gather_json(str(target.folder))[0])
        return cls(target.checkpoint, folder, target.memory, target.disk, first)

    def begin(self) -> None:
        """Make the folder, for all that write there."""
        if self.first:
            super().begin()
        _wait_for_all()

    def size_after(self, last: Manifest) -> int:
        """The bytes of the next checkpoint; the last one may have come from all nodes."""
        return last.size if last.is_part else 0

    def clear(self) -> None:
        """Remove the folder, unless it has its name; others may be writing there still."""
        if self.first:
            super().clear()

    def finish(self) -> None:
        """Copy the files to other nodes, and name the folders once each node has what it keeps."""
        _wait_for_all()
        own = describe(self.folder, self.checkpoint).files if self.first else []
        copied_to = self.disk / aside(self.checkpoint.name) if self.disk and self.memory else ""
        label = os.environ.get("ELASTIC_ETCD_TOPOLOGY_LABEL", "")
        rows = gather_json([self.first, to_builtins(own), label, str(copied_to)])
        parts = {
            rank: [File(**file) for file in files]
            for rank, (first, files, *_) in enumerate(rows)
            if first
        }
        whole = _whole(parts.values())
        here = [*own, *(self._keep_copies(parts, [row[2] for row in rows]) if self.memory else [])]
        _wait_for_all()
        step, generation = self.checkpoint.step, self.checkpoint.generation
        path, root = self.folder, self.memory or self.disk
        if self.first and root and here:
            lacking = len(here) < len(whole)
            manifest = Manifest(step, generation, here, whole if lacking else [])
            if not self.memory:
                flush_all(path)
            path = give_name(path, manifest, root)
        if to := next((name for *_, name in rows if name), ""):
            if self.first:
                _copy(own, path, Path(to))
            _wait_for_all()
            if self.disk and whole:
                give_name(Path(to), Manifest(step, generation, whole), self.disk)
        if self.disk:
            flush(self.disk)

    def _keep_copies(
        self, parts: Mapping[int, Sequence[File]], labels: Sequence[str]
    ) -> list[File]:
        """Give this node's files to others, and take theirs; gives those that came."""
        rank, ranks = rank_and_size()[0], list(parts)
        places = [
            Place(node, labels.index(labels[first]), node, leaves=False)
            for node, first in enumerate(ranks)
        ]
        keepers = [[ranks[to] for to in kept] for kept in partners(places, copies())]
        sends = {to: _chunks(parts[rank], self.folder) for to in keepers[ranks.index(rank)]}
        taken = {
            sender: parts[sender]
            for sender, kept_by in zip(ranks, keepers, strict=True)
            if rank in kept_by
        }
        files = [file for each in taken.values() for file in each]
        assert self.memory
        size = sum(file.size for file in files)
        check_free(self.memory, size, "other nodes' part of this checkpoint")
        for file in files:
            _make(self.folder / file.name, file.size)
        targets = {sender: _chunks(each, self.folder) for sender, each in taken.items()}
        for _ in exchange(sends, targets):
            pass
        return files


def _wait_for_all() -> None:
    gather([0])


def _whole(parts: Iterable[Sequence[File]]) -> list[File]:
    """The files of all nodes. Raises UsageError for one that two nodes have written."""
    found: dict[str, File] = {}
    for file in chain(*parts):
        if found.setdefault(file.name, file) is not file:
            raise UsageError(
                f"ee.memory_checkpoint(sharded=True): {file.name} was written on two nodes: each "
                "file of a checkpoint needs a name of its own, such as one with the rank in it"
            )
    return list(found.values())


def _make(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)  # else a full memory would kill, not raise


def _chunks(files: Iterable[File], folder: Path) -> Iterator[torch.Tensor]:
    """The files' memory itself, in parts."""
    for file in files:
        if file.size:
            path = str(folder / file.name)
            yield from torch.from_file(path, shared=True, size=file.size, dtype=torch.uint8).split(
                BUCKET
            )


def _copy(files: Iterable[File], source: Path, target: Path) -> None:
    for file in files:
        path = target / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file.name, path)
        flush(path)
