"""A name server that never answers, where torch looks up the name of each peer for its log."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
from torch.distributed import TCPStore

from tests.support.job import ROOT

ADDRESS = ("127.0.153.53", 53)
TRAINS = """\
import torch.distributed as dist
import elastic_etcd as ee

@ee.run(backend="gloo")
def train(state):
    dist.barrier()
    ee.store().set("done", "1")

train(ee.ElasticState(step=0))
"""


needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a mount namespace"
)
pytestmark = pytest.mark.timeout(300)


def with_its_name_server(folder: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program there, where /etc/resolv.conf is the folder's."""
    command = 'mount --bind "$0" /etc/resolv.conf; exec "$@"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-ec", command, "resolv.conf", sys.executable, *argv],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@needs_mounts
@pytest.mark.parametrize(
    "method", ["prefork", pytest.param("exec", marks=pytest.mark.nightly(part="jobs"))]
)
def test_a_name_server_that_is_silent_is_asked_once(tmp_path: Path, method: str) -> None:
    """Asking it again, after 5 s, is what makes each start of a worker take 10 s."""
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "resolv.conf").write_text(f"nameserver {ADDRESS[0]}\n")
    questions: list[bytes] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(ADDRESS)
        thread = Thread(target=lambda: questions.extend(iter(lambda: server.recv(512), b"")))
        thread.start()
        agent = ("-m", "elastic_etcd.launch", "--standalone", "--start-method", method)
        done = with_its_name_server(tmp_path, *agent, "--nproc-per-node=2", "train.py")
        server.sendto(b"", ADDRESS)
        thread.join()
    assert done.returncode == 0, done.stderr
    assert questions, "torch looks names up no more: then the package need not care"
    assert len(set(questions)) == len(questions), "it is asked again"  # an id is by chance


CONNECTS = "import elastic_etcd as ee; ee.store().set('found', 'it')"


@needs_mounts
@pytest.mark.nightly(part="jobs")
def test_a_name_of_a_node_is_looked_up_with_patience(tmp_path: Path) -> None:
    """An answer that comes on the second question is as good as one on the first."""
    (tmp_path / "resolv.conf").write_text(f"nameserver {ADDRESS[0]}\n")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(ADDRESS)
        thread = Thread(target=answer_again, args=(server,))
        thread.start()
        done = with_its_name_server(
            tmp_path, "-c", CONNECTS, MASTER_ADDR="n1.example.test", MASTER_PORT=str(store.port)
        )
        server.sendto(b"", ADDRESS)
        thread.join()
    assert done.returncode == 0, done.stderr
    assert store.get("ee.store/0/found") == b"it"


def answer_again(server: socket.socket) -> None:
    """127.0.0.1 to the second question for a name; nothing to others."""
    asked: set[bytes] = set()
    while True:
        question, whose = server.recvfrom(512)
        if not question:
            return
        is_address = question.endswith(b"\0\1\0\1")  # of type A
        if question in asked or not is_address:
            head = question[:2] + b"\x81\x80" + question[4:6] + bytes([0, is_address, 0, 0, 0, 0])
            found = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + bytes([127, 0, 0, 1])
            server.sendto(head + question[12:] + found * is_address, whose)
        asked.add(question)
