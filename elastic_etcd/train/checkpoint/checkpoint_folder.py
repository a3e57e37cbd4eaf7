"""Checkpoints as folders, in memory or on a disk: when one is whole, and what it takes.

A checkpoint is written into a folder whose name begins with a dot. Its manifest is written last,
and then it gets its name at once: a checkpoint with a name is complete.
"""

import fcntl
import logging
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Self, TypeVar

from msgspec import Meta, MsgspecError, Struct, json

from elastic_etcd.core.words import shown
from elastic_etcd.errors import MalformedState, WrongHere
from elastic_etcd.protocol.messages import Number
from elastic_etcd.system.limits import Free, free_memory
from elastic_etcd.train.state.files import flush

MANIFEST = "elastic_etcd.json"
LONGEST_MANIFEST = 1 << 24  # bytes
CHUNK = 1 << 20
Decoded = TypeVar("Decoded")
_NAME = re.compile(r"step-([0-9]{1,18})-([0-9]{1,18})")

log = logging.getLogger(__name__)


class File(Struct, frozen=True):
    """A file of a checkpoint: its path in it, its size in bytes, and its CRC-32."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    size: Number
    crc: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]


class Manifest(Struct, frozen=True):
    """The files that a checkpoint is made of, as far as they are on this node."""

    step: Number
    generation: Number
    files: Annotated[list[File], Meta(min_length=1, max_length=1 << 16)]
    whole: Annotated[list[File], Meta(max_length=1 << 16)] = []  # if others have more of them

    @property
    def size(self) -> int:
        """Bytes of all files here."""
        return sum(file.size for file in self.files)

    @property
    def is_part(self) -> bool:
        """Whether all nodes' files together are the checkpoint."""
        return bool(self.whole)


