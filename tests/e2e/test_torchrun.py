"""Stock torchrun with `--rdzv-backend etcd-v3`: nodes that fail, come and go."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.etcd import EtcdServer
from tests.support.processes import MARK, command, marked, send

pytestmark = pytest.mark.timeout(600)

PATIENCE = 150.0
SCRIPT = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print("world of", dist.get_world_size(), flush=True)
end = torch.zeros(1)
while not end:
    end[0] = float(Path(sys.argv[1]).exists())
    dist.all_reduce(end)
    time.sleep(0.05)
dist.destroy_process_group()
"""


class Torchrun:
    """A node: torchrun, and what is in its processes' environment by which they are found."""

    def __init__(self, name: str, folder: Path, etcd: EtcdServer, prefix: str) -> None:
        self._mark = f"{prefix}/{name}"
        self._log = folder / f"{name}.log"
        conf = f"prefix={prefix},lease_ttl=2,settle=1,join_settle=0.2"
        launch = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "etcd-v3"]
        launch += ["--rdzv-endpoint", etcd.endpoint, "--rdzv-id", "job", "--rdzv-conf", conf]
        launch += ["--nnodes", "1:3", "--max-restarts", "5"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*launch, str(folder / "script.py"), str(folder / "end")],
                stdout=log,
                stderr=log,
                env={**os.environ, MARK: self._mark},
            )

    @property
    def worlds(self) -> list[int]:
        """The sizes of the worlds that its worker has been in."""
        return [int(size) for size in re.findall(r"world of (\d+)", self._log.read_text())]

    @property
    def worker(self) -> int:
        """The process that trains."""
        (found,) = [pid for pid in marked(self._mark) if "-u" in command(pid).split()]
        return found

    def reaches(self, size: int, *, after: int = 0) -> None:
        """It trains in a world of that size, the newest one of more than `after`."""
        deadline = time.monotonic() + PATIENCE
        while len(self.worlds) <= after or self.worlds[-1] != size:
            assert time.monotonic() < deadline, self._log.read_text()
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        """All processes at once, as a machine that loses its power."""
        send(signal.SIGKILL, marked(self._mark))
        self.process.wait()


@pytest.fixture
def nodes(tmp_path: Path, etcd: EtcdServer, prefix: str) -> Iterator[list[Torchrun]]:
    (tmp_path / "script.py").write_text(SCRIPT)
    started: list[Torchrun] = []
    yield started
    for node in started:
        node.kill()


def test_a_worker_fails_a_node_comes_etcd_restarts_and_a_node_is_lost(
    nodes: list[Torchrun], tmp_path: Path, etcd: EtcdServer, prefix: str
) -> None:
    n1, n2 = (Torchrun(name, tmp_path, etcd, prefix) for name in ("n1", "n2"))
    nodes += [n1, n2]
    for node in (n1, n2):
        node.reaches(2)
    before = [(node, len(node.worlds)) for node in (n1, n2)]
    send(signal.SIGKILL, [n2.worker])
    for node, worlds in before:
        node.reaches(2, after=worlds)
    n3 = Torchrun("n3", tmp_path, etcd, prefix)
    nodes.append(n3)
    for node in nodes:
        node.reaches(3)
    etcd.kill()
    etcd.start()
    n1.kill()
    for node in (n2, n3):
        node.reaches(2)
    (tmp_path / "end").touch()
    assert [node.process.wait(PATIENCE) for node in (n2, n3)] == [0, 0]
    late = Torchrun("late", tmp_path, etcd, prefix)
    nodes.append(late)
    assert late.process.wait(PATIENCE) == 0, "the job has succeeded without it"
    assert late.worlds == []
