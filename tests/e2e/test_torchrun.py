"""Stock torchrun with `--rdzv-backend etcd-v3`: nodes that fail, come and go, on three etcds."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.etcd import EtcdCluster
from tests.support.processes import MARK, command, marked, send

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly(part="jobs")]

PATIENCE = 150.0
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print("world of", dist.get_world_size(), "as", os.environ["GROUP_RANK"], flush=True)
end = torch.zeros(1)
while not end:
    end[0] = float(Path(sys.argv[1]).exists())
    dist.all_reduce(end)
    time.sleep(0.05)
dist.destroy_process_group()
"""


class Torchrun:
    """A node: torchrun, and what is in its processes' environment by which they are found."""

    def __init__(self, name: str, folder: Path, endpoints: str, prefix: str) -> None:
        self._mark = f"{prefix}/{name}"
        self._log = folder / f"{name}.log"
        conf = f"prefix={prefix},lease_ttl=2,settle=1,join_settle=0.2"
        launch = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "etcd-v3"]
        launch += ["--rdzv-endpoint", endpoints, "--rdzv-id", "job", "--rdzv-conf", conf]
        launch += ["--nnodes", "1:3", "--max-restarts", "5"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*launch, str(folder / "script.py"), str(folder / "end")],
                stdout=log,
                stderr=log,
                env={**os.environ, MARK: self._mark},
            )
        self.node = f"{os.uname().nodename}-{self.process.pid}"

    @property
    def worlds(self) -> list[tuple[int, int]]:
        """The sizes of the worlds that its worker has been in, with its group rank there."""
        found = re.findall(r"world of (\d+) as (\d+)", self._log.read_text())
        return [(int(size), int(rank)) for size, rank in found]

    @property
    def worker(self) -> int:
        """The process that trains."""
        (found,) = [pid for pid in marked(self._mark) if "-u" in command(pid).split()]
        return found

    def reaches(self, size: int, *, after: int = 0) -> None:
        """It trains in a world of that size, the newest one of more than `after`."""
        deadline = time.monotonic() + PATIENCE
        while len(self.worlds) <= after or self.worlds[-1][0] != size:
            assert time.monotonic() < deadline, self._log.read_text()
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(0.1)

    def leaves(self, number: signal.Signals) -> None:
        """On this signal it ends with 1, and all that it has started ends."""
        self.process.send_signal(number)
        assert self.process.wait(PATIENCE) == 1, self._log.read_text()
        deadline = time.monotonic() + PATIENCE
        while left := marked(self._mark):
            assert time.monotonic() < deadline, [*map(command, left)]
            time.sleep(0.1)

    def kill(self) -> None:
        """All processes at once, as a machine that loses its power."""
        send(signal.SIGKILL, marked(self._mark))
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path, cluster: EtcdCluster, prefix: str) -> Iterator[Callable[[str], Torchrun]]:
    """Starts a node of that name."""
    (tmp_path / "script.py").write_text(SCRIPT)
    started: list[Torchrun] = []

    def node(name: str) -> Torchrun:
        started.append(Torchrun(name, tmp_path, ",".join(cluster.config.endpoints), prefix))
        return started[-1]

    yield node
    for each in started:
        each.kill()


def meet(*nodes: Torchrun, after: Sequence[int] = (0, 0, 0)) -> None:
    """All of them train in one world, of another number than `after`."""
    for node, worlds in zip(nodes, after, strict=False):
        node.reaches(len(nodes), after=worlds)


def worlds(*nodes: Torchrun) -> list[int]:
    """How many worlds each has been in."""
    return [len(node.worlds) for node in nodes]


def test_nodes_fail_come_and_go_and_etcd_fails(
    start: Callable[[str], Torchrun], tmp_path: Path, cluster: EtcdCluster, prefix: str
) -> None:
    n1, n2 = start("n1"), start("n2")
    meet(n1, n2)
    before = worlds(n1, n2)
    send(signal.SIGKILL, [n2.worker])
    meet(n1, n2, after=before)
    n3 = start("n3")
    meet(n1, n2, n3)
    lost, back, _ = cluster.members
    lost.kill()
    back.kill()
    back.start()

    before = worlds(n1, n2)
    n3.leaves(signal.SIGTERM)
    meet(n1, n2, after=before)
    assert trained_by(prefix, back.endpoint) == {n.node: n.worlds[-1][1] for n in (n1, n2)}

    (leader,) = [node for node in (n1, n2) if node.worlds[-1][1] == 0]
    (other,) = {n1, n2} - {leader}
    leader.kill()  # with the world's store
    other.reaches(1)
    other.leaves(signal.SIGINT)

    n4, n5 = start("n4"), start("n5")
    meet(n4, n5)
    (tmp_path / "end").touch()
    assert [node.process.wait(PATIENCE) for node in (n4, n5)] == [0, 0]
    late = start("late")
    assert late.process.wait(PATIENCE) == 0, "the job has succeeded without it"
    assert late.worlds == []


def trained_by(prefix: str, endpoint: str) -> dict[str, int]:
    """The job's nodes with their group ranks, all of which train, as `status` has it."""
    status = [sys.executable, "-m", "elastic_etcd", "status", "job", "--json"]
    flags = [f"--etcd={endpoint}", f"--prefix={prefix}"]
    told = json.loads(subprocess.run([*status, *flags], capture_output=True, check=True).stdout)
    assert told["state"] == "training"
    assert {node["state"] for node in told["nodes"]} == {"training"}
    return {node["node"]: node["group_rank"] for node in told["nodes"]}
