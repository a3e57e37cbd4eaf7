"""`ee.latest_checkpoint`: the newest checkpoint among the nodes, on every node.

The first worker of each node offers its node's checkpoints in the generation's store. That of group
rank 0 makes a plan of the offers, which all follow: a node that lacks the newest copies it from one
that has it, over a connection of their own. It counts when all have it, whole; else all go on to
the next.
"""

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Self

import torch.distributed as dist
from msgspec import Meta, Struct, json

from elastic_etcd.core.words import shown
from elastic_etcd.errors import MalformedState, WrongHere
from elastic_etcd.protocol.messages import Number
from elastic_etcd.system.sockets import listen, short_lookups
from elastic_etcd.train.checkpoint.checkpoint_folder import (
    CHUNK,
    LONGEST_MANIFEST,
    MANIFEST,
    Checkpoint,
    File,
    Manifest,
    check_free,
    check_intact,
    decoded,
    found_in,
    give_name,
    is_whole,
    keep_only,
    manifest_in,
    memory_of,
    read_manifest,
    remove_unfinished,
)
from elastic_etcd.train.checkpoint.memory_checkpoint import remember

PATIENCE = 300.0  # seconds for the other nodes' workers to get here, and for each copy of theirs
_LOG_EVERY = 10.0  # seconds of waiting or copying between two lines in the log
_SILENCE = 10.0  # seconds in which not one byte comes
_MOST_TRIED = 8  # checkpoints, the newest ones
_CALLERS = 16  # at a time
_HELLO = struct.Struct(">16sQQ")  # nonce, step, generation
_LENGTH = struct.Struct(">I")

log = logging.getLogger(__name__)
_calls: dict[str, int] = defaultdict(int)  # by generation


