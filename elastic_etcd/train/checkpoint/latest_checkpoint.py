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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Self

import torch.distributed as dist
from msgspec import Meta, MsgspecError, Struct, json

from elastic_etcd.errors import MalformedState, WrongHere
from elastic_etcd.protocol.messages import Number
from elastic_etcd.train.checkpoint.memory_checkpoint import (
    CHUNK,
    LONGEST_MANIFEST,
    MANIFEST,
    Checkpoint,
    File,
    Manifest,
    check_free,
    check_intact,
    found_in,
    give_name,
    keep_only,
    memory_of,
    read_manifest,
    remember,
    remove_unfinished,
)
from elastic_etcd.train.state.free_memory import shown

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
        client = dist.TCPStore(*self._endpoint, is_master=False, timeout=timedelta(0, PATIENCE))
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
            path = self._get(checkpoint, nodes, plan, held)
            if self._all_have_it(number, checkpoint, path):
                assert path is not None
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
    ) -> Path | None:
        """The path here of a checkpoint, copied if need be; None if it can't be had whole."""
        path = held.get(checkpoint)
        if path and _is_intact(checkpoint, path):
            return path
        others = [rank for rank in nodes if rank != self._rank]
        first = self._rank % len(others) if others else 0  # so that each sends to some only
        for rank in others[first:] + others[:first]:
            try:
                return pull(plan.offers[rank], checkpoint, self._memory)
            except (OSError, MalformedState) as error:
                log.warning(
                    "%s can't be copied from group rank %d: %s", checkpoint.name, rank, error
                )
        return None

    def _all_have_it(self, number: int, checkpoint: Checkpoint, path: Path | None) -> bool:
        if path is None:
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
    try:
        return json.decode(data, type=Offer)
    except (MsgspecError, ValueError, RecursionError) as error:  # not UTF-8, too
        raise MalformedState(f"not an offer of checkpoints: {error}") from None


class Sender:
    """Serves a node's checkpoints to those who know the nonce of its offer; a context."""

    def __init__(self, address: str, held: Mapping[Checkpoint, Path]) -> None:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((address, 0), family=family)
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
    data = (path / MANIFEST).read_bytes()
    caller.sendall(_LENGTH.pack(len(data)) + data)
    for file in read_manifest(data, checkpoint).files:
        if file.size:
            with (path / file.name).open("rb") as source:
                caller.sendfile(source, count=file.size)


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


def pull(offer: Offer, checkpoint: Checkpoint, memory: Path) -> Path:
    """Copy a checkpoint from the node that offers it, into memory; gives its path.

    Older ones stay until the new one is whole. Raises OSError, MalformedState for another one than
    was offered, and UsageError without enough free memory.
    """
    folder = memory / ".copied"
    rmtree(folder, ignore_errors=True)
    with socket.create_connection((offer.addr, offer.port), _SILENCE) as sock:
        sock.settimeout(_SILENCE)
        nonce = bytes.fromhex(offer.nonce)
        sock.sendall(_HELLO.pack(nonce, checkpoint.step, checkpoint.generation))
        (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
        if length > LONGEST_MANIFEST:
            raise MalformedState(f"a manifest of {shown(length)}")
        manifest = read_manifest(_read(sock, length), checkpoint)
        check_free(memory, manifest.size, f"{checkpoint.name}, from {offer.addr},")
        folder.mkdir()
        try:
            _receive(sock, manifest, folder)
            return give_name(folder, manifest, memory)
        finally:
            rmtree(folder, ignore_errors=True)


def _receive(sock: socket.socket, manifest: Manifest, folder: Path) -> None:
    log_at = time.monotonic() + _LOG_EVERY
    left = size = manifest.size
    for file in manifest.files:
        for received in _receive_file(sock, file, folder):
            left -= received
            if time.monotonic() >= log_at:
                log_at += _LOG_EVERY
                log.warning("copying a checkpoint of %s, %s are left", shown(size), shown(left))


def _receive_file(sock: socket.socket, file: File, folder: Path) -> Iterator[int]:
    """Write one file; gives the sizes of its chunks as they come."""
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    crc, left = 0, file.size
    with path.open("xb") as target:
        while left:
            chunk = _read_some(sock, left)
            target.write(chunk)
            crc = zlib.crc32(chunk, crc)
            left -= len(chunk)
            yield len(chunk)
    if crc != file.crc:
        raise MalformedState(f"{file.name} did not arrive as it was written")
