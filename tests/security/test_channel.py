"""Anything at the socket of an agent whose workers train: it hangs up, and they go on."""

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.protocol.packets import address_of
from tests.support.job import Job
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(300)

HELLO = b'{"type":"hello","v":1,"pid":1,"local_rank":0,"generation":1}'
# Each a few packets.
GARBAGE: dict[str, list[bytes]] = {
    "no JSON": [b"}{"],
    "no text": [b"\xff\xfe\x00"],
    "too long": [b"x" * (1 << 17)],
    "deep": [b"[" * 60_000],
    "deep in what is ignored": [b'{"type":"hello","x":' + b"[" * 60_000],
    "a huge number": [b'{"type":"hello","v":' + b"9" * 60_000 + b"}"],
    "a negative local rank": [HELLO.replace(b'"local_rank":0', b'"local_rank":-1')],
    "an unknown type": [HELLO, b'{"type":"exec","code":"exit()"}'],
    "wrong fields": [HELLO, b'{"type":"parked","generation":"7","error":null}'],
    "half a character": [HELLO, b'{"type":"parked","generation":1,"error":"\\ud800"}'],
    "no descriptor": [HELLO, b'{"type":"keep","id":1,"name":"state"}'],
    "too many questions": [HELLO, *(b'{"type":"current","id":%d}' % n for n in range(5000))],
    "twice": [HELLO, HELLO],
    "two in one packet": [HELLO + b"\n" + HELLO],
}


def socket_of(agent: int) -> str:
    """The name at which the agent listens for its workers."""
    links = [fd.readlink() for fd in Path(f"/proc/{agent}/fd").iterdir() if fd.is_symlink()]
    inodes = {str(link)[8:-1] for link in links if str(link).startswith("socket:[")}
    for line in Path(f"/proc/{agent}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[7].startswith("@elastic_etcd-") and fields[6] in inodes:
            return fields[7]
    raise AssertionError(f"{agent} listens nowhere")


def hung_up(path: str, packets: list[bytes]) -> bool:
    """Whether the agent ends the connection on which this is said; else TimeoutError."""
    with seqpacket() as sock:
        sock.settimeout(20)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sock.connect(path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for packet in packets:
                sock.sendall(packet)
            while sock.recv(1 << 16):
                pass
    return True


def seqpacket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def test_anything_at_the_socket_of_an_agent_whose_workers_train(job: Job) -> None:
    n1 = job.start("n1", nnodes="1")
    generation = job.trains(1)
    path = address_of(socket_of(n1.pid))
    before = len(list(Path(f"/proc/{n1.pid}/fd").iterdir()))
    for what, packets in GARBAGE.items():
        assert hung_up(path, packets), what
    with contextlib.ExitStack() as stack:  # nor does one who says nothing, or no more than hello
        for number in range(200):
            idle = stack.enter_context(seqpacket())
            idle.connect(path)
            if number % 2:
                idle.sendall(HELLO)
        job.goes_on(generation)
    job.goes_on(generation)
    assert len(list(Path(f"/proc/{n1.pid}/fd").iterdir())) <= before
    assert n1.output.count("hanging up on") == len(GARBAGE)
    assert "Traceback" not in n1.output
    assert {e.generation for e in job.events()} == {generation}
    job.finish(n1)


def test_worker_that_parks_with_a_strange_error(ticks: TickingJob) -> None:
    """What it says goes into etcd and onto the terminals of all nodes."""
    script = ticks.directory / "odd.py"
    error = "\x1b[2J \0 \x9b " + "x" * 50_000
    script.write_text(
        "import json, os, socket\n"
        "sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "sock.connect(os.environ['ELASTIC_ETCD_SOCKET'].replace('@', '\\0', 1))\n"
        "g = int(os.environ['ELASTIC_ETCD_GENERATION'])\n"
        "hello = {'type': 'hello', 'v': 1, 'pid': os.getpid(), 'local_rank': 0, 'generation': g}\n"
        f"parked = {{'type': 'parked', 'generation': g, 'error': {json.dumps(error)}}}\n"
        "for message in (hello, {'type': 'elastic'}, parked):\n"
        "    sock.sendall(json.dumps(message).encode())\n"
        "while sock.recv(1 << 16): pass\n"
    )
    soon: dict[str, Any] = {"max_restarts": 0, "shutdown_timeout": 0}
    n1 = ticks.start("n1", nnodes="1", script=(str(script),), **soon)
    ticks.exits(n1, 1, seconds=60)
    assert "it lost its peers: \\x1b[2J \\x00 \\x9b xxx" in n1.output
    assert "\x1b" not in n1.output
    assert "error: " in n1.output
    assert "Error: " not in n1.output
