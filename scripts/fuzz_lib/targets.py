"""What is fuzzed: each takes bytes and raises only for what must not happen."""

import asyncio
import contextlib
import math
import os
import re
import socket
import struct
import tempfile
from pathlib import Path

import torch

from elastic_etcd.agent.channel import ChannelServer, WorkerChannel
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.failures import failure_message
from elastic_etcd.agent.followers import metrics
from elastic_etcd.agent.followers.metrics import Metrics
from elastic_etcd.agent.followers.notices import seconds_left
from elastic_etcd.agent.inbox import Tasks
from elastic_etcd.agent.peer_links import PeerLinks
from elastic_etcd.core import schema
from elastic_etcd.errors import MalformedState
from elastic_etcd.etcd import wire
from elastic_etcd.protocol.activity import SIZE, ActivityPage, Doing
from elastic_etcd.protocol.messages import (
    LONGEST_TEXT,
    AskCurrent,
    CannotImport,
    Current,
    Disconnected,
    Forked,
    FromWorker,
    Hello,
    Keep,
    NextWorld,
    encode,
    from_agent,
    from_fork_server,
    from_forked,
    from_worker,
)
from elastic_etcd.train.checkpoint.checkpoint_folder import Checkpoint, read_manifest
from elastic_etcd.train.checkpoint.latest_checkpoint import read_names, read_offer
from elastic_etcd.train.state import encoding, files, snapshot_format, sync
from elastic_etcd.train.state.snapshot_bytes import digest_of
from elastic_etcd.train.state.snapshot_store import Snapshots
from tests.support.spoilt import JOBS, LOCAL, acts

