"""What is fuzzed: each takes bytes and raises only for what must not happen."""

import asyncio
import contextlib
import math
import os
import socket
import struct

import torch

from elastic_etcd.agent.channel import ChannelServer, WorkerChannel
from elastic_etcd.agent.file_timers import request_of
from elastic_etcd.core import schema
from elastic_etcd.errors import MalformedState
from elastic_etcd.etcd import wire
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
from elastic_etcd.train.state import encoding, snapshot_format
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
_TABLE, _ = snapshot_format.pack({"x": {"$tensor": "a"}}, _NAMED)
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
    "timer": [b'{"version": 1, "pid": 7, "scope_id": "x", "expiration_time": 1.5e9, "signal": 9}'],
    "socket": [b"\1" + KEEP, b"\0" + KEEP, b"\3" + HELLO, b"\0" + ASK + b"\n" + KEEP],
    "codecs": [_OBJECTS, _TABLE],
    "snapshot": [struct.pack("<QQ", len(_TABLE), 4096) + bytes(128) + _TABLE],
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


def fuzz_timer(data: bytes) -> None:
    """A line of torch's file timers."""
    with contextlib.suppress(ValueError, RecursionError):
        request = request_of(data)
        assert request.pid > 0, request
        assert math.isfinite(request.expiration_time), request


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
