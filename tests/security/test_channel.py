"""Anything at the socket of an agent whose workers train: it hangs up, and they go on."""

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Job

pytestmark = pytest.mark.timeout(90)

HELLO = b'{"type":"hello","v":1,"pid":1,"local_rank":0,"generation":1}\n'
GARBAGE = {
    "no JSON": b"}{\n",
    "no text": b"\xff\xfe\x00\n",
    "no end": b"x" * (1 << 17),
    "deep": b"[" * 60_000 + b"\n",
    "a huge number": b'{"type":"hello","v":' + b"9" * 60_000 + b"}\n",
    "an unknown type": HELLO + b'{"type":"exec","code":"exit()"}\n',
    "wrong fields": HELLO + b'{"type":"parked","generation":"7","error":null}\n',
    "no descriptor": HELLO + b'{"type":"keep","id":1,"name":"state"}\n',
    "too many questions": HELLO
    + b"".join(b'{"type":"current","id":%d}\n' % number for number in range(5000)),
    "twice": HELLO + HELLO,
}


def socket_of(agent: int) -> str:
    """Where the agent listens for its workers."""
    links = [fd.readlink() for fd in Path(f"/proc/{agent}/fd").iterdir() if fd.is_symlink()]
    inodes = {str(link)[8:-1] for link in links if str(link).startswith("socket:[")}
    for line in Path(f"/proc/{agent}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[7].endswith("/agent") and fields[6] in inodes:
            return fields[7]
    raise AssertionError(f"{agent} listens nowhere")


def hung_up(path: str, data: bytes) -> bool:
    """Whether the agent ends the connection on which this is said; else TimeoutError."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(data)
            while sock.recv(1 << 16):
                pass
    return True


def test_anything_at_the_socket_of_an_agent_whose_workers_train(job: Job) -> None:
    n1 = job.start("n1", nnodes="1")
    generation = job.trains(1)
    path = socket_of(n1.pid)
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    before = len(list(Path(f"/proc/{n1.pid}/fd").iterdir()))
    for what, data in GARBAGE.items():
        assert hung_up(path, data), what
    with contextlib.ExitStack() as stack:  # nor does one who says nothing, or half of something
        for number in range(200):
            idle = stack.enter_context(socket.socket(socket.AF_UNIX))
            idle.connect(path)
            idle.sendall(HELLO[: number % 40])
        job.goes_on(generation)
    job.goes_on(generation)
    assert len(list(Path(f"/proc/{n1.pid}/fd").iterdir())) <= before
    assert n1.output.count("hanging up on") == len(GARBAGE)
    assert "Traceback" not in n1.output
    assert {e.generation for e in job.events()} == {generation}
    job.finish(n1)


def test_worker_that_parks_with_a_strange_error(job: Job) -> None:
    """What it says goes into etcd and onto the terminals of all nodes."""
    script = job.directory / "odd.py"
    error = "\x1b[2J \ud800 \udcff " + "x" * 50_000
    script.write_text(
        "import json, os, socket\n"
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.connect(os.environ['ELASTIC_ETCD_SOCKET'])\n"
        "g = int(os.environ['ELASTIC_ETCD_GENERATION'])\n"
        "hello = {'type': 'hello', 'v': 1, 'pid': os.getpid(), 'local_rank': 0, 'generation': g}\n"
        f"parked = {{'type': 'parked', 'generation': g, 'error': {json.dumps(error)}}}\n"
        "for message in (hello, {'type': 'elastic'}, parked):\n"
        "    sock.sendall(json.dumps(message).encode() + b'\\n')\n"
        "while sock.recv(1 << 16): pass\n"
    )
    soon: dict[str, Any] = {"max_restarts": 0, "lease_ttl": 1, "shutdown_timeout": 0}
    n1 = job.start("n1", nnodes="1", script=(str(script),), **soon)
    job.exits(n1, 1, seconds=60)
    assert "it lost its peers: \\x1b[2J ? ? xxx" in n1.output
    assert "\x1b" not in n1.output
    assert "error: " in n1.output
    assert "Error: " not in n1.output
