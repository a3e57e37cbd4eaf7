"""What is fuzzed: each takes bytes and raises only for what must not happen."""

import asyncio
import contextlib
import os
import socket
import struct
from typing import Any

import torch

from elastic_etcd.agent.channel import Channels, Peer
from elastic_etcd.core import history, values
from elastic_etcd.core.keys import decode as decode_value
from elastic_etcd.core.messages import FROM_AGENT, FROM_WORKER, Lines, decode, encode
from elastic_etcd.errors import MalformedState
from elastic_etcd.etcd import wire
from elastic_etcd.train import encoding, image
from elastic_etcd.train.snapshot import Snapshot
from tests.security.spoilt import JOBS, ME, acts

HELLO = b'{"type":"hello","v":1,"pid":1,"local_rank":0,"generation":7}\n'
KEEP = b'{"type":"keep","id":1,"name":"s"}\n'
_tensors: list[torch.Tensor] = []
_OBJECTS = encoding.encode({"a": [1, 2.5, None, True, "x", b"y"], ("k", 1): (1 << 80,)}, _tensors)
_TABLE, _ = image.pack({"a": b"x"}, [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)])
_loop = asyncio.new_event_loop()
SEEDS: dict[str, list[bytes]] = {
    "value": [value.encode() for job in JOBS for value in job.values()],
    "view": [
        bytes((which, key)) + value.encode()
        for which, job in enumerate(JOBS)
        for key, (_, value) in enumerate(sorted(job.items()))
    ],
    "line": [HELLO + KEEP, encode({"type": "world", "generation": 8, "reason": "", "env": {}})],
    "socket": [b"\1" + KEEP, b"\0" + KEEP, b"\3" + HELLO, b"\0" + b'{"type":"current","id":1}\n'],
    "encoding": [_OBJECTS, _TABLE],
    "image": [struct.pack("<QQ", len(_TABLE), 4096) + _TABLE],
}


def fuzz_value(data: bytes) -> None:
    """A value, read as each kind of key."""
    text = wire.decode(data)
    try:
        fields = decode_value(text)
    except ValueError:
        return
    kinds = (values.Spec, values.Round, values.Ledger, values.Outcome)
    for kind in kinds:
        with contextlib.suppress(ValueError):
            read = kind.decode(fields)
            again = kind.decode(decode_value(read.encode()))
            assert again == read, (read, again)
    with contextlib.suppress(ValueError):
        values.Member.decode(1, fields).encode().encode()
    with contextlib.suppress(ValueError):
        values.Ack.decode(1, fields).encode().encode()
    with contextlib.suppress(ValueError):
        values.Report.decode(1, 1, fields).encode().encode()
    with contextlib.suppress(ValueError):
        history.read(text)


def fuzz_view(data: bytes) -> None:
    """A job of which one or two values are others, separated by a zero byte."""
    if len(data) < 2:
        return
    found = dict(JOBS[data[0] % len(JOBS)])
    for place, part in enumerate(data[2:].split(b"\0", 1)):
        key = sorted(found)[(data[1] + place) % len(found)]
        found[key] = wire.decode(part)
    acts(found, ME)


def fuzz_line(data: bytes) -> None:
    """In two pieces."""
    lines = Lines()
    with contextlib.suppress(ValueError):
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            for each in lines.feed(piece):
                for table in (FROM_WORKER, FROM_AGENT):
                    with contextlib.suppress(ValueError):
                        encode(decode(each, table))


def fuzz_socket(data: bytes) -> None:
    """After hello, with as many descriptors as the first byte says."""
    _loop.run_until_complete(_throw(data))


async def _throw(data: bytes) -> None:
    heard: list[Any] = []

    def current(peer: Peer, number: int) -> None:
        peer.send({"type": "current", "id": number, "current": True, "reason": ""})

    channels = Channels(lambda _, message: heard.append(message), current)
    ours, theirs = socket.socketpair()
    peer = Peer(channels, theirs, 1)
    channels.peers.add(peer)
    null = os.open(os.devnull, os.O_RDONLY)
    greeting = b"" if data[:1] >= b"\x80" else HELLO
    fds = [null] * (data[0] % 8 if data else 0)
    socket.send_fds(ours, [greeting + data[1:] or b"\n"], fds)
    ours.shutdown(socket.SHUT_WR)
    for _ in range(100):
        if peer not in channels.peers:
            break
        peer._read()  # noqa: SLF001 - as the loop would
    assert peer not in channels.peers
    ours.close()
    os.close(null)
    channels.close()


def fuzz_encoding(data: bytes) -> None:
    """What is read can be written, and is read as the same bytes again."""
    try:
        read = encoding.decode(data, (torch.zeros(1),))
    except MalformedState:
        return
    tensors: list[torch.Tensor] = []
    again = encoding.encode(read, tensors)
    assert encoding.encode(encoding.decode(again, tensors), []) == again


def fuzz_image(data: bytes) -> None:
    """A slot with a header whose sums are right, but nothing else need be."""
    if len(data) < 16:
        return
    image.Header.unpack(data)
    objects, size = struct.unpack("<QQ", data[:16])
    body = data[16:].ljust(-(-max(len(data) - 16, 1) // 64) * 64, b"\0")
    snapshot = Snapshot([os.memfd_create("fuzz") for _ in range(2)])
    slot = snapshot.other()
    slot.clear(len(body)).copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    digest = image.digest_of(slot.body(len(body)))
    for length in (size, len(body)):
        slot.set(image.Header(image.Version(1, 1, 1), objects, length, digest))
        if (newest := snapshot.check()) is None:
            continue
        header = newest.header()
        assert header is not None
        with contextlib.suppress(MalformedState):
            image.unpack(newest.read(header.objects), newest.body(header.size))
