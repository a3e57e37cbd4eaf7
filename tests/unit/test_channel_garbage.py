"""Whatever a worker says, its agent lives and answers the others."""

import asyncio
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_etcd.agent.channel import ChannelServer, WorkerChannel
from elastic_etcd.protocol.messages import (
    AskCurrent,
    Current,
    Disconnected,
    Elastic,
    FromWorker,
    Hello,
    Parked,
    Welcome,
    encode,
)
from elastic_etcd.protocol.packets import address_of

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
VALID: dict[str, dict[str, Any]] = {
    "elastic": {},
    "hello": {"v": 1, "pid": 1, "local_rank": 0, "generation": 7},
    "parked": {"generation": 7, "error": "x"},
    "keep": {"id": 1, "name": "state"},
    "recall": {"id": 1, "name": "state"},
    "current": {"id": 1},
}


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A message of a known type, as it should be or with something wrong."""
    kind = draw(st.sampled_from(sorted(VALID)))
    message: dict[str, Any] = {"type": kind, **VALID[kind]}
    for name in draw(st.lists(st.sampled_from(sorted(message)), max_size=1)):
        message[name] = draw(json_values)
    return json.dumps(message).encode()


words = st.lists(messages() | st.binary(min_size=1, max_size=50), max_size=8)


@pytest.mark.usefixtures("no_garbage")
@settings(max_examples=300)
@given(parts=words, greets=st.booleans(), descriptors=st.lists(st.integers(0, 5), max_size=3))
def test_anything_at_all(parts: list[bytes], greets: bool, descriptors: list[int]) -> None:
    before = list(Path("/proc/self/fd").iterdir())
    logging.disable()
    asyncio.run(throw(parts, greets, descriptors))
    logging.disable(logging.NOTSET)
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before)


async def throw(parts: list[bytes], greets: bool, descriptors: list[int]) -> None:
    loop = asyncio.get_running_loop()
    raised: list[Any] = []
    loop.set_exception_handler(lambda _, context: raised.append(context))

    def heard(channel: WorkerChannel, message: FromWorker | Disconnected) -> None:
        assert channel.local_rank >= 0
        if isinstance(message, AskCurrent):
            channel.send(Current(message.id, True, ""))
        else:
            assert isinstance(message, Elastic | Parked | Disconnected)

    server = ChannelServer(heard)
    path = address_of(server.open())
    hello = encode(Hello(1, 1, 0, 7))
    with seqpacket() as sock, Path(os.devnull).open() as null:
        sock.connect(path)
        if greets:
            sock.sendall(hello)
        for number, part in enumerate(parts):
            try:
                fds = [null.fileno()] * descriptors.count(number)
                socket.send_fds(sock, [part], fds)
            except (BrokenPipeError, ConnectionResetError):
                break
        sock.shutdown(socket.SHUT_WR)
        sock.setblocking(False)
        await ended(sock)
    with seqpacket() as sock:
        sock.connect(path)
        sock.sendall(hello)
        sock.setblocking(False)
        assert await asyncio.wait_for(loop.sock_recv(sock, 100), 60) == encode(Welcome(1, ""))
    server.close()
    assert not raised, raised


def seqpacket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


async def ended(sock: socket.socket) -> None:
    """Until the agent has read it all."""
    loop = asyncio.get_running_loop()
    try:
        while await asyncio.wait_for(loop.sock_recv(sock, 1 << 16), 60):
            pass
    except ConnectionResetError:
        pass
