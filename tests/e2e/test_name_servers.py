"""A name server that never answers, where torch looks up the name of each peer for its log."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

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


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a mount namespace"
)
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
        command = 'mount --bind "$0" /etc/resolv.conf; exec "$@"'
        agent = (sys.executable, "-m", "elastic_etcd.launch", "--standalone")
        flags = ("--start-method", method, "--nproc-per-node=2", "train.py")
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", command, "resolv.conf", *agent, *flags],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        server.sendto(b"", ADDRESS)
        thread.join()
    assert done.returncode == 0, done.stderr
    assert questions, "torch looks names up no more: then the package need not care"
    assert len(set(questions)) == len(questions), "it is asked again"  # an id is by chance