class Offer(Struct, frozen=True):
    """The checkpoints of a node, and the address that serves them."""

    addr: Annotated[str, Meta(max_length=256)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    nonce: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    held: Annotated[list[Checkpoint], Meta(max_length=_MOST_TRIED)]


class Plan(Struct, frozen=True):
    """Which checkpoints are tried, one after the other, and who offers them, by group rank."""

    candidates: list[tuple[Checkpoint, list[Number]]]  # with the group ranks that have it
    offers: dict[Number, Offer]


def latest_checkpoint(disk: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder of the newest checkpoint of `ee.memory_checkpoint`; None if there is none.

        folder = ee.latest_checkpoint(disk="checkpoints")
        if folder:
            state = torch.load(folder / "state.pt")

    Call it on every rank, before training, in the same order: it waits for all nodes. The newest
    has the most steps, in the memory of any node or in `disk`, a directory. It is on every node
    when this returns; all files are as they were written. A checkpoint that is damaged, or lost on
    its way with its last node, gives way to the next newest. The folder is for reading only.

    Raises UsageError when another node's workers don't call it within 300 s, and when the memory is
    too small; MalformedState when no checkpoint is whole, because beginning anew would lose the
    training. Without our launcher it is the newest in `disk`. See docs/memory.md.
    """
    memory = memory_of(os.environ)
    root = None if disk is None else Path(disk).absolute()
    if memory is None:
        return _newest_here(found_in(root) if root else {})
    node = Node(memory, root, os.environ)
    if os.environ["ELASTIC_ETCD_LOCAL_RANK"] != "0":
        path = node.path_from_first()
    else:
        path = node.agree()
        node.publish_path(path)
    if path and (found := Checkpoint.named(path.name)):
        remember(memory, found.step)
    return path


def _newest_here(held: Mapping[Checkpoint, Path]) -> Path | None:
    for checkpoint, path in held.items():
        if _is_intact(checkpoint, path):
            return path
    if held:
        raise _none_whole(held)
    return None


def _none_whole(candidates: Iterable[Checkpoint]) -> MalformedState:
    names = ", ".join(checkpoint.name for checkpoint in candidates)
    return MalformedState(
        f"no checkpoint could be had whole ({names}); the log says what is wrong with each. Remove "
        "those that are on a disk to begin anew"
    )


def _is_intact(checkpoint: Checkpoint, path: Path) -> bool:
    try:
        check_intact(path, checkpoint)
    except (OSError, MalformedState) as error:
        log.warning("a checkpoint is left out: %s", error)
        return False
    return True


class Node:
    """A worker's part in it. `env` is the worker's environment."""

    def __init__(self, memory: Path, disk: Path | None, env: Mapping[str, str]) -> None:
        self._memory = memory
        self._disk = disk
        self._rank, self._nodes = int(env["GROUP_RANK"]), int(env["GROUP_WORLD_SIZE"])
        self._endpoint = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        generation = env["ELASTIC_ETCD_GENERATION"]
        patience = timedelta(seconds=PATIENCE)
        with short_lookups(self._endpoint[0]):
            client = dist.TCPStore(*self._endpoint, is_master=False, timeout=patience)
        self._store = dist.PrefixStore(f"elastic_etcd/memory/{_calls[generation]}", client)
        _calls[generation] += 1

    def path_from_first(self) -> Path | None:
        """The path that the first worker of this node has found."""
        what = "the first worker of this node"
        path = self._wait(f"path/{self._rank}", what, 2 * PATIENCE).decode(errors="surrogateescape")
        return Path(path) if path else None

    def publish_path(self, path: Path | None) -> None:
        """Tell the other workers of this node."""
        self._store.set(f"path/{self._rank}", os.fsencode(path or ""))

    def agree(self) -> Path | None:
        """Take part for this node; gives the path here of the checkpoint that all have."""
        for unfinished in self._memory.glob(".*"):  # nobody writes here before this has returned
            rmtree(unfinished, ignore_errors=True)
        if self._disk and self._rank == 0:
            remove_unfinished(self._disk)
        held = {**(found_in(self._disk) if self._disk else {}), **found_in(self._memory)}
        held = dict(sorted(held.items(), reverse=True)[:_MOST_TRIED])
        with Sender(self._own_address(), held) as sender:
            self._store.set(f"offer/{self._rank}", json.encode(sender.offer))
            if self._rank == 0:
                self._store.set("plan", json.encode(self._make_plan()))
            plan = json.decode(self._wait("plan", "group rank 0"), type=Plan)
            return self._follow(plan, held)

    def _own_address(self) -> str:
        """The address by which others reach this node: the store's, or that on the way to it."""
        if self._rank == 0:
            return self._endpoint[0]
        family, kind, *_, where = socket.getaddrinfo(*self._endpoint, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(where)  # which sends nothing
            return str(sock.getsockname()[0])

    def _make_plan(self) -> Plan:
        offers = {}
        for rank in range(self._nodes):
            offers[rank] = read_offer(self._wait(f"offer/{rank}", f"group rank {rank}"))
        holders: dict[Checkpoint, list[int]] = defaultdict(list)
        for rank, offer in offers.items():
            for checkpoint in offer.held:
                holders[checkpoint].append(rank)
        candidates = sorted(holders.items(), reverse=True)[:_MOST_TRIED]
        needed = {rank for _, nodes in candidates for rank in nodes}
        return Plan(candidates, {rank: offers[rank] for rank in needed})

    def _follow(self, plan: Plan, held: Mapping[Checkpoint, Path]) -> Path | None:
        for number, (checkpoint, nodes) in enumerate(plan.candidates):
            began = time.monotonic()
            found = self._get(checkpoint, nodes, plan, held)
            if self._all_have_it(number, checkpoint, found is not None):
                assert found is not None
                path, copied = found
                if copied:  # nobody copies from here any more
                    path = give_name(path, copied, self._memory)
                keep_only(self._memory, checkpoint)
                if self._rank == 0:
                    log.warning(
                        "training goes on from step %d, of generation %d: %d of %d nodes had that "
                        "(%.1f s)",
                        *(checkpoint.step, checkpoint.generation),
                        *(len(nodes), self._nodes, time.monotonic() - began),
                    )
                return path
        if plan.candidates:
            raise _none_whole(checkpoint for checkpoint, _ in plan.candidates)
        return None

    def _get(
        self,
        checkpoint: Checkpoint,
        nodes: Sequence[int],
        plan: Plan,
        held: Mapping[Checkpoint, Path],
    ) -> tuple[Path, Manifest | None] | None:
        """The path here of a checkpoint, which has a name or is copied with that manifest.

        None if it can't be had whole.
        """
        path = held.get(checkpoint)
        folder = self._memory / ".copied"
        rmtree(folder, ignore_errors=True)
        if path and _is_part(checkpoint, path):
            _link_intact(checkpoint, path, folder)
        elif path and _is_intact(checkpoint, path):
            return path, None
        others = [rank for rank in nodes if rank != self._rank]
        first = self._rank % len(others) if others else 0  # so that each sends to some only
        for rank in others[first:] + others[:first]:
            try:
                manifest = pull(plan.offers[rank], checkpoint, folder)
                if not manifest.is_part:
                    return folder, manifest
            except (OSError, MalformedState) as error:
                log.warning(
                    "%s can't be copied from group rank %d: %s", checkpoint.name, rank, error
                )
        rmtree(folder, ignore_errors=True)
        return None

    def _all_have_it(self, number: int, checkpoint: Checkpoint, here: bool) -> bool:
        if not here:
            self._store.add(f"lacking/{number}", 1)
        if self._store.add(f"tried/{number}", 1) == self._nodes:
            lacking = self._store.add(f"lacking/{number}", 0)
            self._store.set(f"verdict/{number}", "lacking" if lacking else "had")
        what = f"all nodes to have {checkpoint.name}"
        return self._wait(f"verdict/{number}", what) == b"had"

    def _wait(self, key: str, what: str, patience: float = PATIENCE) -> bytes:
        """The value of a key, once it is there. Raises UsageError when that takes too long."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            with suppress(dist.DistStoreError):
                self._store.wait([key], timedelta(seconds=_LOG_EVERY))
                return bytes(self._store.get(key))
            log.warning("ee.latest_checkpoint still waits for %s", what)
        raise WrongHere(
            f"ee.latest_checkpoint waited {patience:g} s for {what}: it has to be called on every "
            "rank, as often as on the others"
        )


def read_offer(data: bytes) -> Offer:
    """An offer that somebody else may have written. Raises MalformedState."""
    return decoded(data, Offer, "an offer of checkpoints")


class Sender:
    """Serves a node's checkpoints to those who know the nonce of its offer; a context."""

    def __init__(self, address: str, held: Mapping[Checkpoint, Path]) -> None:
        self._socket = listen(address, 0)
        self._nonce = secrets.token_bytes(16)
        self._held = held
        self._slots = threading.BoundedSemaphore(_CALLERS)
        self._thread = threading.Thread(target=self._serve, name="elastic_etcd checkpoints")
        port = self._socket.getsockname()[1]
        self.offer = Offer(address, port, self._nonce.hex(), list(held))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):  # it is shut down
            while True:
                caller, _ = self._socket.accept()
                self._slots.acquire()
                threading.Thread(target=self._answer, args=(caller,)).start()

    def _answer(self, caller: socket.socket) -> None:
        with caller, suppress(OSError, MalformedState):  # the caller sees the end of it
            try:
                caller.settimeout(_SILENCE)
                nonce, step, generation = _HELLO.unpack(_read(caller, _HELLO.size))
                checkpoint = Checkpoint(step, generation)
                path = self._held.get(checkpoint)
                if hmac.compare_digest(nonce, self._nonce) and path:
                    _send(caller, path, checkpoint)
            finally:
                self._slots.release()


def _send(caller: socket.socket, path: Path, checkpoint: Checkpoint) -> None:
    """Send the manifest, and those of its files that the caller wants."""
    data = (path / MANIFEST).read_bytes()
    _send_message(caller, data)
    files = {file.name: file for file in read_manifest(data, checkpoint).files}
    for name in read_names(_read_message(caller)):
        if name in files and files[name].size:
            with (path / name).open("rb") as source:
                caller.sendfile(source, count=files[name].size)


def read_names(data: bytes) -> list[str]:
    """The files that somebody else asks for. Raises MalformedState."""
    return decoded(data, list[str], "the names of files")


def _send_message(sock: socket.socket, data: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _read_message(sock: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    if length > LONGEST_MANIFEST:
        raise MalformedState(f"a manifest of {shown(length)}")
    return _read(sock, length)


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += _read_some(sock, size - len(data))
    return bytes(data)


def _read_some(sock: socket.socket, most: int) -> bytes:
    chunk = sock.recv(min(most, CHUNK))
    if not chunk:
        raise ConnectionResetError("it hung up")
    return chunk


def pull(offer: Offer, checkpoint: Checkpoint, folder: Path) -> Manifest:
    """Copy into the folder what the node that offers the checkpoint has of it.

    If the checkpoint is spread over nodes it copies only what the folder lacks. Gives the manifest
    of the folder, which is a part as long as it lacks more.
    Raises OSError, MalformedState for another one than was offered, and UsageError without enough
    free memory.
    """
    with socket.create_connection((offer.addr, offer.port), _SILENCE) as sock:
        sock.settimeout(_SILENCE)
        nonce = bytes.fromhex(offer.nonce)
        sock.sendall(_HELLO.pack(nonce, checkpoint.step, checkpoint.generation))
        manifest = read_manifest(_read_message(sock), checkpoint)
        if not manifest.is_part:
            rmtree(folder, ignore_errors=True)
        wanted = _lacking(folder, manifest.files)
        size = sum(file.size for file in wanted)
        check_free(folder.parent, size, f"{checkpoint.name}, from {offer.addr},")
        folder.mkdir(exist_ok=True)
        _send_message(sock, json.encode([file.name for file in wanted]))
        _receive(sock, wanted, folder)
    whole = manifest.whole or manifest.files
    if not _lacking(folder, whole):
        return Manifest(manifest.step, manifest.generation, whole)
    if manifest.is_part:
        return manifest
    raise MalformedState("it did not arrive as it was written")


def _lacking(folder: Path, files: Iterable[File]) -> list[File]:
    return [file for file in files if not (folder / file.name).exists()]


def _is_part(checkpoint: Checkpoint, path: Path) -> bool:
    try:
        return manifest_in(path, checkpoint).is_part
    except (OSError, MalformedState):
        return False


def _link_intact(checkpoint: Checkpoint, path: Path, folder: Path) -> None:
    """Have the intact files of a part in the folder, too."""
    for file in manifest_in(path, checkpoint).files:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            if is_whole(path, file):
                target.hardlink_to(path / file.name)
                continue
        log.warning("%s is damaged: a copy on another node counts", path / file.name)


def _receive(sock: socket.socket, files: Sequence[File], folder: Path) -> None:
    """Write the files, but for those that do not come as they were written."""
    log_at = time.monotonic() + _LOG_EVERY
    left = size = sum(file.size for file in files)
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        intact = False
        try:
            with path.open("xb") as target:
                crc, rest = 0, file.size
                while rest:
                    chunk = _read_some(sock, rest)
                    target.write(chunk)
                    crc, rest = zlib.crc32(chunk, crc), rest - len(chunk)
                    if time.monotonic() >= log_at:
                        log_at += _LOG_EVERY
                        text = "copying a checkpoint of %s, %s are left"
                        log.warning(text, shown(size), shown(left - file.size + rest))
            intact = crc == file.crc
        finally:
            if not intact:
                path.unlink(missing_ok=True)
        left -= file.size
