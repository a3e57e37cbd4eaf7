"""Strangers who call an agent where only other agents should."""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.core.schema import Contact
from tests.support.etcd import EtcdServer
from tests.support.job import Agent
from tests.support.lines import (
    connect,
    contact,
    hello,
    impostor,
    members,
    missed,
    nobody_is_dead,
)
from tests.support.residue import members_are
from tests.support.ticking import TickingJob, ticking

pytestmark = pytest.mark.timeout(600)

LONG: dict[str, Any] = {"lease_ttl": 600, "log_level": "debug"}
MANY = 3000


@pytest.fixture
def job(etcd: EtcdServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TickingJob]:
    with ticking(etcd.endpoint, etcd, tmp_path / "job", request) as job:
        yield job


def pair(job: TickingJob, etcd: EtcdServer) -> tuple[Agent, Agent, int]:
    """Two nodes that train, the first one as the coordinator, and their generation."""
    n1 = job.start("n1", **LONG)
    members_are(etcd, job.name, 1)
    n2 = job.start("n2", **LONG)
    generation = job.trains(2)
    missed(job, n1, n2)
    return n1, n2, generation


def says(sock: socket.socket, text: bytes) -> bytes:
    """What somebody who says this is answered, until the connection ends."""
    sock.sendall(text)
    try:
        return sock.recv(100)
    except ConnectionResetError:
        return b""


def test_strangers_are_not_heard_and_do_no_harm(job: TickingJob, etcd: EtcdServer) -> None:
    """Garbage, a wrong nonce, half a hello, thousands of connections; a death is seen after all."""
    n1, n2, g = pair(job, etcd)
    there = members(etcd, job.name)
    for member in there.values():
        to = contact(member)
        right = hello(to, there["n2"].lease)
        for text in (
            b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n",
            os.urandom(1 << 20),
            bytes(len(right)),
            right[:-9] + bytes(9),
            bytes([right[0] ^ 1]) + right[1:],
            right[:5],  # and no more: the agent waits, but not for ever
        ):
            with connect(to) as sock:
                assert says(sock, text) == b"", text[:40]
        with ExitStack() as stack:
            for _ in range(MANY):
                stack.enter_context(connect(to))
            nobody_is_dead(job, n1, g, 2)
    job.undisturbed(g)
    n2.node_kill()
    job.trains(1, after=g)
    job.finish(n1)


@contextmanager
def floods(to: Contact) -> Iterator[None]:
    """All places of an agent are taken while this is open, again and again."""
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            with ExitStack() as stack:
                for _ in range(150):
                    sock = stack.enter_context(socket.socket())
                    sock.setblocking(False)
                    sock.connect_ex((to.addr, to.port))

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_who_can_read_etcd_kills_nobody(job: TickingJob, etcd: EtcdServer) -> None:
    """A line in another one's name, which ends: that one is asked, if it has a place or not."""
    n1, n2, g = pair(job, etcd)
    there = members(etcd, job.name)
    for number in range(5):
        with impostor(called=there["n1"], named=there["n2"]) as line:
            if number % 2:
                line.sendall(b"more than a goodbye")
    with impostor(called=there["n2"], named=there["n1"]):
        pass
    nobody_is_dead(job, n1, g, 2)
    calls = n1.output.count("n2 would be missed at once")
    with impostor(called=there["n1"], named=there["n2"]) as line:
        missed(job, n1, n2, times=calls + 1)
        with floods(contact(there["n2"])):
            nobody_is_dead(job, n1, g, 0.2)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            line.close()  # by a reset, as a kernel ends what a process leaves behind
            nobody_is_dead(job, n1, g, 1)
    job.undisturbed(g)
    job.finish(n1, n2)