HELLO = encode(Hello(1, 1, 0, 7))
KEEP = encode(Keep(1, "s"))
ASK = encode(AskCurrent(1))
KINDS: tuple[type[schema.Value], ...] = (
    *(schema.Spec, schema.Round, schema.Ledger, schema.Outcome, schema.Member),
    *(schema.Ready, schema.Report, schema.History),
)
_OBJECTS = encoding.dumps(
    encoding.encode(
        {"a": [1, 2.5, None, {3}, "x", b"y"], ("k", 1): (1 << 80, torch.Size([2]), torch.int8)}, {}
    )
)
_NAMED = {"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.int64)}
_TABLE, _BODY = snapshot_format.pack({"x": {"$tensor": "a"}}, _NAMED)
_PARTS = torch.zeros(_BODY - snapshot_format.aligned(len(_TABLE)), dtype=torch.uint8)
_WHOLE = torch.cat((_PARTS, torch.frombuffer(bytearray(_TABLE), dtype=torch.uint8)))
_WHOLE = torch.nn.functional.pad(_WHOLE, (0, _BODY - len(_WHOLE)))
_HEADER = snapshot_format.Header(
    snapshot_format.Version(1, 1, 1), len(_TABLE), _BODY, digest_of(_WHOLE)
)
_MANIFEST = b'{"step": 1, "generation": 1, "files": [{"name": "a/b", "size": 1, "crc": 1}]}'
_OFFER = b'{"addr": "h", "port": 1, "nonce": "%s", "held": [[1, 1]]}' % (b"0" * 32)
_METRICS = Metrics(AgentConfig(None, "j", ("train",), "n1", 1, schema.Limits(1, 1)))
_ports: list[tuple[PeerLinks, schema.Contact]] = []
_revoked: list[int] = []
_loop = asyncio.new_event_loop()
SEEDS: dict[str, list[bytes]] = {
    "value": [value.encode() for job in JOBS for value in job.values()],
    "view": [
        bytes((which, key)) + value.encode()
        for which, job in enumerate(JOBS)
        for key, (_, value) in enumerate(sorted(job.items()))
    ],
    "packet": [
        HELLO,
        *map(encode, (NextWorld(8, "", {"A": "b"}), CannotImport("m", ""), Forked(7))),
    ],
    "socket": [b"\1" + KEEP, b"\0" + KEEP, b"\3" + HELLO, b"\0" + ASK + b"\n" + KEEP],
    "codecs": [_OBJECTS, _TABLE],
    "snapshot": [struct.pack("<QQ", len(_TABLE), 4096) + bytes(128) + _TABLE],
    "saved": [files._header_of(_HEADER, _TABLE) + bytes(44)],  # noqa: SLF001 - a whole file
    "checkpoint": [_MANIFEST, _OFFER],
    "inventory": [_HEADER.pack() + bytes(40)],
    "link": [b"\1" + bytes(8), b"\1" + bytes(9), b"\1" + bytes(7) + b"\1\4", b"\0" + bytes(24)],
    "request": [b"GET /metrics?x HTTP/1.1\r\nHost: h\r\n\r\n", b"HEAD /readyz HTTP/1.0\r\n\r\n"],
    "error": [
        b'{"message": {"message": "m", "extraInfo": {"py_callstack": "s"}}}',
        b"[rank0]: Traceback (most recent call last):\n[rank0]:   File\n[rank0]: E: a\n\nb",
    ],
    "page": [bytes(SIZE), struct.pack("=9q", *range(9))],
    "notice": [b"120", b"1e999", b"nan"],
}


def fuzz_value(data: bytes) -> None:
    """A value, read as each kind of key."""
    text = wire.decode(data)
    for kind in KINDS:
        from_key = dict.fromkeys(kind.FROM_KEY, 1)
        with contextlib.suppress(ValueError):
            read = schema.decode(kind, text, **from_key)
            again = schema.decode(kind, schema.encode(read), **from_key)
            assert again == read, (read, again)


def fuzz_view(data: bytes) -> None:
    """A job of which one or two values are others, separated by a zero byte."""
    if len(data) < 2:
        return
    found = dict(JOBS[data[0] % len(JOBS)])
    for place, part in enumerate(data[2:].split(b"\0", 1)):
        key = sorted(found)[(data[1] + place) % len(found)]
        found[key] = wire.decode(part)
    acts(found, LOCAL)


def fuzz_packet(data: bytes) -> None:
    """What is read can be written, and is read as the same message again."""
    for read in (from_worker, from_agent, from_fork_server, from_forked):
        with contextlib.suppress(ValueError):
            message = read(data)
            again = read(encode(message))
            assert again == message or len(data) > LONGEST_TEXT, (message, again)


def fuzz_socket(data: bytes) -> None:
    """One packet for each line after hello, the last with as many descriptors as a byte says."""
    _loop.run_until_complete(_throw(data))


async def _throw(data: bytes) -> None:
    def heard(channel: WorkerChannel, message: FromWorker | Disconnected) -> None:
        assert channel.local_rank >= 0
        if isinstance(message, AskCurrent):
            channel.send(Current(message.id, True, ""))

    server = ChannelServer(heard)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = WorkerChannel(server, theirs, 1)
    server.channels.add(channel)
    null = os.open(os.devnull, os.O_RDONLY)
    fds = [null] * (data[0] % 8 if data else 0)
    packets = [] if data[:1] >= b"\x80" else [HELLO]
    packets += filter(None, data[1:].split(b"\n")[:40])
    for packet in packets[:-1]:
        ours.send(packet)
    if packets:
        socket.send_fds(ours, packets[-1:], fds)
    ours.shutdown(socket.SHUT_WR)
    for _ in range(100):
        if channel not in server.channels:
            break
        channel._readable()  # noqa: SLF001 - as the loop would
    assert channel not in server.channels
    ours.close()
    os.close(null)
    server.close()


def fuzz_codecs(data: bytes) -> None:
    """What is read can be written, and is read as the same bytes again."""
    try:
        read = encoding.decode(encoding.loads(data), {"x": torch.zeros(1)})
    except MalformedState:
        return
    tensors: dict[str, torch.Tensor] = {}
    again = encoding.dumps(encoding.encode(read, tensors))
    read = encoding.decode(encoding.loads(again), tensors)
    assert encoding.dumps(encoding.encode(read, {})) == again


def fuzz_snapshot(data: bytes) -> None:
    """A memfd with a header whose sums are right, but nothing else need be."""
    if len(data) < 16:
        return
    snapshot_format.Header.unpack(data)
    objects, size = struct.unpack("<QQ", data[:16])
    body = data[16:].ljust(-(-max(len(data) - 16, 1) // 64) * 64, b"\0")
    snapshots = Snapshots([os.memfd_create("fuzz") for _ in range(2)])
    memfd = snapshots.clear_older(len(body))
    memfd.body(len(body)).copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    digest = digest_of(memfd.body(len(body)))
    for length in (size, len(body)):
        memfd.set(snapshot_format.Header(snapshot_format.Version(1, 1, 1), objects, length, digest))
        if newest := snapshots.newest_intact():
            with contextlib.suppress(MalformedState):
                newest.load()


def fuzz_saved(data: bytes) -> None:
    """A file that a state is loaded from: all of its bytes are right, or it is refused."""
    snapshots = Snapshots([os.memfd_create("fuzz") for _ in range(2)])
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(MalformedState):
            files.load(Path(file.name), snapshots.clear_older).load()


def fuzz_checkpoint(data: bytes) -> None:
    """No manifest has a name that leads out of its folder."""
    with contextlib.suppress(MalformedState):
        assert len(bytes.fromhex(read_offer(data).nonce)) == 16
    with contextlib.suppress(MalformedState):
        for file in read_manifest(data, Checkpoint(1, 1)).files:
            inside = os.path.normpath(f"/checkpoint/{file.name}")
            assert inside.startswith("/checkpoint/"), file
    with contextlib.suppress(MalformedState):
        assert all(isinstance(name, str) for name in read_names(data))


def fuzz_inventory(data: bytes) -> None:
    """15 numbers, as they come from each rank."""
    numbers = struct.unpack("<15q", data[:120].ljust(120, b"\0"))
    sync._read_inventory(*numbers)  # noqa: SLF001 - what is read of another rank


def fuzz_link(data: bytes) -> None:
    """Nobody is revoked, and no more than a byte is said."""
    _loop.run_until_complete(_call(data))


async def _call(data: bytes) -> None:
    contact = await _port()
    nonce = bytes.fromhex(contact.nonce) if data[:1] == b"\1" else b""
    reader, writer = await asyncio.open_connection(contact.addr, contact.port)
    with contextlib.suppress(ConnectionError):
        writer.write(nonce + data[1:])
        writer.write_eof()
        said = await reader.read()
        assert said in (b"", b"\x06", b"\x15"), said
    writer.close()
    assert not _revoked


async def _port() -> schema.Contact:
    """Where an agent of the fuzzer's listens; it stays."""

    async def revoke(lease: int) -> None:
        _revoked.append(lease)

    while not _ports:  # an address is looked up for a second at most
        links = PeerLinks(Tasks(), revoke)
        if contact := await links.open("127.0.0.1"):
            _ports.append((links, contact))
    return _ports[0][1]


def fuzz_request(data: bytes) -> None:
    """Whatever is asked, there is an answer, and one only."""
    answer = metrics.answer(data, _METRICS)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), head
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length
    assert len(body) == (0 if data.startswith(b"HEAD ") else int(length[1]))


def fuzz_error(data: bytes) -> None:
    """What a worker left is a text that can be told, and not too long."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        for stderr in (b"", data):
            failure_message(1, file.name, stderr, 0).encode()


def fuzz_page(data: bytes) -> None:
    """A page of memory with anything in it tells of some activity."""
    fd = os.memfd_create("fuzz")
    os.pwrite(fd, data[:SIZE].ljust(SIZE, b"\0"), 0)
    page = ActivityPage(fd)
    os.close(fd)
    read = page.read()
    assert isinstance(read.doing, Doing)
    assert all(math.isfinite(number) for number in read if isinstance(number, float)), read
    read.what.encode()


def fuzz_notice(data: bytes) -> None:
    """A file that says when, or anything."""
    seconds = seconds_left(data.decode(errors="replace").strip())
    assert seconds is None or math.isfinite(seconds)