class Checkpoint(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """A checkpoint's identity: the newest has the most steps, then the latest generation."""

    step: Number
    generation: Number

    @property
    def name(self) -> str:
        """Its folder's."""
        return f"step-{self.step}-{self.generation}"

    @classmethod
    def named(cls, name: str) -> Self | None:
        """The checkpoint whose folder is called so; None for another name."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True)
class Target:
    """The place that a rank writes to: `folder`, which is dropped unless it gets a name."""

    checkpoint: Checkpoint
    folder: Path
    memory: Path | None = None  # the directory in which it gets its name
    disk: Path | None = None  # the one in which it does, or a copy

    def begin(self) -> None:
        """Make the folder, once there is memory for it. Raises UsageError and OSError."""
        if self.disk:
            self.disk.mkdir(parents=True, exist_ok=True)
        self.clear()  # of a worker that was killed
        if self.memory:
            found = found_in(self.memory)
            newest = next(iter(found), None)
            keep_only(self.memory, newest)
            if newest and (size := self.size_after(manifest_in(found[newest], newest))):
                check_free(self.memory, size, "the next checkpoint")
        self.folder.mkdir()

    def size_after(self, last: Manifest) -> int:
        """The bytes that the next checkpoint takes, if the last one says."""
        return last.size

    def clear(self) -> None:
        """Remove the folder, unless it has its name."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self) -> None:
        """Give what was written its name; nothing was written on a node that does not save."""
        manifest = describe(self.folder, self.checkpoint)
        if not manifest.files:
            return
        if self.memory:
            path = give_name(self.folder, manifest, self.memory)
            if self.disk:
                copy_to_disk(path, self.disk / path.name)
            older = [*found_in(self.memory).items()][1:]  # which go before the next is begun
            needed = manifest.size - sum(manifest_in(path, each).size for each, path in older)
            check_free(self.memory, needed, "the next checkpoint")
        elif self.disk:
            flush_all(self.folder)
            give_name(self.folder, manifest, self.disk)
            flush(self.disk)


def memory_of(env: Mapping[str, str]) -> Path | None:
    """This node's directory, which others may have removed: a cleaner, logind at a logout.

    None where no agent of ours has started this process.

    Raises UsageError where the agent could make none.
    """
    path = env.get("ELASTIC_ETCD_MEMORY")
    if path == "":
        raise WrongHere(
            "this node has no directory in memory, its agent's log says why: give all agents "
            "--memory-dir, a directory in a tmpfs with room for two checkpoints"
        )
    if path is None:
        return None
    memory = Path(path)
    with suppress(FileExistsError):
        memory.mkdir(0o700, parents=True)
        log.warning("%s, and what was saved in it, has been removed; it is made anew", memory)
    with suppress(OSError):
        _hold(memory)
    return memory


def _hold(memory: Path) -> None:
    """Share the lock by which other agents know that this is no dead agent's."""
    there = memory.stat()
    if (there.st_dev, there.st_ino) not in _held:
        fcntl.flock(os.open(memory, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
        _held.add((there.st_dev, there.st_ino))


_held = set[tuple[int, int]]()  # until this process ends


def found_in(root: Path) -> dict[Checkpoint, Path]:
    """All that are complete there, the newest first."""
    found = {}
    for path in root.iterdir() if root.is_dir() else ():
        checkpoint = Checkpoint.named(path.name)
        if checkpoint and (path / MANIFEST).is_file():
            found[checkpoint] = path
    return dict(sorted(found.items(), reverse=True))


def describe(folder: Path, checkpoint: Checkpoint) -> Manifest:
    """The manifest of the folder's files; reads all of them."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [
        File(str(path.relative_to(folder)), path.stat().st_size, crc_of(path)) for path in paths
    ]
    return Manifest(checkpoint.step, checkpoint.generation, files)


def give_name(folder: Path, manifest: Manifest, root: Path) -> Path:
    """Make a folder the checkpoint that its manifest describes, at once; gives its path."""
    (folder / MANIFEST).write_bytes(json.encode(manifest))
    target = root / Checkpoint(manifest.step, manifest.generation).name
    shutil.rmtree(target, ignore_errors=True)  # the same one, written again
    folder.rename(target)
    return target


def decoded(data: bytes, kind: type[Decoded], what: str) -> Decoded:
    """A value of that kind that somebody else may have written. Raises MalformedState."""
    try:
        return json.decode(data, type=kind)
    except (MsgspecError, ValueError, RecursionError) as error:  # not UTF-8, too
        raise MalformedState(f"not {what}: {error}") from None


def read_manifest(data: bytes, checkpoint: Checkpoint) -> Manifest:
    """A manifest that somebody else may have written. Raises MalformedState."""
    manifest = decoded(data, Manifest, "a checkpoint's manifest")
    if Checkpoint(manifest.step, manifest.generation) != checkpoint:
        raise MalformedState(f"the manifest is another checkpoint's than {checkpoint.name}")
    for file in (*manifest.files, *manifest.whole):
        if not _is_inside(file.name):
            raise MalformedState(f"{file.name!r} is no name of a file in a checkpoint")
    return manifest


def manifest_in(path: Path, checkpoint: Checkpoint) -> Manifest:
    """A checkpoint's own. Raises MalformedState and OSError."""
    with (path / MANIFEST).open("rb") as file:
        return read_manifest(file.read(LONGEST_MANIFEST), checkpoint)


def _is_inside(name: str) -> bool:
    """Whether a path leads to a file below, by the one name that it has."""
    parts = PurePosixPath(name).parts
    plain = "/".join(parts) == name and "\0" not in name and name != MANIFEST
    return plain and ".." not in parts and not name.startswith("/")


def check_intact(folder: Path, checkpoint: Checkpoint) -> None:
    """Compare all files with the manifest. Raises MalformedState and OSError."""
    for each in manifest_in(folder, checkpoint).files:
        if not is_whole(folder, each):
            raise MalformedState(f"{folder / each.name} is damaged: it is not what was written")


def is_whole(folder: Path, file: File) -> bool:
    """Whether the file there is what was written. Raises OSError."""
    path = folder / file.name
    return path.stat().st_size == file.size and crc_of(path) == file.crc


def crc_of(path: Path) -> int:
    """The CRC-32 of a whole file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def copy_to_disk(source: Path, target: Path) -> None:
    """Copy a checkpoint: a reader, also after a power failure, finds all of it or none."""
    folder = target.with_name(aside(target.name))
    try:
        shutil.copytree(source, folder)
        flush_all(folder)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
        flush(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def aside(name: str) -> str:
    """A folder's name while it is being written."""
    return f".{name}.{secrets.token_hex(4)}"


def remove_unfinished(root: Path) -> None:
    """Remove a killed worker's remains on a disk; nobody may be writing there."""
    for path in root.glob(".step-*-*.*"):
        shutil.rmtree(path, ignore_errors=True)


def flush_all(folder: Path) -> None:
    """All that is in the folder is on the disk."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def keep_only(root: Path, keep: Checkpoint | None) -> None:
    """Remove all others."""
    for checkpoint, path in found_in(root).items():
        if checkpoint != keep:
            shutil.rmtree(path, ignore_errors=True)


def free_in(root: Path) -> Free:
    """The bytes that can be written there: of the file system, and of the free memory."""
    disk = os.statvfs(root)
    whole = shown(disk.f_blocks * disk.f_frsize)
    return min(Free(disk.f_bavail * disk.f_frsize, whole), free_memory(), key=lambda f: f.size)


def check_free(root: Path, size: int, what: str) -> None:
    """Raise UsageError, with the figures, when `what`, of so many bytes, does not fit there."""
    free = free_in(root)
    if free.size < size:
        raise WrongHere(too_small(root, what, size, free))


def too_small(root: Path, what: str, size: int, free: Free) -> str:
    """Say that so many bytes do not fit there, and what helps."""
    return (
        f"{root} is too small: {what} takes {shown(size)} or more, {shown(free.size)} of "
        f"{free.of} are free. It has to hold two checkpoints: make "
        "the tmpfs larger (docker run --shm-size, an emptyDir of medium Memory at /dev/shm) and "
        "the memory limit that it counts for, or give --memory-dir"
    )
