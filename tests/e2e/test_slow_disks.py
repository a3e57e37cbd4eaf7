"""Disks that stand still, as a network file system does while its server fails over."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.disks import disk_that_may_stand_still, standing_still
from tests.support.etcd import EtcdServer
from tests.support.job import TTL, Job
from tests.support.processes import send
from tests.support.residue import history

pytestmark = pytest.mark.timeout(240)

TIMES = 5
DROPPED = re.compile(r"\.\.\. (\d+) bytes dropped: the disk stood still")
TOLD = re.compile(r"warning: (\d+) bytes of the workers' output dropped")


def test_r1_a_disk_that_stands_still_ends_no_world(
    job: Job, etcd: EtcdServer, tmp_path: Path
) -> None:
    """Under --log-dir and under the agents' stdout, for three times the lease's TTL."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with disk_that_may_stand_still(disk, tmp_path / "image"):
        talk = ("--fault", "chatter@step=2")
        agents = [job.start(node, *talk, log_dir=disk / node, output=disk) for node in ("n1", "n2")]
        g = job.trains(2, seconds=60)
        with standing_still(disk):
            thawed = time.monotonic() + 3 * TTL
            for _ in range(TIMES):  # each is a line of the agent's
                send(signal.SIGUSR1, [agent.pid for agent in agents])
                job.goes_on(g)
            while time.monotonic() < thawed:
                job.goes_on(g)
        job.goes_on(g)
        for agent in agents:
            job.said(agent, "bytes of the workers' output dropped")
        job.finish(*agents)
        assert {event.generation for event in job.events()} == {g}
        assert list(history(etcd, job.name)) == [g]
        for agent in agents:
            assert agent.output.count("SIGUSR1: the last events are in") == TIMES, agent.output
            assert [line for line in agent.output.splitlines() if DROPPED.search(line)]
            files = [path.read_text() for path in (disk / agent.node).rglob("*.log")]
            lost = DROPPED.findall("\n".join([agent.output, *files]))
            assert sorted(lost) == sorted(TOLD.findall(agent.output)), "each is told in the log"
