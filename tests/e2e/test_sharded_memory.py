"""Plain FSDP2 scripts that save by DCP into memory: each node its part, and a copy of another's."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.job import ROOT, TRAINERS, Agent, Job
from tests.support.savers import (
    PATIENCE,
    begun,
    memory_dir,
    outlives_a_kill_a_loss_and_a_join,
    saved,
    start,
)

pytestmark = pytest.mark.timeout(900)
SCRIPT = TRAINERS / "sharded_saver.py"


def node(job: Job, name: str, nproc: int = 1, *arguments: str) -> Agent:
    return start(job, name, *arguments, program=SCRIPT, nproc=nproc, nnodes="2:3")


@pytest.mark.nightly(part="jobs")
def test_a_killed_worker_and_a_lost_node_cost_the_steps_since_the_last_checkpoint(
    job: Job,
) -> None:
    workers = {"n1": 1, "n2": 2, "n3": 1}
    outlives_a_kill_a_loss_and_a_join(job, lambda name: node(job, name, workers[name]), world=4)
    assert [path.name for path in memory_dir(job).iterdir()] == []


@pytest.mark.nightly(part="jobs")
def test_a_job_that_is_lost_goes_on_from_the_disk_with_another_number_of_workers(job: Job) -> None:
    disk = str(job.directory / "disk")
    agents = [node(job, name, 1, "--disk", disk) for name in ("n1", "n2")]
    g, _, _ = begun(job, 2)
    last = saved(job, g, more=5)
    for agent in agents:
        agent.node_kill()
    agents = [node(job, name, nproc, "--disk", disk) for name, nproc in (("n1", 2), ("n2", 1))]
    g, step, _ = begun(job, 3, after=g)
    assert step >= last // 20 * 20 > 0
    assert step % 20 == 0
    saved(job, g)
    job.finish(*agents, seconds=PATIENCE)


@pytest.mark.nightly(part="jobs")
def test_the_same_script_under_torchrun_saves_to_its_disk(job: Job) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(SCRIPT), "--dir", str(job.directory), "--disk", str(job.directory / "disk")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "ELASTIC_ETCD_GENERATION": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout
        for line in first.stdout:
            if "saved" in line:
                (job.directory / "stop").touch()
    assert first.returncode == 0
    again = subprocess.run(
        command, env=env, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    step = re.search(r"begins: generation 1 rank 0 (\d+)", again.stdout)
    assert step and int(step[1]) % 20 == 0 < int(step[1])
