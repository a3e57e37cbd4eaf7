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

from elastic_etcd.agent.channel import Channels, Peer
from elastic_etcd.core.messages import FROM_WORKER

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
VALID: dict[str, dict[str, Any]] = {
    "hello": {"v": 1, "pid": 1, "local_rank": 0, "generation": 7},
    "parked": {"generation": 7, "error": "x"},
    "keep": {"id": 1, "name": "state"},
    "recall": {"id": 1, "name": "state"},
    "current": {"id": 1},
}


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A message of a known type, as it should be or with something wrong."""
    kind = draw(st.sampled_from(sorted(FROM_WORKER)))
    message: dict[str, Any] = {"type": kind, **VALID.get(kind, {})}
    for name in draw(st.lists(st.sampled_from(sorted(message)), max_size=1)):
        message[name] = draw(json_values)
    return json.dumps(message).encode() + b"\n"


words = st.lists(messages() | st.binary(max_size=50) | st.just(b"\n"), max_size=8)


@pytest.mark.usefixtures("no_garbage")
@settings(max_examples=300, deadline=None)
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

    def current(peer: Peer, number: int) -> None:
        peer.send({"type": "current", "id": number, "current": True, "reason": ""})

    def heard(peer: Peer, message: dict[str, Any]) -> None:
        assert peer.local_rank >= 0
        assert message["type"] in {"elastic", "parked", "disconnected"}

    channels = Channels(heard, current)
    path = channels.open()
    hello = json.dumps({"type": "hello", **VALID["hello"]}).encode() + b"\n"
    with socket.socket(socket.AF_UNIX) as sock, Path(os.devnull).open() as null:
        sock.connect(path)
        sock.sendall(hello if greets else b"")
        for number, part in enumerate(parts):
            try:
                fds = [null.fileno()] * descriptors.count(number)
                socket.send_fds(sock, [part or b"\n"], fds)
            except (BrokenPipeError, ConnectionResetError):
                break
        sock.shutdown(socket.SHUT_WR)
        sock.setblocking(False)
        await ended(sock)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(hello)
        sock.setblocking(False)
        assert (
            await asyncio.wait_for(loop.sock_recv(sock, 100), 20) == b'{"type":"welcome","v":1}\n'
        )
    channels.close()
    assert not raised, raised


async def ended(sock: socket.socket) -> None:
    """Until the agent has read it all."""
    loop = asyncio.get_running_loop()
    try:
        while await asyncio.wait_for(loop.sock_recv(sock, 1 << 16), 20):
            pass
    except ConnectionResetError:
        pass
